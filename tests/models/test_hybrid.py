"""LFM2 and Qwen3.5, some of whose layers have no attention: what is read, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

import eecore
from devices import cpu_only
from eecore.errors import ModelError
from eecore.integrations.transformers_model import from_transformers
from eecore.models import KVCache, load_model, read_config
from eecore.models.llama import LlamaWeights
from eecore.models.readers.load import load_first_layers, opened
from eecore.models.readers.stored_weights import load_weights
from eecore.models.weights import Coding
from tiny_families import make_oracle, write_family, write_family_gguf
from tiny_models import random_prompts

PROMPT = random_prompts(23, seed=2)[0]
OPTIONS: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lfm2")
    write_family(made, "lfm2")
    return made


def edited(directory: Path, tmp_path: Path, **changes: Any) -> Path:
    """The model with other fields in its config.json; ``...`` takes a field out."""
    fields = json.loads((directory / "config.json").read_text()) | changes
    kept = {name: value for name, value in fields.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")
    return tmp_path


def test_the_names_of_liquids_own_files(directory: Path, tmp_path: Path) -> None:
    own = edited(
        directory,
        tmp_path,
        layer_types=...,
        full_attn_idxs=[1, 3],
        intermediate_size=7,
        block_ff_dim=96,
        tie_word_embeddings=False,
        tie_embedding=True,
    )
    assert replace(read_config(own), sampling=()) == replace(read_config(directory), sampling=())
    assert read_config(own).conv_layers == (0, 2)


@pytest.mark.parametrize("family", ["lfm2", "lfm2_odd", "lfm2_grouped"])
def test_parameters_are_counted(family: str, tmp_path: Path) -> None:
    oracle = write_family(tmp_path, family)
    assert read_config(tmp_path).num_parameters == sum(p.numel() for p in oracle.parameters())


def test_a_position_takes_a_row_of_each_convolution(directory: Path) -> None:
    config = read_config(directory)
    assert KVCache.bytes_per_token(config, torch.float32) == 4 * (2 * 2 * 2 * 16 + 2 * 64)
    states = 4 * 2 * 64
    in_float8 = KVCache.bytes_per_token(config, torch.float8_e4m3fn, torch.float32)
    assert in_float8 == 2 * 2 * 2 * 16 + states


@cpu_only
def test_a_fill_is_each_layers_own_projection(directory: Path) -> None:
    """Rows that skipped some layers, against plain PyTorch."""
    network = load_model(directory, "cpu")[1]
    kv = KVCache.allocate(network.config, 2, 4, device=network.device, dtype=network.dtype)
    assert kv.states is not None
    kv.states.fill_(torch.nan)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 64, generator=draw)
    exits, slots = torch.tensor([0, 1, 3, 4], dtype=torch.int32), torch.tensor([6, 1, 4, 3])
    network.fill_kv(hidden, exits, kv, torch.arange(4), slots)
    weights = network.weights
    for place, layer in enumerate(network.config.conv_layers):
        norm, first = weights.attention_norm[layer], weights.convolutions.first.weight[place]
        x = functional.rms_norm(hidden, (64,), norm, network.config.rms_norm_eps)
        b, _, c = (x @ first.T).chunk(3, dim=1)
        kept = kv.states[place].flatten(0, 1)
        for row in range(4):
            if exits[row] <= layer:
                torch.testing.assert_close(kept[slots[row]], (b * c)[row], rtol=1e-4, atol=1e-5)
            else:
                assert kept[slots[row]].isnan().all()


@cpu_only
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_the_first_layers_alone(directory: Path, num_layers: int) -> None:
    """A model cut after them is a fixed exit there."""
    whole = eecore.load(directory, device="cpu", kv_cache_tokens=64)
    cut = load_first_layers(directory, num_layers)
    assert cut.config.conv_layers == tuple(n for n in (0, 2) if n < num_layers)
    kv = KVCache.allocate(cut.config, 1, 32, device=cut.device, dtype=cut.dtype)
    batch = cut.whole_text(len(PROMPT))
    state = cut.layers(0, num_layers, cut.embed(torch.tensor(PROMPT)), kv, batch)
    exit = eecore.FixedExit(num_layers)
    expected = eecore.generate(whole, [PROMPT], exit=exit, max_tokens=1)[0]
    assert int(cut.logits(state[-1:]).argmax()) == expected.token_ids[0]


@cpu_only
def test_weights_that_another_owner_changes() -> None:
    with torch.no_grad():
        oracle = make_oracle("lfm2")
        model = from_transformers(oracle, kv_cache_tokens=64)
        for layer in oracle.model.layers:
            layer.operator_norm.weight.mul_(1.3)
            if hasattr(layer, "conv"):
                layer.conv.conv.weight.mul_(0.7)
        other = make_oracle("lfm2")
        other.load_state_dict(oracle.state_dict())
        expected = from_transformers(other, kv_cache_tokens=64)
    exit = eecore.FixedExit(1)
    got, wanted = (
        eecore.generate(each, [PROMPT], exit=exit, **OPTIONS)[0] for each in (model, expected)
    )
    assert got.token_ids == wanted.token_ids


# What cannot be


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_bias": True}, "conv_bias: supported are models without it, got True"),
        ({"conv_L_cache": 9}, "conv_L_cache: expected an integer of 1..8, got 9"),
        ({"layer_types": ["conv"] * 3}, "layer_types: expected a list of 4 kinds, got"),
        ({"layer_types": ["mamba"] * 4}, "layer_types: .* conv, full_attention, got 'mamba'"),
        ({"layer_types": ["full_attention"] * 4}, r"model.layers.0.self_attn.\w+.weight"),
        ({"layer_types": ["conv"] * 4}, r"model.layers.1.conv.\w+.weight"),
        ({"full_attn_idxs": [4], "layer_types": ...}, "full_attn_idxs: expected .*, got"),
        ({"block_ff_dim": 1}, "intermediate_size: expected a size that becomes 1 to .*, got 1"),
        (
            {"architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe"},
            r"a mixture of experts \(MoE\); the nearest that runs is Lfm2ForCausalLM",
        ),
    ],
)
def test_a_directory_that_is_refused(
    changes: dict[str, Any], message: str, directory: Path, tmp_path: Path
) -> None:
    step = {"block_multiple_of": 1} if "block_ff_dim" in changes else {}
    with pytest.raises(ModelError, match=message) as raised:
        load_model(edited(directory, tmp_path, **changes, **step), "cpu")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shortconv.l_cache": None}, "shortconv.l_cache: expected an integer of 1..8, got None"),
        ({"attention.head_count_kv": [0, 2, 0]}, "head_count_kv: expected 4 numbers, 0 for a con"),
        ({"attention.head_count_kv": [0, 2, 0, 1]}, "head_count_kv: expected 4 numbers, 0 for"),
        ({"attention.head_count_kv": [0, 0, 0, 0]}, "head_count_kv: expected 4 numbers, 0 for"),
        ({"attention.head_count_kv": [2, 2, 0, 2]}, "blk.0.*attn_|model.layers.0.self_attn"),
    ],
)
def test_a_file_that_is_refused(
    settings: dict[str, Any], message: str, directory: Path, tmp_path: Path
) -> None:
    file = write_family_gguf(tmp_path / "t.gguf", directory, "lfm2", settings)
    with pytest.raises(ModelError, match=message):
        read_config(file)


def test_experts_in_a_file(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "lfm2moe")
    writer.add_tensor("token_embd.weight", torch.zeros(8, 8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"MoE.*the nearest that runs is Lfm2.*, got lfm2moe"):
        read_config(tmp_path / "t.gguf")


# Qwen3.5, whose layers have gated delta rules.

DELTAS = ("qwen3_5", "qwen3_5_odd", "qwen3_5_grouped")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3_5")
    write_family(made, "qwen3_5")
    return made


def weights_of(path: Path, coding: Coding | None = None) -> LlamaWeights:
    with opened(path) as (stored, config):
        weights = load_weights(stored, config, torch.device("cpu"), torch.float32, coding=coding)
    assert isinstance(weights, LlamaWeights)
    return weights


def check_deltas(weights: LlamaWeights, oracle: Any) -> None:
    """Compare the weights of gated delta rules, and those of gated attention, with the oracle's."""
    layers, deltas = oracle.model.layers, weights.deltas
    assert deltas is not None
    mixers = [layer.linear_attn for layer in layers if hasattr(layer, "linear_attn")]
    for index, mixer in enumerate(mixers):
        first = torch.cat([mixer.in_proj_qkv.weight, mixer.in_proj_z.weight])
        gates = torch.cat([mixer.in_proj_b.weight, mixer.in_proj_a.weight])
        assert torch.equal(deltas.first.weight[index], first)
        assert torch.equal(deltas.gates.weight[index], gates)
        assert torch.equal(deltas.last.weight[index], mixer.out_proj.weight)
        assert torch.equal(deltas.taps[index], mixer.conv1d.weight[:, 0].t())
        torch.testing.assert_close(deltas.log_rate[index], mixer.A_log.data)
        assert torch.equal(deltas.dt_bias[index], mixer.dt_bias)
        assert torch.equal(deltas.norm[index], mixer.norm.weight)
    attending = [layer.self_attn for layer in layers if hasattr(layer, "self_attn")]
    for index, attention in enumerate(attending):
        q_size = attention.q_proj.weight.shape[0]
        assert torch.equal(weights.qkv.weight[index, :q_size], attention.q_proj.weight)
        assert weights.q_norm is not None
        torch.testing.assert_close(weights.q_norm[index], 1 + attention.q_norm.weight)
    assert weights.attention_norm is not None
    for norm, layer in zip(weights.attention_norm, layers, strict=True):
        torch.testing.assert_close(norm, 1 + layer.input_layernorm.weight)


