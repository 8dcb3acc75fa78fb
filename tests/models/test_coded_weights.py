"""Models with int8 and int4 weights give what the rounded weights give, in all exit modes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_llama import Session, tokens_for
from torch import Tensor

import eecore
import reference
from eecore import ops
from eecore.models import load_model
from eecore.models.int8 import dequantise_rows, quantise_rows
from tiny_models import scale_layers, write_model

pytestmark = pytest.mark.usefixtures("one_thread")


CODINGS = ("int8", "int4")


HEADS = ("lm_head.weight", "model.embed_tokens.weight", "shared.weight")


FIVE_BITS, EIGHT_BITS = (".k_proj.weight", ".k.weight"), (".v_proj.weight", ".v.weight")


def rounded(name: str, weight: Tensor, coding: str) -> Tensor:
    """A checkpoint's matrix, rounded."""
    if weight.shape[-1] % 32 != 0:
        return dequantise_rows(*quantise_rows(weight), torch.float32)
    format = "Q5_1" if name.endswith(FIVE_BITS) else "Q4_1"
    if name in HEADS or name.endswith(EIGHT_BITS) or coding == "int8":
        format = "Q8_0"
    return reference.pack_weight(ops.quantise_weight(weight.float(), format), format)


def round_weights(directory: Path, coding: str) -> None:
    """Round the checkpoint's linear layers as a coding does."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    untied = {"model.embed_tokens.weight", "shared.weight"} if "lm_head.weight" in tensors else {}
    for name, tensor in tensors.items():
        is_table = "relative_attention_bias" in name or name in untied
        if tensor.dim() == 2 and not is_table:
            tensors[name] = rounded(name, tensor, coding)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("family", ["llama", "llama_biased", "smollm2", "qwen3"])
def test_logits_are_those_of_the_rounded_weights(family: str, coding: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path, family)
    _, quantised, _ = load_model(directory, "cpu", weights=coding)
    assert quantised.weights.down.weight.dtype == torch.uint8
    assert quantised.dtype == torch.float32
    round_weights(directory, coding)
    _, exact, _ = load_model(directory, "cpu")
    token_ids = tokens_for(exact, 41)
    most, mean = 0.5, 0.05  # states are quantised to 8 bits
    for chunks in ([41], [17, 1, 23]):
        expected = Session(exact, 41).logits(token_ids, chunks)
        error = (Session(quantised, 41).logits(token_ids, chunks) - expected).abs()
        assert error.max() < most * expected.std()
        assert error.mean() < mean * expected.std()


@pytest.mark.parametrize("coding", CODINGS)
def test_rows_that_blocks_do_not_fill_have_a_scale_each(coding: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path, intermediate_size=72)
    _, model, _ = load_model(directory, "cpu", weights=coding)
    down = model.weights.down
    assert model.weights.gate_up.table is not None
    assert down.weight.dtype == torch.int8
    stored = load_file(directory / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    got = dequantise_rows(down.weight[1], down.scale[1], torch.float32)
    assert torch.equal(got, dequantise_rows(*quantise_rows(stored), torch.float32))


@pytest.fixture(scope="module", params=CODINGS)
def quantised(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> eecore.Model:
    directory = write_model(tmp_path_factory.mktemp(request.param), seed=3, num_hidden_layers=5)
    scale_layers(directory, {2: 0.2, 3: 0.1, 4: 0.2})
    return eecore.load(directory, device="cpu", weights=request.param, kv_cache_tokens=2048)


@pytest.mark.parametrize("weights", ["int3", "INT8", "float32", ""])
def test_other_weights_are_refused(weights: str, tmp_path: Path) -> None:
    message = f"weights: expected int8, int4 or None .* '{weights}'"
    with pytest.raises(eecore.ModelError, match=message):
        eecore.load(write_model(tmp_path), weights=weights)
