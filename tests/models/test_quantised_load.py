"""GPTQ, AWQ and compressed-tensors directories run in their own bits, bit for bit what they say."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_gguf_load import floats
from test_llama import Session, tokens_for

import eecore
from eecore import ops
from eecore.errors import ModelError, UnsupportedModelError
from eecore.models import load_model
from quantised_models import LINEAR, Quantisation, write_quantised
from tiny_models import write_model

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"hidden_size": 128, "intermediate_size": 192}
FORMATS = {0: "Q4_0", 2: "Q5_0", 4: "Q8_0"}


def stacked(values: dict[str, np.ndarray], layer: int) -> dict[str, np.ndarray]:
    """The required fields of a layer's weights."""
    prefix = f"model.layers.{layer}"
    parts = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    }
    return {
        field: np.concatenate([values[f"{prefix}.{name}.weight"] for name in names])
        for field, names in parts.items()
    }


def held(matrix: ops.Matrix) -> str:
    """The form in which a matrix is held."""
    if matrix.scale is not None:
        return "int8"
    if matrix.table is None:
        return str(matrix.weight.dtype).removeprefix("torch.")
    return "+".join(sorted({FORMATS[int(place) >> 4 & 15] for place in matrix.table.flatten()}))


def values_of(matrix: ops.Matrix) -> torch.Tensor:
    if matrix.scale is not None:
        return matrix.weight.float() * matrix.scale[..., None]
    return floats(matrix)


def check_values(network: Any, expected: dict[str, np.ndarray]) -> None:
    for layer in range(network.config.num_layers):
        for field, wanted in stacked(expected, layer).items():
            got = values_of(getattr(network.weights, field))[layer].numpy()
            assert np.array_equal(got.view(np.int32), wanted.view(np.int32)), (field, layer)


CASES: dict[str, tuple[Quantisation, str]] = {
    "gptq": (Quantisation("gptq"), "Q4_0"),
    "gptq_v2": (Quantisation("gptq_v2", group_size=64), "Q4_0"),
    "gptq_asymmetric": (Quantisation("gptq", symmetric=False), "Q5_0"),
    "gptq_v2_asymmetric": (Quantisation("gptq_v2", symmetric=False), "Q5_0"),
    "gptq_rows": (Quantisation("gptq", group_size=-1), "Q4_0"),
    "gptq_8": (Quantisation("gptq", 8), "Q8_0"),
    "gptq_8_rows": (Quantisation("gptq", 8, -1), "Q8_0"),
    "gptq_8_asymmetric": (Quantisation("gptq", 8, symmetric=False), "float32"),
    "gptq_act_order": (Quantisation("gptq", scattered=True), "float32"),
    "gptq_small_groups": (Quantisation("gptq", group_size=16), "float32"),
    "gptq_bfloat16_scales": (Quantisation("gptq", scale_dtype="bfloat16"), "Q4_0"),
    "gptq_float32_scales": (Quantisation("gptq", scale_dtype="float32"), "float32"),
    "awq": (Quantisation("awq", symmetric=False), "Q5_0"),
    "awq_rows": (Quantisation("awq", group_size=-1, symmetric=False), "Q5_0"),
    "awq_64": (Quantisation("awq", group_size=64), "Q4_0"),
    "packed": (Quantisation("packed"), "Q4_0"),
    "packed_bfloat16": (Quantisation("packed", scale_dtype="bfloat16"), "Q4_0"),
    "packed_asymmetric": (Quantisation("packed", symmetric=False), "Q5_0"),
    "packed_act_order": (Quantisation("packed", scattered=True), "float32"),
    "packed_8": (Quantisation("packed", 8, 64), "Q8_0"),
    "packed_8_rows": (Quantisation("packed", 8, -1, scale_dtype="float32"), "int8"),
    "packed_whole": (Quantisation("packed", whole=True), "Q4_0"),
    "plain_rows": (Quantisation("plain", 8, -1, scale_dtype="bfloat16"), "Q8_0"),
    "plain_float32": (Quantisation("plain", 8, -1, scale_dtype="float32"), "int8"),
    "plain_groups": (Quantisation("plain", 8, 32), "Q8_0"),
    "plain_asymmetric": (Quantisation("plain", 8, -1, symmetric=False), "float32"),
    "plain_whole": (Quantisation("plain", 8, whole=True), "Q8_0"),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("quantised") / "original", "llama", **SIZES)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_what_the_method_says(case: str, original: Path, tmp_path: Path) -> None:
    how, form = CASES[case]
    expected = write_quantised(original, tmp_path / "model", how)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config, network, tokenizer = load_model(tmp_path / "model", "cpu")
    assert tokenizer is not None
    check_values(network, expected)
    fields = {
        name: held(getattr(network.weights, name)) for name in ("qkv", "o", "gate_up", "down")
    }
    assert set(fields.values()) == {form}
    assert bool(caught) == (form == "float32")
    assert all("runs as float32" in str(warning.message) for warning in caught)
    source = load_file(original / "model.safetensors")
    assert torch.equal(network.weights.lm_head.weight, source["lm_head.weight"])
    assert config == replace(load_model(original, "cpu")[0])
    token_ids = tokens_for(network, 30)
    assert Session(network, 30).logits(token_ids, [30]).isfinite().all()