@pytest.mark.parametrize("family", DELTAS)
def test_weights_of_delta_rules_are_read(family: str, tmp_path: Path) -> None:
    oracle = write_family(tmp_path, family)
    check_deltas(weights_of(tmp_path), oracle)
    theirs, config = oracle.config, read_config(tmp_path)
    assert config.num_parameters == sum(p.numel() for p in oracle.parameters())
    delta = config.delta
    assert delta is not None
    kinds = theirs.layer_types
    assert delta.layers == tuple(n for n, kind in enumerate(kinds) if kind == "linear_attention")
    assert (delta.num_key_heads, delta.num_value_heads, delta.key_dim, delta.value_dim) == (
        theirs.linear_num_key_heads,
        theirs.linear_num_value_heads,
        theirs.linear_key_head_dim,
        theirs.linear_value_head_dim,
    )
    assert (delta.taps, config.attention_gate) == (theirs.linear_conv_kernel_dim, True)
    assert config.ropes[0].rotary_dim == 8


@pytest.mark.parametrize("coding", ["int8", "int4"])
def test_gates_of_delta_rules_stay_floats(coding: Coding, qwen: Path) -> None:
    floats, coded = weights_of(qwen).deltas, weights_of(qwen, coding).deltas
    assert floats is not None
    assert coded is not None
    assert torch.equal(coded.gates.weight, floats.gates.weight)
    for matrix, exact in ((coded.first, floats.first), (coded.last, floats.last)):
        assert matrix.table is not None
        assert exact.table is None


