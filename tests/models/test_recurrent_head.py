"""The heads of eecore train-exits: what they draft, and packs that are not for a model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import eecore
from devices import cpu_only, engine_of, heads_in_floats, load
from eecore import (
    ExitError,
    HeadDrafts,
    ModelError,
    SamplingParams,
)
from eecore.models import KVCache, load_head, recurrent_head
from eecore.models.readers.head_file import HeadFile, read_head_settings
from eecore.planning.proposal import MAX_AHEAD
from head_packs import Seen, reference_drafts, write_pack
from pack_head import in_blocks
from published_heads import PROMPTS, Models, drafts_of, write_target
from tiny_models import write_model
from tiny_t5 import write_t5

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a head in its directory that is mostly right."""
    directory = write_target(tmp_path_factory.mktemp("following"))
    write_pack(directory / "exits", load(directory), follows_tokens=True)
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def states_at_the_end(
    model: eecore.Model, tokens: list[int], ends: list[int]
) -> tuple[list[Any], Seen]:
    """The last token's states [hidden_size] after so many layers, and keys of all tokens."""
    network, count = model.network, len(tokens)
    kv = KVCache.allocate(network.config, 1, count, device=network.device, dtype=network.dtype)
    batch = network.whole_text(count)
    hidden, begin, states = network.embed(torch.tensor(tokens)), 0, []
    for end in ends:
        hidden = network.layers(begin, end, hidden, kv, batch)
        states.append(hidden[-1].clone())
        begin = end
    attended = model.network.draft_head.settings.attended
    keys = [(kv.k[layer, 0, :, head], kv.v[layer, 0, :, head]) for layer, head in attended]
    return states, Seen(keys, network.cos_sin(count + MAX_AHEAD, 0))


