"""GPTQ, AWQ and compressed-tensors directories run in their own bits, bit for bit what they say."""

from __future__ import annotations

import json
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
from eecore import ConfidentExit, FixedExit, Full, SelfSpeculative, ops
from eecore.cli.app import run
from eecore.errors import CheckpointError, ModelError, UnsupportedModelError
from eecore.exits import Exit
from eecore.models import load_model
from quantised_models import LINEAR, Quantisation, write_quantised
from tiny_models import random_prompts, write_model

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"hidden_size": 128, "intermediate_size": 192}
PROMPTS = random_prompts(5, 1, 23, 9, 2, 40, seed=2)
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


@pytest.mark.parametrize("family", ["llama_tied", "llama_biased", "qwen2", "qwen3", "mistral"])
def test_every_family(family: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "original", family, **SIZES)
    expected = write_quantised(source, tmp_path / "model", Quantisation("gptq", symmetric=False))
    _, network, _ = load_model(tmp_path / "model", "cpu")
    check_values(network, expected)
    tensors = load_file(source / "model.safetensors")
    tensors |= {name: torch.from_numpy(values) for name, values in expected.items()}
    save_file(tensors, source / "model.safetensors")
    _, whole, _ = load_model(source, "cpu", "float32")
    for name in ("qkv", "o", "gate_up", "down"):
        biases = [getattr(model.weights, name).bias for model in (network, whole)]
        assert (biases[0] is None) == (biases[1] is None)
        assert biases[0] is None or torch.equal(*biases)
    token_ids = tokens_for(network, 30)
    logits = [Session(model, 30).logits(token_ids, [30]) for model in (network, whole)]
    assert (logits[0] - logits[1]).std() < 0.06 * logits[1].std()


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