def test_the_text_part_of_a_qwen(qwen: Path, tmp_path: Path) -> None:
    text = json.loads((qwen / "config.json").read_text())
    tied = text.pop("tie_word_embeddings")
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {
            **text,
            "attn_output_gate": True,
            "full_attention_interval": 4,
            "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "output_gate_type": "swish",
        },
        "tie_word_embeddings": tied,
        "vision_config": {},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(qwen / "model.safetensors").items()
    }
    more = {name: torch.zeros(2, 2) for name in ("mtp.fc.weight", "model.visual.pos_embed.weight")}
    save_file(tensors | more, tmp_path / "model.safetensors", {"format": "pt"})
    assert read_config(tmp_path) == replace(read_config(qwen), sampling=())
    check_deltas(weights_of(tmp_path), make_oracle("qwen3_5"))
    del whole["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert not read_config(tmp_path).tie_word_embeddings  # as in its class in transformers


@pytest.mark.parametrize("spare", [{}, {"mrope_section": [2, 1, 1], "mrope_interleaved": True}])
def test_positions_of_a_text_are_the_same_in_each_section(
    spare: dict[str, Any], qwen: Path, tmp_path: Path
) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, **spare}
    config = read_config(edited(qwen, tmp_path, rope_parameters=rope))
    assert config.ropes == read_config(qwen).ropes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 3}, "num_value_heads: expected a multiple of linear_num_key_h"),
        ({"linear_key_head_dim": 257}, "linear_key_head_dim: expected an integer of 1..256"),
        ({"layer_types": ["linear_attention"]}, "layer_types: expected a list of 4 kinds"),
        ({"layer_types": ["conv"] * 4}, "layer_types: supported are linear_attention, full_att"),
        ({"layer_types": ["full_attention"] * 4}, r"layers.0.self_attn.q_proj.weight.*missing"),
        ({"full_attention_interval": 2, "layer_types": ...}, r"layers.1.self_attn.*missing"),
        ({"linear_value_head_dim": 16}, r"conv1d.weight: expected \[160, 1, 4\]"),
        ({"linear_conv_kernel_dim": 3}, r"conv1d.weight: expected \[192, 1, 3\]"),
        ({"attn_output_gate": False}, "attn_output_gate: supported are True, got False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type: supported are 'silu', 'swish'"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act: supported are 'silu', 'swish'"),
        (
            {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"},
            "MoE.*the nearest that runs is Qwen3_5ForCausalLM",
        ),
        (
            {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
            "MoE.*the nearest that runs is Qwen3_5ForCausalLM",
        ),
    ],
)
def test_qwens_that_are_refused(
    changes: dict[str, Any], message: str, qwen: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(edited(qwen, tmp_path, **changes), "cpu")