@cpu_only
@pytest.mark.parametrize("num_spare", [0, 20, 512])
@pytest.mark.parametrize("bits", [32, 4])
@pytest.mark.parametrize("name", ["recurrent following", "recurrent", "attending"])
def test_drafts_are_those_of_the_formula(
    name: str,
    bits: int,
    num_spare: int,
    models: Models,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All drafts of a batch are checked after every round."""
    model = models[name]
    pack = model.network.draft_head.path
    monkeypatch.setattr(recurrent_head, "NUM_SPARE", num_spare)
    if bits == 32:
        heads_in_floats(monkeypatch)
    head = load_head(pack, model.network)
    assert (head._head.table is None) == (bits == 32)
    others = model.config.vocab_size - len(head.vocabulary)
    num_tokens = len(head.vocabulary) + (min(others, num_spare) if bits == 4 else 0)
    assert len(head.tokens) == num_tokens
    monkeypatch.setattr(model.network, "draft_head", head)
    engine = engine_of(model)
    for prompt in PROMPTS[:3]:
        engine.add_request(
            prompt,
            exit=HeadDrafts(MAX_AHEAD, 0.0),
            sampling=SamplingParams(max_tokens=24, ignore_eos=True),
        )
    checked = same = 0
    while engine.has_unfinished:
        engine.step()
        for tokens, left, ahead in drafts_of(engine):
            states, seen = states_at_the_end(model, tokens[:-1], list(head.settings.taps))
            assert len(ahead.tokens) == min(MAX_AHEAD, left)
            drafts, probabilities = reference_drafts(
                *(pack, model, states, tokens[-1], len(ahead.tokens)),
                packed=bits == 4,
                seen=seen if head.attends else None,
                tokens=head.tokens,
            )
            checked += 1
            if bits == 4 and ahead.tokens != drafts:
                continue
            same += 1
            assert ahead.tokens == drafts
            assert ahead.probabilities == pytest.approx(
                probabilities, rel=1e-3 if bits == 32 else 0.2
            )
            if bits == 4 and num_spare == 512:
                assert {*tokens} <= {*head.tokens.tolist()}
    assert checked > 8
    assert same > 0.5 * checked


# Where heads are found


def test_a_pack_is_named_found_or_left(directory: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(directory, tmp_path / "model")
    assert load(copy).network.draft_head is not None
    assert load(copy, exits=False).network.draft_head is None
    shutil.move(copy / "exits", tmp_path / "pack")
    model = load(copy)
    assert model.network.draft_head is None
    for pack in (tmp_path / "pack", str(tmp_path / "pack")):
        assert load(copy, exits=pack).network.draft_head is not None
    with pytest.raises(ExitError, match=r"HeadDrafts: expected a model with a draft head"):
        eecore.generate(model, [1], exit=HeadDrafts())


@cpu_only
def test_a_head_in_blocks_drafts_as_the_one_in_floats(directory: Path, tmp_path: Path) -> None:
    plain = eecore.load(directory, dtype="float32", exits=False)
    pack = write_pack(tmp_path / "pack", plain, taps=(2,), inner=32, attended=((1, 0), (3, 1)))
    texts = []
    for stored in (lambda tensors: tensors, in_blocks):
        file = pack / "head.safetensors"
        save_file(stored(load_file(file)), file)
        model = eecore.load(directory, dtype="float32", exits=pack)
        outputs = eecore.generate(model, [[1, 2, 3]], max_tokens=12, exit=HeadDrafts(3, 0.0))
        texts.append((outputs[0].token_ids, outputs[0].stats.drafted, outputs[0].stats.accepted))
    assert texts[0] == texts[1]
    settings = read_head_settings(pack)
    blocks = HeadFile(pack, settings)
    assert blocks.tensors["mlp.down"].dtype == torch.uint8
    assert in_blocks(blocks.tensors).keys() == blocks.tensors.keys()


def test_a_t5_has_none(tmp_path: Path, directory: Path) -> None:
    path = write_t5(tmp_path)
    with pytest.raises(ModelError, match="exits: expected a model without an encoder"):
        load(path, exits=directory / "exits")
    with pytest.raises(ExitError, match="expected a model with a draft head"):
        eecore.generate(load(path), [5], exit=HeadDrafts())


def changed(pack: Path, **fields: Any) -> None:
    content = json.loads((pack / "head.json").read_text())
    for name, value in fields.items():
        first, _, second = name.partition("__")
        if second:
            content[first][second] = value
        else:
            content[first] = value
    (pack / "head.json").write_text(json.dumps(content))


def truncated(pack: Path) -> None:
    path = pack / "head.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def with_tensor(name: str, value: Any) -> Any:
    def change(pack: Path) -> None:
        tensors = load_file(pack / "head.safetensors")
        old = tensors.pop(name)
        new = value(old)
        if new is not None:
            tensors[name] = new
        save_file(tensors, pack / "head.safetensors")

    return change


def starting_at(first: int) -> Any:
    return lambda ids: torch.arange(first, first + len(ids), dtype=torch.int32)


def attending_to(layers: list[int], key_heads: list[int], queries: int = 128) -> Any:
    attention = {"layers": layers, "key_heads": key_heads, "queries": queries}
    return lambda pack: changed(pack, version=2, attention=attention)


BAD_PACKS: dict[str, tuple[Any, str]] = {
    "no json": (lambda p: (p / "head.json").unlink(), "exits: expected a directory with head.json"),
    "not json": (lambda p: (p / "head.json").write_text("{"), "head.json: expected JSON"),
    "another version": (lambda p: changed(p, version=3), "version: expected an integer of 1..2"),
    "attends to nothing": (lambda p: changed(p, version=2), "attention: expected an object"),
    "a layer too deep": (attending_to([4], [0]), "layers: expected a list of integers of 0..3"),
    "no layers": (attending_to([], []), "attention.layers: expected 1..64, as many as key_heads"),
    "fewer key heads": (attending_to([1, 2], [0]), "attention.layers: expected 1..64, as many as"),
    "a key head too many": (attending_to([1], [2]), "attention.key_heads: expected 0..1, got 2"),
    "other queries": (
        attending_to([1], [1], 64),
        "attention.queries: expected 128, as the",
    ),
    "no attention": (attending_to([1], [1]), "attention.norm: expected a tensor, got none"),
    "another kind": (lambda p: changed(p, kind="tree"), "kind: expected one of state and token"),
    "another model": (
        lambda p: changed(p, model__digest="00"),
        "model.digest: expected .* got 00: it was trained for another model",
    ),
    "more layers": (
        lambda p: changed(p, model__num_layers=9, taps=[9]),
        "model.num_layers: expected 4, as the model has it, got 9",
    ),
    "a tap too deep": (lambda p: changed(p, taps=[2, 5]), "taps: expected a list of integers"),
    "no last tap": (lambda p: changed(p, taps=[2]), "taps: expected ascending layers, the last"),
    "taps twice": (lambda p: changed(p, taps=[4, 4]), "taps: expected ascending layers"),
    "wide": (lambda p: changed(p, intermediate_size=25), r"mlp.gate: expected \[1, 25, 64\]"),
    "vocabulary": (lambda p: changed(p, vocabulary_size=9), r"vocabulary: expected \[9\], got"),
    "no file": (lambda p: (p / "head.safetensors").unlink(), "head.safetensors: .*got nothing"),
    "truncated": (truncated, "head.safetensors: expected a whole safetensors file"),
    "a tensor less": (with_tensor("norm", lambda _: None), "norm: expected a tensor, got none"),
    "not finite": (with_tensor("norm", lambda t: t * float("nan")), "norm: expected finite"),
    "a block less": (
        with_tensor("mlp.gate", lambda _: torch.zeros(1, 24, 20, dtype=torch.uint8)),
        r"mlp.gate: expected \[1, 24, 40\], got \[1, 24, 20\]",
    ),
    "blocks that are not finite": (
        with_tensor("mlp.gate", lambda _: torch.full((1, 24, 40), 255, dtype=torch.uint8)),
        "mlp.gate: expected finite",
    ),
    "a norm in blocks": (
        with_tensor("norm", lambda _: torch.zeros(40, dtype=torch.uint8)),
        "norm: expected a tensor of floats",
    ),
    "whole numbers": (with_tensor("norm", lambda t: t.int()), "norm: expected a tensor of floats"),
    "ids beyond": (
        with_tensor("vocabulary", starting_at(1)),
        r"vocabulary: expected ids of 0\.\.319, got 320",
    ),
    "ids below": (with_tensor("vocabulary", starting_at(-1)), r"ids of 0\.\.319, got -1"),
    "ids twice": (with_tensor("vocabulary", lambda t: t // 2), "expected ids in ascending order"),
}


@pytest.mark.parametrize("name", BAD_PACKS)
def test_a_bad_pack_is_named_and_one_beside_the_model_passed_over(
    name: str, directory: Path, tmp_path: Path
) -> None:
    spoil, message = BAD_PACKS[name]
    copy = shutil.copytree(directory, tmp_path / "model")
    spoil(copy / "exits")
    with pytest.raises(ModelError, match=message):
        load(copy, exits=copy / "exits")
    if name == "no json":  # then there is none
        assert load(copy).network.draft_head is None
        return
    with pytest.warns(UserWarning, match=message):
        assert load(copy).network.draft_head is None


def test_a_head_attends_to_no_layer_with_a_window(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", "mistral")
    model = load(directory)
    assert model.network.config.layer_windows[1]
    pack = write_pack(tmp_path / "pack", model, attended=((1, 0),))
    with pytest.raises(ModelError, match=r"attention\.layers: expected layers that attend to"):
        load(directory, exits=pack)


def test_a_path_that_is_none(directory: Path, tmp_path: Path) -> None:
    for exits, message in ((tmp_path / "nowhere", "head.json"), (7, "exits: "), (True, "exits: ")):
        with pytest.raises(ModelError, match=re.escape(message)):
            load(directory, exits=exits)


def test_info_says_what_head_there_is(
    directory: Path, tiny_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from eecore.cli.app import run

    assert run(["info", str(directory)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "draft head" in line)
    assert "beside it; 320 tokens, drafts right 50%, 40%, 30%" in line
    assert run(["info", str(directory), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["draft_head"]["taps"] == [4]
    assert run(["info", str(tiny_directory)]) == 0
    assert "draft head" not in capsys.readouterr().out


def test_generate_takes_a_pack_or_none(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from eecore.cli.app import run

    command = ["generate", str(directory), "abc", "-n", "12", "--ignore-eos", "-t", "0"]

    def text_of(*options: str) -> str:
        assert run([*command, *options]) == 0
        return capsys.readouterr().out

    plain = text_of()
    for options in ((), ("--exits", str(directory / "exits"))):
        assert text_of("--exit", "head:3", *options) == plain
    assert text_of("--exit", "auto", "--exits", "none") == plain
    for exits, message in (("none", "expected a model with a draft head"), (str(tmp_path), "got")):
        assert run([*command, "--exit", "head", "--exits", exits]) != 0
        assert message in capsys.readouterr().err