def test_zero_points_of_zero(original: Path, tmp_path: Path) -> None:
    """Stored less one, they borrow from the next number of their word."""
    expected = write_quantised(original, tmp_path / "model", Quantisation("gptq", symmetric=False))
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.q_proj"
    zeros = np.arange(128 * 4 // 32 * 256, dtype=np.uint32).reshape(-1, 256)[:4] % 5
    packed = np.zeros((4, 32), np.uint32)
    for place in range(8):
        packed |= zeros[:, place::8] << np.uint32(4 * place)
    before = {f: load_file(path)[f"{name}.{f}"] for f in ("qweight", "scales")}
    words = (packed - np.uint32(0x11111111)).view(np.int32)
    tensors[f"{name}.qzeros"] = torch.from_numpy(words)
    save_file(tensors, path, {"format": "pt"})
    q = np.stack([before["qweight"].numpy() >> 4 * place & 15 for place in range(8)], 1)
    q = q.reshape(128, 256)
    scales = before["scales"].float().numpy()
    values = (q - zeros.astype(np.int32).repeat(32, 0)).astype(np.float32) * scales.repeat(32, 0)
    expected[f"{name}.weight"] = np.ascontiguousarray(values.T)
    check_values(load_model(tmp_path / "model", "cpu")[1], expected)


@pytest.fixture(scope="module", params=["gptq", "awq", "plain_float32"])
def model(
    request: pytest.FixtureRequest, original: Path, tmp_path_factory: pytest.TempPathFactory
) -> eecore.Model:
    folder = tmp_path_factory.mktemp(request.param)
    write_quantised(original, folder / "model", CASES[request.param][0])
    return eecore.load(folder / "model", kv_cache_tokens=2048)


@pytest.mark.parametrize(
    ("policy", "exact"),
    [
        (SelfSpeculative(2, 3), True),
        (FixedExit(4), True),
        (ConfidentExit(1.0), True),
        (FixedExit(2), False),
        (ConfidentExit(0.9, measure="state", batch="all"), False),
    ],
    ids=str,
)
def test_every_exit_mode(model: eecore.Model, policy: Exit, exact: bool) -> None:
    options = {"max_tokens": 12, "ignore_eos": True}
    full = [o.token_ids for o in eecore.generate(model, PROMPTS, exit=Full(), **options)]
    outputs = eecore.generate(model, PROMPTS, exit=policy, **options)
    if exact:
        assert [o.token_ids for o in outputs] == full
    alone = eecore.generate(model, PROMPTS[2], exit=policy, **options)[0]
    if getattr(policy, "batch", "each") == "each":
        assert alone.token_ids == outputs[2].token_ids


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


def test_a_tied_head_that_was_quantised_alone(tmp_path: Path) -> None:
    source = write_model(tmp_path / "original", "llama_tied", **SIZES)
    tensors = load_file(source / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, source / "model.safetensors")
    modules = (*LINEAR, "lm_head")
    expected = write_quantised(source, tmp_path / "model", Quantisation("packed"), modules)
    config, network, _ = load_model(tmp_path / "model", "cpu")
    assert not config.tie_word_embeddings
    assert torch.equal(
        floats(network.weights.lm_head), torch.from_numpy(expected["lm_head.weight"])
    )
    assert torch.equal(network.weights.embed_tokens.weight, head)


def test_settings_that_it_cannot_have(original: Path, tmp_path: Path) -> None:
    write_quantised(original, tmp_path / "model", Quantisation("awq"))
    with pytest.raises(ModelError, match=r"weights: expected None with a directory of awq, .*int8"):
        eecore.load(tmp_path / "model", weights="int8")
    assert eecore.load(tmp_path / "model", dtype="bfloat16").network.dtype == torch.bfloat16


def test_dequantised_layers_run_in_the_dtype(original: Path, tmp_path: Path) -> None:
    expected = write_quantised(original, tmp_path / "model", Quantisation("gptq", scattered=True))
    with pytest.warns(UserWarning, match="groups change within 32 columns.*runs as bfloat16"):
        _, network, _ = load_model(tmp_path / "model", "cpu", dtype="bfloat16")
    down = torch.from_numpy(expected["model.layers.1.mlp.down_proj.weight"]).bfloat16()
    assert torch.equal(network.weights.down.weight[1], down)


Q = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


def changed(**parts: Any) -> Callable[[Tensors], Tensors]:
    """Replacements of a layer's tensors; None removes one."""

    def change(tensors: Tensors) -> Tensors:
        new = {f"{Q}.{part}": value for part, value in parts.items()}
        return {name: v for name, v in (tensors | new).items() if v is not None}

    return change


I32 = torch.int32
BAD_TENSORS: list[tuple[str, Callable[[Tensors], Tensors], str]] = [
    ("gptq", changed(qzeros=None), r"expected tensor .*q_proj\.qzeros, I32 \[4, 32\], got none"),
    ("gptq", changed(scales=None), r"expected tensor .*q_proj\.scales, F32 or .*, got none"),
    ("gptq", changed(qweight=None), r"expected tensor .*q_proj\.qweight, I32 .*, got none"),
    ("gptq_act_order", changed(g_idx=None), r"expected tensor .*q_proj\.g_idx, .*, got none"),
    ("gptq", changed(qweight=torch.zeros(16, 255, dtype=I32)), r"\[16, 256\], got I32 \[16, 255\]"),
    ("gptq", changed(qweight=torch.zeros(16, 256)), r"qweight: expected I32 .*, got F32"),
    ("gptq", changed(scales=torch.zeros(4, 256, dtype=I32)), r"scales: .*, got I32 \[4, 256\]"),
    ("gptq", changed(qzeros=torch.zeros(4, 31, dtype=I32)), r"qzeros: .*, got I32 \[4, 31\]"),
    ("gptq", changed(g_idx=torch.full((128,), 4, dtype=I32)), r"groups of 0\.\.3, got 4\.\.4"),
    ("gptq", changed(g_idx=torch.full((128,), -1, dtype=I32)), r"groups of 0\.\.3, got -1\.\.-1"),
    ("gptq", changed(g_idx=torch.zeros(127, dtype=I32)), r"g_idx: .*\[128\], got I32 \[127\]"),
    ("gptq", changed(weight=torch.zeros(256, 128)), r"weight: expected none beside qweight"),
    ("awq", changed(qzeros=None), r"expected tensor .*q_proj\.qzeros, I32 \[4, 32\], got none"),
    ("awq", changed(qweight=torch.zeros(128, 31, dtype=I32)), r"\[128, 32\], got I32 \[128, 31\]"),
    ("packed", changed(weight_scale=None), r"q_proj\.weight_scale, .*, got none"),
    ("packed", changed(weight_packed=None), r"q_proj\.weight_packed, I32 .*, got none"),
    ("packed", changed(weight_shape=torch.tensor([256, 129])), r"weight_shape: .*\[256, 129\]"),
    ("packed", changed(weight=torch.zeros(256, 128)), r"weight: expected none beside weight_pac"),
    ("packed", changed(weight_g_idx=torch.full((128,), 9, dtype=I32)), r"0\.\.3, got 9\.\.9"),
    ("packed_asymmetric", changed(weight_zero_point=None), r"weight_zero_point.*got none"),
    ("packed_asymmetric", changed(weight_zero_point=torch.zeros(1, 4, dtype=I32)), r"\[32, 4\]"),
    ("packed_asymmetric", changed(weight_zero_point=torch.full((256, 4), 8).to(torch.int8)),
     r"numbers of -8\.\.7, got 8\.\.8"),
    ("plain_rows", changed(weight=torch.zeros(256, 128)), r"weight: expected I8 .*, got F32"),
    ("plain_rows", changed(weight_scale=torch.ones(256, 2)), r"\[256, 1\], got F32 \[256, 2\]"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "change", "match"), BAD_TENSORS)
def test_wrong_tensors(
    case: str, change: Callable[[Tensors], Tensors], match: str, original: Path, tmp_path: Path
) -> None:
    write_quantised(original, tmp_path / "model", CASES[case][0])
    path = tmp_path / "model" / "model.safetensors"
    save_file(change(load_file(path)), path)
    with pytest.raises(CheckpointError, match=match) as error:
        load_model(tmp_path / "model", "cpu")
    assert str(tmp_path) in str(error.value)


def groups(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


ACTIVATIONS = {"group_0": {"weights": {}, "input_activations": {"num_bits": 8}}}
BAD_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("gptq", {"bits": 3}, r"quantization_config\.bits: supported are 4 and 8, got 3"),
    ("gptq", {"bits": 2}, r"bits: supported are 4 and 8, got 2"),
    ("gptq", {"bits": None}, r"bits: supported are 4 and 8, got None"),
    ("gptq", {"quant_method": "bitsandbytes"}, r"supported are gptq, awq, .*, got 'bitsandbytes'"),
    ("gptq", {"quant_method": "fp8"}, r"quant_method: supported are gptq, .*, got 'fp8'"),
    ("gptq", {"quant_method": None}, r"quant_method: supported are gptq, .*, got 'none'"),
    ("gptq", {"checkpoint_format": "marlin"}, r"supported are gptq, gptq_v2, got 'marlin'"),
    ("gptq", {"group_size": 80}, r"groups that fill 192 columns, got groups of 80"),
    ("gptq", {"group_size": 0}, r"group_size: expected -1 or 1 and more, got 0"),
    ("gptq", {"group_size": -2}, r"group_size: expected an integer of -1\.\.1048576, got -2"),
    ("awq", {"bits": 8}, r"bits: supported are 4, got 8"),
    ("awq", {"version": "gemv"}, r"version: supported are gemm, got 'gemv'"),
    ("awq", {"version": None, "checkpoint_format": "gemv_fast"}, r"version: .*got 'gemv_fast'"),
    ("awq", {"backend": "llm-awq"}, r"backend: supported are the layout of autoawq"),
    ("awq", {"zero_point": False}, r"zero_point: supported are true, got False"),
    ("packed", {"config_groups": ACTIVATIONS}, r"group_0\.input_activations: .*weights alone"),
    ("packed", {"config_groups": {}}, r"config_groups: expected 1 to 64 groups, got 0"),
    ("packed", {"config_groups": {"W4A16": ["Linear"]}}, r"W4A16: expected an object"),
    ("packed", groups(num_bits=2), r"weights\.num_bits: supported are 4 and 8, got 2"),
    ("packed", groups(num_bits=8, type="float"), r"type: supported are int, got 'float'"),
    ("packed", groups(num_bits=4, strategy="block"), r"strategy: supported are group, .*'block'"),
    ("packed", groups(num_bits=4, strategy="group"), r"group_size: .*strategy group, got None"),
    ("packed", {"format": "float-quantized"}, r"format: supported are pack-.*'float-quantized'"),
    ("packed", {"quantization_status": "frozen"}, r"supported are compressed, got 'frozen'"),
    ("packed", {"kv_cache_scheme": {"num_bits": 8}}, r"kv_cache_scheme: supported are null"),
    ("packed", {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"format: supported .*dense"),
    ("packed", {"transform_config": {"config_groups": {}}}, r"transform_config: supported are non"),
    ("plain_rows", groups(num_bits=4, strategy="channel"), r"num_bits: supported are 8, got 4"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "changes", "match"), BAD_CONFIGS)
def test_configs_that_are_not_read(
    case: str, changes: dict[str, Any], match: str, original: Path, tmp_path: Path
) -> None:
    write_quantised(original, tmp_path / "model", CASES[case][0])
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=match):
        load_model(tmp_path / "model", "cpu")


def test_the_command_line_takes_it(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_quantised(original, tmp_path / "model", Quantisation("gptq", others={"v_proj": 8}))
    assert run(["generate", str(tmp_path / "model"), "hello", "-n", "4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) <= 4
    assert run(["info", str(tmp_path / "model"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["stored_dtypes"] == ["F32", "gptq int4", "gptq int8"]
    layer = "model.layers.0.self_attn"
    assert facts["tensors"][f"{layer}.q_proj.weight"] == {"type": "gptq int4 as Q4_0", "bits": 4.5}
    assert facts["tensors"][f"{layer}.v_proj.weight"] == {"type": "gptq int8 as Q8_0", "bits": 8.5}
    assert facts["tensors"]["lm_head.weight"] == {"type": "F32", "bits": 32}
    weights = eecore.load(tmp_path / "model").network.weights
    matrices = [weights.qkv, weights.o, weights.gate_up, weights.down, weights.lm_head]
    norms = [weights.final_norm, weights.attention_norm, weights.mlp_norm]
    read = sum(matrix.weight.nbytes for matrix in matrices) + sum(norm.nbytes for norm in norms)
    assert facts["bytes_per_token"] == read
    assert facts["weight_bytes"] == read + weights.embed_tokens.weight.nbytes
    assert run(["info", str(tmp_path / "model")]) == 0
    table = capsys.readouterr().out
    assert "gptq int8 as Q8_0 (8.5 bits)" in table
    assert "read a token" in table
