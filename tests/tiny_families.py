"""Small random models of families beyond Llama's, with transformers as writer and oracle."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from bench.decode.models import interleave_rotary
from tiny_gguf import ALPHABET, SPECIAL, blocks_of

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": True,
}
HEADS = {"head_dim": 32}
ODD = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 96}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(6)],
    "long_factor": [1.0 + 2.0 * i for i in range(6)],
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.6,
    "logits_scaling": 3.0,
}
ALL_ATTENTION = ["full_attention"] * 4
ALL_SLIDING = ["sliding_attention"] * 4

# A config class of transformers and its fields, by the names of families and their shapes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2Config", {**HEADS, "sliding_window": 7, "query_pre_attn_scalar": 32}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **HEADS,
            "sliding_window": 7,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 32,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "smollm3": ("SmolLM3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": (
        "Olmo3Config",
        {
            "sliding_window": 7,
            "rope_parameters": {
                "full_attention": {
                    **{name: YARN[name] for name in ("rope_type", "rope_theta", "factor")},
                    "original_max_position_embeddings": 64,
                    "attention_factor": 1.2,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "granite": ("GraniteConfig", GRANITE),
    "granite4": (
        "GraniteMoeHybridConfig",
        {
            **GRANITE,
            "shared_intermediate_size": 96,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "layer_types": ALL_ATTENTION,
            "position_embedding_type": "rope",
            "mamba_n_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 256,
            "rope_parameters": LONGROPE,
            "sliding_window": 21,
        },
    ),
    "ministral": (
        "MinistralConfig",
        {**HEADS, "sliding_window": 7, "layer_types": [*ALL_SLIDING[:3], "full_attention"]},
    ),
    "ministral3": ("Ministral3Config", {**HEADS, "rope_parameters": YARN}),
    "mimo": ("Qwen2Config", {}),
    "lfm2": (
        "Lfm2Config",
        {
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "block_multiple_of": 32,
        },
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            **HEADS,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "tie_word_embeddings": True,
        },
    ),
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2_large": ("gemma2", {"num_key_value_heads": 4, "query_pre_attn_scalar": 24}),
    "gemma3_one_kv_head": (
        "gemma3",
        {"num_key_value_heads": 1, "query_pre_attn_scalar": 20, "tie_word_embeddings": False},
    ),
    "gemma3_old_pattern": ("gemma3", {"sliding_window_pattern": 2, "rope_parameters": None}),
    "smollm3_windows": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 5, "tie_word_embeddings": False},
    ),
    "smollm3_odd": ("smollm3", {**ODD, "no_rope_layer_interval": 2}),
    "olmo2_odd": ("olmo2", {**ODD, "tie_word_embeddings": True}),
    "olmo3_no_gqa": ("olmo3", {"num_key_value_heads": 4, "sliding_window": 3}),
    "granite_tied": ("granite", {"tie_word_embeddings": True, "attention_bias": True}),
    "granite4_without_rope": ("granite4", {"position_embedding_type": "nope"}),
    "phi3_long": ("phi3", {"original_max_position_embeddings": 16}),
    "phi3_plain": ("phi3", {"rope_parameters": None, "tie_word_embeddings": True, **ODD}),
    "lfm2_odd": (
        "lfm2",
        {
            **ODD,
            "layer_types": ["full_attention", "conv", "conv", "conv"],
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2_grouped": (
        "lfm2",
        {
            "num_key_value_heads": 1,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "conv_L_cache": 2,
            "block_ffn_dim_multiplier": 1.3,
        },
    ),
    "qwen3_5_odd": (
        "qwen3_5",
        {
            **ODD,
            "layer_types": ["full_attention", *["linear_attention"] * 3],
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 40,
            "linear_conv_kernel_dim": 3,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    ),
    "qwen3_5_grouped": (
        "qwen3_5",
        {
            "num_key_value_heads": 1,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "tie_word_embeddings": False,
        },
    ),
    "ministral3_tied": ("ministral3", {"tie_word_embeddings": True, "sliding_window": 9}),
}
"""Further shapes: a family, and the fields that differ."""


def make_oracle(family: str, seed: int = 0, **more: Any) -> Any:
    """The model of transformers, in float32; with more fields of its config."""
    base, changes = SHAPES.get(family, (family, {}))
    kind, fields = FAMILIES[base]
    config = getattr(transformers, kind)(**copy.deepcopy({**SIZES, **fields, **changes, **more}))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill(model, seed)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, do_sample=False)
    return model.eval()


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int) -> None:
    """Random weights that are large enough for every layer to matter."""
    generator = torch.Generator().manual_seed(seed)
    centred = type(model).__name__.startswith(("Gemma", "Qwen3_5"))
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        if weight.ndim > 1:
            gain = 3.0 if "embed" in name or "lm_head" in name else 1.2
            drawn *= gain / math.sqrt(weight.shape[-1])
        elif name.endswith("bias"):
            drawn *= 0.3
        elif name.endswith("A_log"):
            drawn = 1.5 * drawn - 2  # some states last for long, others do not
        else:
            is_offset = centred and not name.endswith("linear_attn.norm.weight")
            drawn = 0.2 * drawn + (0.0 if is_offset else 1.0)
        weight.copy_(drawn)


def write_family(directory: Path, family: str, seed: int = 0) -> Any:
    """Write a model into a directory, as transformers saves it; the oracle is returned."""
    oracle = make_oracle(family, seed)
    oracle.save_pretrained(directory)
    if family == "mimo":
        make_mimo(directory)
    return oracle


def make_mimo(directory: Path) -> None:
    """Turn a directory of a Qwen2 into one of a MiMo, with the layer that drafts further tokens."""
    file = directory / "config.json"
    own = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    own["num_nextn_predict_layers"] = 1
    file.write_text(json.dumps({**json.loads(file.read_text()), **own}))
    tensors = load_file(directory / "model.safetensors")
    drafts = {
        name.replace("model.layers.0.", "model.mtp_layers.0."): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith("model.layers.0.")
    }
    drafts["model.mtp_layers.0.input_proj.weight"] = torch.zeros(64, 128)
    save_file(tensors | drafts, directory / "model.safetensors", {"format": "pt"})


# GGUF, as llama.cpp's own converter writes it.

GGUF_NAMES = {
    "mimo": "qwen2",
    "olmo3": "olmo2",
    "granite4": "granite",
    "ministral3": "mistral3",
    "qwen3_5": "qwen35",
}
"""llama.cpp's names of architectures, where they differ."""
INTERLEAVED = ("smollm3", "granite", "mistral3")
"""Architectures whose queries and keys are rotated in neighbouring pairs."""
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "shared_mlp.output_linear": "ffn_down",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
WHOLE_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
}


