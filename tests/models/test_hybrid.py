"""LFM2 and Qwen3.5, some of whose layers have no attention: what is read, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional

import eecore
from devices import cpu_only
from eecore import ops
from eecore.config import ModelConfig
from eecore.errors import ModelError
from eecore.integrations.transformers_model import from_transformers
from eecore.lab.training.head_keys import choose_attended
from eecore.models import KVCache, convert_gguf, load_model, read_config
from eecore.models.llama import LlamaModel, LlamaWeights
from eecore.models.readers.load import load_first_layers, opened
from eecore.models.readers.stored_weights import load_weights, memory_of
from eecore.models.weights import Coding
from quantised_models import LINEAR, Quantisation, write_quantised
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
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_odd"])
def test_the_first_layers_alone(family: str, num_layers: int, tmp_path: Path) -> None:
    """A model cut after them is a fixed exit there; all of them may have attention."""
    write_family(tmp_path, family)
    whole = eecore.load(tmp_path, device="cpu", kv_cache_tokens=64)
    cut = load_first_layers(tmp_path, num_layers)
    kept = tuple(n for n in whole.config.attention_layers if n < num_layers)
    assert cut.config.attention_layers == kept
    kv = KVCache.allocate(cut.config, 1, 32, device=cut.device, dtype=cut.dtype)
    batch = cut.whole_text(len(PROMPT))
    state = cut.layers(0, num_layers, cut.embed(torch.tensor(PROMPT)), kv, batch)
    exit = eecore.FixedExit(num_layers)
    expected = eecore.generate(whole, [PROMPT], exit=exit, max_tokens=1)[0]
    assert int(cut.logits(state[-1:]).argmax()) == expected.token_ids[0]


@cpu_only
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("lfm2", torch.float32), ("qwen3_5", torch.float32), ("qwen3_5", torch.bfloat16)],
)
def test_weights_that_another_owner_changes(family: str, dtype: torch.dtype) -> None:
    with torch.no_grad():
        oracle = make_oracle(family).to(dtype)
        model = from_transformers(oracle, kv_cache_tokens=64)
        for name, parameter in oracle.model.layers.named_parameters():
            if parameter.ndim != 2:  # norms, taps, and the vectors of delta rules
                parameter.mul_(0.7 if "norm" in name else 1.3)
        other = make_oracle(family).to(dtype)
        other.load_state_dict(oracle.state_dict())
        expected = from_transformers(other, kv_cache_tokens=64)
    exit = eecore.FixedExit(1)
    got, wanted = (
        eecore.generate(each, [PROMPT], exit=exit, **OPTIONS)[0] for each in (model, expected)
    )
    assert got.token_ids == wanted.token_ids


# What cannot be


def test_a_model_of_images_is_not_adopted(qwen: Path) -> None:
    text = json.loads((qwen / "config.json").read_text())
    eyes = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=eyes)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with pytest.raises(ModelError, match=r"Qwen3_5ForCon.*expected a model of text alone, which"):
        from_transformers(model)


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


@pytest.mark.parametrize(("name", "nearest"), [("lfm2moe", "Lfm2"), ("qwen35moe", "Qwen3_5")])
def test_experts_in_a_file(name: str, nearest: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", name)
    writer.add_tensor("token_embd.weight", torch.zeros(8, 8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=rf"MoE.*the nearest that runs is {nearest}.*, got {name}"):
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
    del whole["tie_word_embeddings"]  # the tensors say it
    (tmp_path / "config.json").write_text(json.dumps(whole))
    weights = weights_of(tmp_path)
    assert weights.lm_head is weights.embed_tokens
    head = {"lm_head.weight": 2 * tensors["model.language_model.embed_tokens.weight"]}
    save_file(tensors | head, tmp_path / "model.safetensors", {"format": "pt"})
    weights = weights_of(tmp_path)
    assert torch.equal(weights.lm_head.weight, 2 * weights.embed_tokens.weight)


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


@pytest.mark.parametrize("family", DELTAS)
def test_a_gguf_file_of_delta_rules(family: str, tmp_path: Path) -> None:
    oracle = write_family(tmp_path, family)
    file = write_family_gguf(tmp_path / "t.gguf", tmp_path, family)
    own = {"architecture": "Qwen3_5ForCausalLM", "bos_token_id": 1, "eos_token_ids": (2,)}
    expected = replace(read_config(tmp_path), sampling=())
    is_tiled = expected.delta.num_value_heads > expected.delta.num_key_heads
    if not is_tiled:
        check_deltas(weights_of(file), oracle)
    delta = replace(expected.delta, tiled_heads=is_tiled)
    found = replace(read_config(file), dtype="float32", **own)
    assert found == replace(expected, delta=delta)
    converted = convert_gguf(file, tmp_path / "converted")
    check_deltas(weights_of(converted), oracle)
    assert read_config(converted).delta == expected.delta
    assert read_config(converted).ropes == expected.ropes


def coded(tensor: torch.Tensor, kind: gguf.GGMLQuantizationType) -> torch.Tensor:
    """The values that are left of a matrix in blocks."""
    blocks = gguf.quants.quantize(tensor.detach().numpy(), kind)
    return torch.from_numpy(gguf.quants.dequantize(blocks, kind))


def test_delta_rules_in_blocks_of_several_kinds(tmp_path: Path) -> None:
    """Blocks run as stored; gates are floats."""
    oracle = make_oracle("qwen3_5")
    oracle.save_pretrained(tmp_path)
    kind = gguf.GGMLQuantizationType
    kinds = {
        "attn_qkv": kind.Q8_0,
        "attn_gate": kind.Q4_1,
        "ssm_beta": kind.Q8_0,
        "ssm_alpha": kind.Q5_0,
        "ssm_out": kind.Q4_0,
        "attn_q": kind.Q5_1,
        "attn_k": kind.Q8_0,
        "attn_v": kind.Q8_0,
    }
    file = write_family_gguf(tmp_path / "t.gguf", tmp_path, "qwen3_5", kinds=kinds)
    deltas = weights_of(file).deltas
    assert deltas is not None
    first, last = (
        [ops.unpack_weight(each.weight, each.table) for each in matrix.unbind()]
        for matrix in (deltas.first, deltas.last)
    )
    for index in range(3):
        mixer = oracle.model.layers[index].linear_attn
        parts = (mixer.in_proj_qkv, kind.Q8_0), (mixer.in_proj_z, kind.Q4_1)
        expected = torch.cat([coded(part.weight, each) for part, each in parts])
        assert torch.equal(first[index], expected)
        parts = (mixer.in_proj_b, kind.Q8_0), (mixer.in_proj_a, kind.Q5_0)
        expected = torch.cat([coded(part.weight, each) for part, each in parts])
        assert torch.equal(deltas.gates.weight[index], expected)
        assert torch.equal(last[index], coded(mixer.out_proj.weight, kind.Q4_0))


def test_heads_that_share_a_key_head_run_in_the_files_order(tmp_path: Path) -> None:
    """Also where a head is less than a block; a conversion puts them back."""
    sizes = {"linear_num_value_heads": 4, "linear_value_head_dim": 16}
    oracle = make_oracle("qwen3_5", **sizes)
    oracle.save_pretrained(tmp_path / "m")
    kinds = {"ssm_out": gguf.GGMLQuantizationType.Q8_0}
    file = write_family_gguf(tmp_path / "t.gguf", tmp_path / "m", "qwen3_5", kinds=kinds)
    deltas = weights_of(file).deltas
    assert deltas is not None
    assert deltas.last.table is not None
    with opened(file) as (stored, config):
        assert isinstance(config, ModelConfig)
        assert config.delta is not None
        assert config.delta.tiled_heads
        memory = memory_of(stored, config, torch.float32)
    assert memory["model.layers.0.linear_attn.out_proj.weight"][0] == "Q8_0"
    convert_gguf(file, tmp_path / "back")
    for name, tensor in load_file(tmp_path / "back" / "model.safetensors").items():
        if "out_proj" in name:
            torch.testing.assert_close(tensor, oracle.state_dict()[name], rtol=0, atol=0.01)
        else:
            torch.testing.assert_close(tensor, oracle.state_dict()[name])


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5"])
def test_a_draft_head_sees_no_keys_of_a_model_without_attention_in_every_layer(
    family: str, tmp_path: Path
) -> None:
    write_family(tmp_path, family)
    network = load_model(tmp_path, "cpu")[1]
    assert isinstance(network, LlamaModel)
    assert choose_attended(network, 2) == ()


def test_a_layer_that_drafts_is_none_of_the_models(qwen: Path, tmp_path: Path) -> None:
    ones = torch.ones(64).numpy()
    extra = {f"blk.4.{name}.weight": ones for name in ("attn_norm", "nextn.enorm")}
    more = {"block_count": 5, "nextn_predict_layers": 1}
    more["attention.recurrent_layers"] = [True, True, True, False, False]
    file = write_family_gguf(tmp_path / "t.gguf", qwen, "qwen3_5", more, extra=extra)
    alone = write_family_gguf(tmp_path / "u.gguf", qwen, "qwen3_5")
    assert read_config(file) == read_config(alone)
    check_deltas(weights_of(file), make_oracle("qwen3_5"))


def test_every_fourth_layer_attends_unless_the_file_says_otherwise(
    qwen: Path, tmp_path: Path
) -> None:
    usual = read_config(write_family_gguf(tmp_path / "t.gguf", qwen, "qwen3_5"))
    for more in ({}, {"full_attention_interval": None}):
        none = {"attention.recurrent_layers": None, **more}
        file = write_family_gguf(tmp_path / "t.gguf", qwen, "qwen3_5", none)
        assert read_config(file) == usual


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            ({f"ssm.{name}": None}, f"qwen35.ssm.{name}: expected an integer .*got None")
            for name in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
        ),
        ({"ssm.inner_size": 65}, "ssm.inner_size: expected a multiple of ssm.time_step_rank=2"),
        ({"ssm.group_count": 4}, "num_value_heads: expected a multiple of linear_num_key_heads=4"),
        ({"attention.recurrent_layers": [True]}, "recurrent_layers: expected 4 flags, one a layer"),
        ({"attention.recurrent_layers": [True] * 4}, "layers.3.linear_attn.*missing"),
        ({"full_attention_interval": 2, "attention.recurrent_layers": None}, "layers.1.self_attn"),
        ({"nextn_predict_layers": 4}, r"nextn_predict_layers: expected an integer of 0..3, got 4"),
        ({"expert_count": 8}, "expected a dense model, got one of experts"),
    ],
)
def test_delta_rules_of_files_that_are_refused(
    settings: dict[str, Any], message: str, qwen: Path, tmp_path: Path
) -> None:
    file = write_family_gguf(tmp_path / "t.gguf", qwen, "qwen3_5", settings)
    with pytest.raises(ModelError, match=message):
        read_config(file)


# Directories of GPTQ, AWQ and compressed-tensors.

QUANTISED = (*LINEAR, "out_proj", "in_proj", "w1", "w2", "w3")
QUANTISED += tuple(f"in_proj_{part}" for part in ("qkv", "z", "b", "a"))


@pytest.mark.parametrize("layout", ["gptq", "awq", "packed"])
@pytest.mark.parametrize(
    ("family", "sizes"), [("lfm2", {}), ("qwen3_5", {"linear_num_value_heads": 8})]
)
def test_quantised_layers_without_attention(
    family: str, sizes: dict[str, Any], layout: str, tmp_path: Path
) -> None:
    """Every projection runs in its bits but the gates of delta rules, which are floats."""
    make_oracle(family, **sizes).save_pretrained(tmp_path / "floats")
    how = Quantisation(layout, symmetric=layout != "awq")
    quantised = tmp_path / "quantised"
    expected = write_quantised(tmp_path / "floats", quantised, how, QUANTISED)
    weights = weights_of(quantised)
    views = weights.by_checkpoint_name(replace(read_config(quantised), tie_word_embeddings=True))
    gates = ("in_proj_b.weight", "in_proj_a.weight")
    for name, wanted in expected.items():
        view = views[name]
        assert (view.table is None) == name.endswith(gates), name
        got = view.weight if view.table is None else ops.unpack_weight(view.weight, view.table)
        assert torch.equal(got, torch.from_numpy(wanted)), name
    assert any(name.endswith(("conv.in_proj.weight", "in_proj_qkv.weight")) for name in expected)
