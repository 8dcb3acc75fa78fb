"""Training data: files to sequences, sequences to batches, and an order that repeats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eecore.errors import TrainingError
from eecore.lab.training import BatchOrder, TokenData, collate, read_data
from eecore.lab.training.data import BUCKET_BATCHES, from_pairs, from_text
from eecore.models import Tokenizer
from tiny_models import write_byte_tokenizer

END = 257


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with one token per byte."""
    directory = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(directory)
    found = Tokenizer.from_directory(directory)
    assert found is not None
    return found


def read(tokenizer: Tokenizer, path: Path, **options: Any) -> TokenData:
    return read_data([path], tokenizer, **{"context": 16, "eos_token_id": END, **options})


def write(path: Path, *lines: Any) -> Path:
    text = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(text))
    return path


def test_pairs_are_the_prompt_then_the_target_and_its_end(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"input": "ab=", "target": "ba", "id": 7},
        "",
        {"input": "é", "target": "x"},
    )
    data = read(tokenizer, path)
    assert len(data) == 2
    tokens, prompt_len = data.sequence(0)
    assert tokens.tolist() == [*tokenizer.encode("ab="), *tokenizer.encode("ba"), END]
    assert prompt_len == 3
    assert data.sequence(1)[0].tolist() == [*tokenizer.encode("é"), *tokenizer.encode("x"), END]
    assert data.lengths.tolist() == [6, 4]
    assert data.digest() == read(tokenizer, path).digest()
    assert data.digest() != read(tokenizer, write(path, {"input": "ab=", "target": "b"})).digest()


def test_texts_are_packed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", {"text": "abcdef"}, {"text": "ghi"})
    plain = tmp_path / "b.txt"
    plain.write_text("jkl\n")
    options = {"context": 5, "eos_token_id": END}
    data = read_data([lines, plain], tokenizer, **options)
    whole = [*tokenizer.encode("abcdef"), END, *tokenizer.encode("ghi"), END]
    whole += [*tokenizer.encode("jkl\n"), END]
    assert data.for_decoders
    # Windows predict five tokens each, every token but the first once.
    assert [data.sequence(i)[0].tolist() for i in range(len(data))] == [
        whole[0:6],
        whole[5:11],
        whole[10:16],
    ]
    batch = collate(data, range(3))
    assert batch.targets.tokens.tolist() == whole[1:]
    assert batch.inputs["input_ids"].tolist() == [whole[0:5], whole[5:10], whole[10:15]]


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (("{",), {}, r"a.jsonl:1: expected JSON, got"),
        (({"text": "ab"}, "", ["a"]), {}, r'a.jsonl:3: expected \{"input": .* got \["a"\]'),
        (({"input": "a"},), {}, "a.jsonl:1: expected .* got .*input"),
        (({"input": "a", "target": ""},), {}, "a.jsonl:1: expected .* none empty"),
        (({"input": "a", "target": 3},), {}, "a.jsonl:1: expected"),
        (({"text": "a", "target": "b"},), {}, "a.jsonl:1: expected"),
        (({"input": "a", "target": "b"}, {"text": "c"}), {}, "a.jsonl:2: .* got both"),
        ((), {}, "a.jsonl: expected some text or pairs, got none"),
        (("  ",), {}, "a.jsonl: expected some text or pairs, got none"),
        (
            ({"input": "a", "target": "b"}, {"input": "a", "target": 16 * "b"}),
            {"truncate_inputs": True},
            "a.jsonl:2: expected a target of at most 15 tokens, its end included, .* got 17",
        ),
        (
            ({"input": 15 * "a", "target": "b"},),
            {},
            r"a.jsonl:1: expected at most context=16 tokens, got 15 of input and 2 of target",
        ),
        (({"input": "a", "target": "b"},), {"context": 1}, "context: expected 2 tokens or more"),
    ],
)
def test_bad_data_is_named_by_file_and_line(
    tokenizer: Tokenizer, tmp_path: Path, lines: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        read(tokenizer, write(tmp_path / "a.jsonl", *lines), **options)


def test_files_that_cannot_be_read_are_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"none\.txt: No such file"):
        read(tokenizer, tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(TrainingError, match=r"latin\.txt: expected UTF-8 text"):
        read(tokenizer, tmp_path / "latin.txt")


def test_inputs_are_cut_when_asked(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"input": 20 * "a", "target": "bc"})
    tokens, prompt_len = read(tokenizer, path, truncate_inputs=True).sequence(0)
    assert tokens.tolist() == [*tokenizer.encode(13 * "a"), *tokenizer.encode("bc"), END]
    assert prompt_len == 13


def test_batches_of_a_decoder() -> None:
    data = from_pairs([([5, 6], [7, 2]), ([8], [9, 10, 11, 2])])
    batch = collate(data, [0, 1])
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 7, 0], [8, 9, 10, 11]]
    # Row 0 predicts 7 and 2 at positions 1 and 2; row 1, from 4 on, all four.
    assert batch.targets.positions.tolist() == [1, 2, 4, 5, 6, 7]
    assert batch.targets.tokens.tolist() == [7, 2, 9, 10, 11, 2]


def test_batches_of_a_decoder_with_an_encoder() -> None:
    data = from_pairs([([5, 6], [7, 2]), ([8], [9, 10, 2])])
    batch = collate(data, [0, 1], decoder_start=0)
    assert batch.inputs["input_ids"].tolist() == [[5, 6], [8, 0]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert batch.inputs["decoder_input_ids"].tolist() == [[0, 7, 0], [0, 9, 10]]
    assert batch.targets.positions.tolist() == [0, 1, 3, 4, 5]
    assert batch.targets.tokens.tolist() == [7, 2, 9, 10, 2]


def test_an_epoch_has_each_sequence_once_in_batches_of_like_lengths() -> None:
    lengths = torch.randint(1, 100, (1003,), generator=torch.Generator().manual_seed(0))
    order = BatchOrder(lengths, 4, seed=7)
    assert order.steps_per_epoch == 251
    epochs = []
    for epoch in range(2):
        batches = [order.indices(epoch * 251 + step) for step in range(251)]
        assert sorted(torch.cat(batches).tolist()) == list(range(1003))
        assert sorted(map(len, batches)) == [3] + [4] * 250
        spreads = [int(lengths[batch].max() - lengths[batch].min()) for batch in batches]
        assert sum(spreads) / len(spreads) < 100 / BUCKET_BATCHES * 4
        epochs.append(torch.cat(batches).tolist())
    assert epochs[0] != epochs[1]
    # Any step by itself, in any order, is the same.
    again = BatchOrder(lengths, 4, seed=7)
    for step in (300, 2, 251, 250):
        assert again.indices(step).tolist() == order.indices(step).tolist()
    assert BatchOrder(lengths, 4, seed=8).indices(0).tolist() != order.indices(0).tolist()
    with pytest.raises(TrainingError, match="expected at least one sequence, got none"):
        BatchOrder(torch.tensor([], dtype=torch.int64), 4, 0)


def test_windows_cover_every_token_once() -> None:
    for count in (2, 6, 7, 11, 12):
        data = from_text(list(range(count)), 5)
        learnt = collate(data, range(len(data))).targets.tokens.tolist()
        assert learnt == list(range(1, count))