def write_family_gguf(
    path: Path,
    directory: Path,
    family: str,
    settings: dict[str, Any] | None = None,
    *,
    pre: str = "dbrx",
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """The model of a directory as a GGUF file in float32, with a byte-level tokenizer.

    ``settings`` are fields of its architecture, which win over its own, None for no such field;
    ``pre`` is how its tokenizer splits a text; ``kinds`` are the types of matrices by the parts of
    their names after the layer; ``extra`` are further tensors.
    """
    config = json.loads((directory / "config.json").read_text())
    family, _ = SHAPES.get(family, (family, {}))
    architecture = GGUF_NAMES.get(family, family)
    writer = gguf.GGUFWriter(path, architecture)
    add_settings(writer, config, family)
    for name, value in (settings or {}).items():
        for fields in writer.kv_data:
            fields.pop(f"{architecture}.{name}", None)
        add = {list: writer.add_array, bool: writer.add_bool, int: writer.add_uint32}
        if value is not None:
            add[type(value)](f"{architecture}.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*ALPHABET[:255], "he", *SPECIAL])  # a merge and what it makes
    writer.add_token_types([1] * 256 + [3] * 4)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)

    def add_tensor(name: str, array: np.ndarray) -> None:
        kind = (kinds or {}).get(name.split(".", 2)[-1].removesuffix(".weight"))
        written = array if kind is None else blocks_of(array, kind)
        writer.add_tensor(name, written, raw_dtype=kind)

    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if "mtp_layers" in name or name.startswith("mtp."):
            continue
        for stored, values in stored_tensors(name, tensor, architecture, config):
            add_tensor(stored, values.contiguous().numpy())
    for name, array in (extra or {}).items():
        add_tensor(name, array)
    if config["rope_parameters"].get("rope_type") == "longrope":
        for kind in ("short", "long"):
            factors = torch.tensor(config["rope_parameters"][f"{kind}_factor"])
            writer.add_tensor(f"rope_factors_{kind}.weight", factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_tensors(
    name: str, tensor: torch.Tensor, architecture: str, config: dict[str, Any]
) -> list[tuple[str, torch.Tensor]]:
    """A checkpoint's tensor as a GGUF file stores it."""
    layer, part, kind = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.*)\.(\w+)", name).groups()
    is_centred = architecture.startswith(("gemma", "qwen35")) and part != "linear_attn.norm"
    if is_centred and part.endswith("norm"):
        tensor = tensor + 1
    for projection, heads in (("q_proj", "attention"), ("k_proj", "key_value")):
        if part.endswith(projection) and architecture in INTERLEAVED:
            rows = interleave_rotary(tensor.numpy(), config[f"num_{heads}_heads"])
            tensor = torch.from_numpy(rows)
    if part in ("conv.conv", "linear_attn.conv1d"):
        tensor = tensor.squeeze(1)
    if part.startswith("linear_attn"):
        tensor = with_tiled_heads(tensor, f"{part}.{kind}", config)
    if kind in ("A_log", "dt_bias"):
        stored = {"A_log": ("ssm_a", -tensor.exp()), "dt_bias": ("ssm_dt.bias", tensor)}[kind]
        return [(f"blk.{layer}.{stored[0]}", stored[1])]
    if layer is None:
        return [(f"{WHOLE_NAMES[part]}.{kind}", tensor)]
    if part == "shared_mlp.input_linear":
        halves = zip(("ffn_gate", "ffn_up"), tensor.chunk(2), strict=True)
        return [(f"blk.{layer}.{half}.weight", rows) for half, rows in halves]
    after = architecture in ("gemma2", "gemma3", "olmo2", "qwen35")
    norm = {"post_attention_layernorm": "post_attention_norm" if after else "ffn_norm"}
    return [(f"blk.{layer}.{(LAYER_NAMES | norm)[part]}.{kind}", tensor)]


def with_tiled_heads(tensor: torch.Tensor, name: str, config: dict[str, Any]) -> torch.Tensor:
    """A tensor of a gated delta rule with its value heads in llama.cpp's order: head ``v`` belongs
    to key head ``v % num_key_heads``."""
    num_keys, num_values = (config[f"linear_num_{kind}_heads"] for kind in ("key", "value"))
    order = [
        head
        for first in range(num_values // num_keys)
        for head in range(first, num_values, num_values // num_keys)
    ]
    size = config["linear_value_head_dim"]
    first = 2 * num_keys * config["linear_key_head_dim"]
    if name in ("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight"):
        heads = tensor[first:].split(size)
        return torch.cat([tensor[:first], *(heads[head] for head in order)])
    if name == "linear_attn.in_proj_z.weight":
        return torch.cat([tensor.split(size)[head] for head in order])
    if name == "linear_attn.out_proj.weight":
        return torch.cat([tensor.split(size, dim=1)[head] for head in order], dim=1)
    return tensor if name == "linear_attn.norm.weight" else tensor[order]


def inner_size(config: dict[str, Any]) -> int:
    """The size of the MLP."""
    size = config["intermediate_size"]
    if not config.get("block_auto_adjust_ff_dim"):
        return size
    step = config["block_multiple_of"]
    return step * math.ceil(int(config["block_ffn_dim_multiplier"] * int(2 * size / 3)) / step)


def add_delta_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the sizes of gated delta rules, the kinds of layers, and the rotary embedding."""
    num_values = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(num_values)
    writer.add_ssm_inner_size(num_values * config["linear_value_head_dim"])
    recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    writer.add_array("qwen35.attention.recurrent_layers", recurrent)
    writer.add_full_attention_interval(4)
    partial = config["rope_parameters"]["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(config["head_dim"] * partial))
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def add_settings(writer: gguf.GGUFWriter, config: dict[str, Any], family: str) -> None:
    """Add sizes and the family's own settings."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(inner_size(config))
    writer.add_head_count(heads)
    kv_heads = config["num_key_value_heads"]
    if family == "lfm2":
        kv_heads = [0 if kind == "conv" else kv_heads for kind in config["layer_types"]]
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if family == "qwen3_5":
        add_delta_settings(writer, config)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.get("norm_eps") or config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    ropes = config["rope_parameters"]
    rope = ropes.get("full_attention", ropes)
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.get("sliding_window") and family not in ("smollm3", "mimo"):
        writer.add_sliding_window(config["sliding_window"])
    if family in ("gemma3", "olmo3"):
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_sliding_window_pattern(3 if family == "gemma3" else slides)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if family.startswith("granite"):
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if family == "gemma3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if family == "olmo3":
        writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
    if family == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "longrope":
        original = config["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * head_dim))
        writer.add_rope_scaling_orig_ctx_len(original)
        factor = math.sqrt(1 + math.log(scale) / math.log(original))
        writer.add_rope_scaling_attn_factors(factor)
