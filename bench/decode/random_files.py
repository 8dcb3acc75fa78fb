"""GGUF files of real sizes with random blocks: what a run costs does not depend on their values."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from bench.decode.models import RANDOM_LLAMA, add_settings, write
from tests.packed_blocks import random_blocks

LLAMA_1B = {
    **RANDOM_LLAMA,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
"""The sizes of Llama-3.2-1B."""

LLAMA_8B = {
    **LLAMA_1B,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
"""The sizes of Llama-3.1-8B."""

OURO = {
    **RANDOM_LLAMA,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "vocab_size": 49152,
    "num_loops": 4,
    "tie_word_embeddings": False,
}
"""The sizes of Ouro-1.4B, without its second pair of norms and its gate."""

NANBEIGE = {
    **OURO,
    "hidden_size": 3072,
    "intermediate_size": 10496,
    "num_hidden_layers": 22,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "vocab_size": 166144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 7e7},
    "num_loops": 2,
}
"""The sizes of Nanbeige4.2-3B, with the MLPs of Nanbeige4.1-3B."""

LFM2_350M = {
    **RANDOM_LLAMA,
    "model_type": "lfm2",
    "hidden_size": 1024,
    "intermediate_size": 4608,
    "num_attention_heads": 16,
    # Layers without keys and values are short convolutions.
    "num_key_value_heads": [8 if layer in (2, 5, 8, 10, 12, 14) else 0 for layer in range(16)],
    "vocab_size": 65536,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "taps": 3,
}
"""The sizes of LFM2-350M."""

QWEN35_08B = {
    **RANDOM_LLAMA,
    "model_type": "qwen35",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "head_dim": 256,
    "vocab_size": 248320,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
    "rms_norm_eps": 1e-6,
    # Every fourth layer has attention, the others have gated delta rules.
    "attention_interval": 4,
    "delta_heads": 16,
    "delta_dim": 128,
    "taps": 4,
}
"""The sizes of Qwen3.5-0.8B, without its layer that drafts."""

WIDE = ("token_embd.weight", "output.weight")
"""Matrices that Q4_K_M has in Q6_K, as it has values and the last matrix of every other layer."""


def make_random_gguf(file: Path, config: dict[str, Any] = LLAMA_1B, matrices: str = "Q4_K") -> Path:
    """Write random blocks: of the formats that Q4_K_M has, or all Q8_0.

    Args:
        config: sizes; with ``num_loops`` those of a Nanbeige.
        matrices: Q4_K or Q8_0.
    """
    is_mixed, architecture = matrices == "Q4_K", config["model_type"]
    writer = gguf.GGUFWriter(file, "nanbeige" if "num_loops" in config else architecture)
    add_settings(writer, config)
    if "num_loops" in config:
        writer.add_uint32("nanbeige.num_loops", config["num_loops"])
        writer.add_bool("nanbeige.skip_loop_final_norm", False)
    if architecture == "lfm2":
        writer.add_shortconv_l_cache(config["taps"])
    if architecture == "qwen35":
        add_delta_settings(writer, config)
    writer.add_file_type(gguf.LlamaFileType["MOSTLY_Q4_K_M" if is_mixed else "MOSTLY_Q8_0"])
    writer.add_tokenizer_model("none")
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 1 or shape[1] < 32:  # of norms and convolutions
            decays = name.endswith("ssm_a")
            writer.add_tensor(name, np.full(shape, -1 if decays else 1, np.float32))
            continue
        is_wide = name in WIDE or name.endswith(("attn_v.weight", "ffn_down.weight"))
        if is_wide and name not in WIDE:
            is_wide = int(name.split(".")[1]) % 2 == 1
        kind = "Q6_K" if is_mixed and is_wide else matrices
        writer.add_tensor(name, blocks_of(kind, shape), raw_dtype=gguf.GGMLQuantizationType[kind])
    blocks_of.cache_clear()
    write(writer)
    return file


@functools.cache
def blocks_of(kind: str, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """Random blocks, the same for all matrices of a shape: a file of 5 GB takes 1 GB of memory."""
    made: NDArray[np.uint8] = random_blocks(kind, *shape, size=shape[1] ** -0.5).numpy()
    return made


def add_delta_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the sizes of Qwen3.5's gated delta rules, and of its partial rotation."""
    writer.add_rope_dimension_count(config["head_dim"] // 4)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_full_attention_interval(config["attention_interval"])
    writer.add_ssm_conv_kernel(config["taps"])
    writer.add_ssm_state_size(config["delta_dim"])
    writer.add_ssm_group_count(config["delta_heads"])
    writer.add_ssm_time_step_rank(config["delta_heads"])
    writer.add_ssm_inner_size(config["delta_heads"] * config["delta_dim"])


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors, by their names in GGUF files."""
    hidden, architecture = config["hidden_size"], config["model_type"]
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (config["vocab_size"], hidden)}
    shapes["token_embd_norm.weight" if architecture == "lfm2" else "output_norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["output.weight"] = shapes["token_embd.weight"]
    for layer in range(config["num_hidden_layers"]):
        for name, shape in layer_shapes(config, layer).items():
            shapes[f"blk.{layer}.{name}"] = shape
    return shapes


def layer_shapes(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's tensors."""
    hidden, inner, architecture = (
        config[name] for name in ("hidden_size", "intermediate_size", "model_type")
    )
    after = "post_attention_norm" if architecture == "qwen35" else "ffn_norm"
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        f"{after}.weight": (hidden,),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
    }
    kv_heads = config["num_key_value_heads"]
    if architecture == "lfm2":
        kv_heads = kv_heads[layer]
        if not kv_heads:
            return shapes | {
                "shortconv.in_proj.weight": (3 * hidden, hidden),
                "shortconv.conv.weight": (hidden, config["taps"]),
                "shortconv.out_proj.weight": (hidden, hidden),
            }
    if architecture == "qwen35" and (layer + 1) % config["attention_interval"]:
        return shapes | delta_shapes(config)
    q_size, kv_size = (
        heads * config["head_dim"] for heads in (config["num_attention_heads"], kv_heads)
    )
    if architecture != "llama":
        shapes["attn_q_norm.weight"] = shapes["attn_k_norm.weight"] = (config["head_dim"],)
    gates = q_size if architecture == "qwen35" else 0
    return shapes | {
        "attn_q.weight": (q_size + gates, hidden),
        "attn_k.weight": (kv_size, hidden),
        "attn_v.weight": (kv_size, hidden),
        "attn_output.weight": (hidden, q_size),
    }


def delta_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of a gated delta rule's tensors, with as many heads of keys as of values."""
    hidden, heads = config["hidden_size"], config["delta_heads"]
    size = heads * config["delta_dim"]
    return {
        "attn_qkv.weight": (3 * size, hidden),
        "attn_gate.weight": (size, hidden),
        "ssm_conv1d.weight": (3 * size, config["taps"]),
        "ssm_dt.bias": (heads,),
        "ssm_a": (heads,),
        "ssm_beta.weight": (heads, hidden),
        "ssm_alpha.weight": (heads, hidden),
        "ssm_norm.weight": (config["delta_dim"],),
        "ssm_out.weight": (hidden, size),
    }