def test_layers_of_other_bits_keep_theirs(original: Path, tmp_path: Path) -> None:
    """Bits are mixed within one matrix; the LM head has its own too."""
    others = {"v_proj": 8, "layers.1.mlp.down_proj": 8}
    for layout in ("gptq", "packed"):
        how = Quantisation(layout, others=others)
        expected = write_quantised(original, tmp_path / layout, how, (*LINEAR, "lm_head"))
        _, network, _ = load_model(tmp_path / layout, "cpu")
        check_values(network, expected)
        weights = network.weights
        assert held(weights.qkv) == held(weights.down) == "Q4_0+Q8_0"
        assert held(weights.lm_head) == held(weights.o) == "Q4_0"
        assert torch.equal(floats(weights.lm_head), torch.from_numpy(expected["lm_head.weight"]))


def test_a_layer_in_floats_makes_floats_of_its_kind(original: Path, tmp_path: Path) -> None:
    how = Quantisation("packed", skipped=("model.layers.2.self_attn.k_proj",))
    write_quantised(original, tmp_path / "model", how)
    with pytest.warns(UserWarning, match=r"2\.self_attn\.k_proj.*stored in floats: all of qkv"):
        _, network, _ = load_model(tmp_path / "model", "cpu")
    assert held(network.weights.qkv) == "float32"
    assert held(network.weights.o) == "Q4_0"


@pytest.fixture(scope="module", params=["gptq", "awq", "plain_float32"])
def model(
    request: pytest.FixtureRequest, original: Path, tmp_path_factory: pytest.TempPathFactory
) -> eecore.Model:
    folder = tmp_path_factory.mktemp(request.param)
    write_quantised(original, folder / "model", CASES[request.param][0])
    return eecore.load(folder / "model", kv_cache_tokens=2048)


def test_biases_of_zeros_that_a_tool_adds(original: Path, tmp_path: Path) -> None:
    expected = write_quantised(original, tmp_path / "model", Quantisation("gptq"))
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    bias = "model.layers.0.self_attn.k_proj.bias"
    save_file(tensors | {bias: torch.zeros(128)}, path)
    check_values(load_model(tmp_path / "model", "cpu")[1], expected)
    save_file(tensors | {bias: torch.ones(128)}, path)
    with pytest.raises(UnsupportedModelError, match=r"knows no .*k_proj\.bias"):
        load_model(tmp_path / "model", "cpu")


def test_settings_that_it_cannot_have(original: Path, tmp_path: Path) -> None:
    write_quantised(original, tmp_path / "model", Quantisation("awq"))
    with pytest.raises(ModelError, match=r"weights: expected None with a directory of awq, .*int8"):
        eecore.load(tmp_path / "model", weights="int8")
    assert eecore.load(tmp_path / "model", dtype="bfloat16").network.dtype == torch.bfloat16


Q = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


def changed(**parts: Any) -> Callable[[Tensors], Tensors]:
    """Replacements of a layer's tensors; None removes one."""

    def change(tensors: Tensors) -> Tensors:
        new = {f"{Q}.{part}": value for part, value in parts.items()}
        return {name: v for name, v in (tensors | new).items() if v is not None}

    return change


I32 = torch.int32


def groups(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


ACTIVATIONS = {"group_0": {"weights": {}, "input_activations": {"num_bits": 8}}}
