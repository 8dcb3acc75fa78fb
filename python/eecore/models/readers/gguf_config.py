"""The metadata of a GGUF file as a config.json, read as llama.cpp reads it.

A field of the architecture that is not read is an error, unless it is switched off.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from eecore.config import (
    MOST_HEADS,
    MOST_HIDDEN,
    MOST_INNER,
    MOST_LAYERS,
    MOST_POSITIONS,
    RopeConfig,
)
from eecore.errors import CheckpointError, UnsupportedModelError
from eecore.json_fields import ABOVE_ZERO
from eecore.models.readers.config_json import FACTORS, THETAS
from eecore.models.readers.gguf_file import GGUFFile
from eecore.models.readers.gguf_tokenizer import special_token_ids
from eecore.models.rope import frequencies
from eecore.tensor_files import shown_name
from eecore.values import shown

__all__ = ["ROPE_FACTORS", "config_values"]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ROPE_FACTORS = "rope_freqs.weight"
FIELDS = (
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
    *("expert_count", "expert_used_count", "tensor_data_layout"),
    *(f"attention.{name}" for name in ("head_count", "head_count_kv", "key_length")),
    *(f"attention.{name}" for name in ("value_length", "layer_norm_rms_epsilon", "causal")),
    *("rope.dimension_count", "rope.freq_base", "rope.scale_linear"),
    *(f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length")),
    *(f"rope.scaling.{name}" for name in ("finetuned", "attn_factor", "yarn_attn_factor")),
    *(f"rope.scaling.yarn_{name}" for name in ("ext_factor", "beta_fast", "beta_slow")),
    "rope.scaling.yarn_log_multiplier",
)
"""The fields of an architecture that are known; sizes of experts mean nothing without any."""


def config_values(file: GGUFFile) -> dict[str, Any]:
    """The config.json of a GGUF file's metadata.

    Raises:
        CheckpointError: a field is missing, or is not what it can be.
        UnsupportedModelError: the file is of another kind of model, or has a field that is not
            read.
    """
    architecture, fields = file.architecture, file.fields
    kind = fields.text("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(
            f"{file.path}: general.type: supported is model, got {shown_name(kind)}"
        )
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: general.architecture: supported are {', '.join(ARCHITECTURES)}, "
            f"got {shown_name(architecture)}"
        )
    if fields.integer(f"{architecture}.expert_count", default=0):
        raise UnsupportedModelError(f"{file.path}: expected a dense model, got one of experts")
    if fields.integer(f"{architecture}.attention.sliding_window", default=0):
        raise UnsupportedModelError(f"{file.path}: expected full attention, got a sliding window")
    _refuse_unread(file)
    if "token_embd.weight" not in file.names:
        raise CheckpointError(f"{file.path}: expected tensor token_embd.weight, got none")
    num_heads = fields.integer(f"{architecture}.attention.head_count", 1, MOST_HEADS)
    hidden_size = fields.integer(f"{architecture}.embedding_length", 1, MOST_HIDDEN)
    head_dim = fields.integer(
        f"{architecture}.attention.key_length", default=hidden_size // num_heads
    )
    if not fields.flag(f"{architecture}.attention.causal", True):
        raise UnsupportedModelError(f"{file.path}: attention.causal: supported is true, got False")
    max_position = fields.integer(f"{architecture}.context_length", 1, MOST_POSITIONS)
    vocab_size = file.shape("token_embd.weight")[0]
    bos, ends = special_token_ids(file, vocab_size)
    return {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer(f"{architecture}.feed_forward_length", 1, MOST_INNER),
        "num_hidden_layers": fields.integer(f"{architecture}.block_count", 1, MOST_LAYERS),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer(
            f"{architecture}.attention.head_count_kv", 1, num_heads, num_heads
        ),
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position,
        "rms_norm_eps": _real(file, "attention.layer_norm_rms_epsilon", 0.0, 1.0, 1e-6),
        "tie_word_embeddings": "output.weight" not in file.names,
        "attention_bias": architecture != "qwen2" and "blk.0.attn_q.bias" in file.names,
        "mlp_bias": "blk.0.ffn_up.bias" in file.names,
        "rope_parameters": _rope_parameters(file, head_dim, max_position),
        "bos_token_id": bos,
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
    }


def _refuse_unread(file: GGUFFile) -> None:
    """A field of the architecture that is not read may change what the model computes."""
    for name, value in file.unread(f"{file.architecture}.", FIELDS).items():
        raise UnsupportedModelError(
            f"{file.path}: {shown_name(name)}: supported are models without it, got {shown(value)}"
        )


def _real(file: GGUFFile, name: str, low: float, high: float, default: float) -> float:
    """A float32 value as the decimal number that was meant: 1e-05, not 9.99999975e-06."""
    value = file.fields.number(f"{file.architecture}.{name}", low, high, default)
    return float(f"{value:.7g}")


def _rope_parameters(file: GGUFFile, head_dim: int, max_position: int) -> dict[str, Any]:
    rope = f"{file.architecture}.rope"
    theta = _real(file, "rope.freq_base", *THETAS, 10000.0)
    rotary_dim = file.fields.integer(f"{rope}.dimension_count", default=head_dim)
    if rotary_dim != head_dim:
        raise UnsupportedModelError(
            f"{file.path}: rope.dimension_count: expected head_dim={head_dim}, got {rotary_dim}"
        )
    kind = file.fields.text(f"{rope}.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path}: rope.scaling.type: supported are none, linear, yarn, "
            f"got {shown_name(kind)}"
        )
    factor = 1.0 if kind == "none" else _factor(file)
    magnitude = _magnitude(file)
    if _extrapolates(file, kind):
        if ROPE_FACTORS in file.names:
            raise _unsupported(file, "scaling.type", f"none beside {ROPE_FACTORS}", kind)
        return _yarn_rope(file, theta, factor, magnitude, max_position)
    if magnitude != 1:
        raise _unsupported(file, "scaling.attn_factor", "1 without yarn", magnitude)
    if ROPE_FACTORS in file.names:
        if factor != 1:
            raise _unsupported(file, "scaling.factor", f"1 beside {ROPE_FACTORS}", factor)
        return _llama3_rope(file, theta, head_dim)
    if factor == 1:
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": "linear", "rope_theta": theta, "factor": factor}


def _unsupported(file: GGUFFile, name: str, expected: str, got: Any) -> UnsupportedModelError:
    return UnsupportedModelError(f"{file.path}: rope.{name}: supported is {expected}, got {got}")


def _factor(file: GGUFFile) -> float:
    """How far positions are stretched; 0 and what is absent are 1. ``scale_linear`` is its older
    name."""
    factors = {}
    for name in ("scaling.factor", "scale_linear"):
        value = _real(file, f"rope.{name}", 0.0, FACTORS[1], 0.0)
        if 0 < value < FACTORS[0]:
            field = f"{file.architecture}.rope.{name}"
            raise file.fields.wrong(field, f"0, or a number of at least {FACTORS[0]:g}", value)
        factors[name] = value
    factor, older = factors.values()
    if factor and older and factor != older:
        field = f"{file.architecture}.rope.scale_linear"
        raise file.fields.wrong(field, f"what rope.scaling.factor says, {factor:g}", older)
    return factor or older or 1.0


def _magnitude(file: GGUFFile) -> float:
    """The factor of cosines and sines, on top of the one that yarn has by itself."""
    names = ("attn_factor", "yarn_attn_factor")
    values = (_real(file, f"rope.scaling.{name}", ABOVE_ZERO, FACTORS[1], 1.0) for name in names)
    return math.prod(values)


def _extrapolates(file: GGUFFile, kind: str) -> bool:
    """Whether dimensions that turn often are left as they are, as yarn has it; without that yarn is
    linear. A negative ``yarn_ext_factor`` is an absent one."""
    usual = float(kind == "yarn")
    given = _real(file, "rope.scaling.yarn_ext_factor", -FACTORS[1], FACTORS[1], usual)
    if given > 0 and given != usual:
        raise _unsupported(file, "scaling.yarn_ext_factor", f"0 or {usual:g} for {kind}", given)
    return bool(usual and given != 0)


def _yarn_rope(
    file: GGUFFile, theta: float, factor: float, magnitude: float, max_position: int
) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "yarn", "rope_theta": theta, "factor": factor}
    rope["original_max_position_embeddings"] = file.fields.integer(
        f"{file.architecture}.rope.scaling.original_context_length",
        1,
        MOST_POSITIONS,
        max_position,
    )
    for name in ("beta_fast", "beta_slow"):
        if f"{file.architecture}.rope.scaling.yarn_{name}" in file.fields:
            rope[name] = _real(file, f"rope.scaling.yarn_{name}", ABOVE_ZERO, FACTORS[1], 1.0)
    log = 0.1 * math.log(factor)
    damped = _real(file, "rope.scaling.yarn_log_multiplier", 0.0, FACTORS[1], 0.0)
    if magnitude != 1 or damped:
        rope["attention_factor"] = magnitude * (log + 1) / (damped * log + 1)
    return rope


def _llama3_rope(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The settings of a file's table of frequency divisors, found by making the table again.

    GGUF keeps only the table; of Llama 3.1's settings all but the factor are the same everywhere.
    """
    if file.shape(ROPE_FACTORS) != (head_dim // 2,):
        raise CheckpointError(
            f"{file.path}: {ROPE_FACTORS}: expected [{head_dim // 2}], got "
            f"{list(file.shape(ROPE_FACTORS))}"
        )
    divisors = file.read(ROPE_FACTORS)
    factor = float(divisors.max())
    if not FACTORS[0] <= factor <= FACTORS[1]:
        raise CheckpointError(
            f"{file.path}: {ROPE_FACTORS}: expected divisors up to {FACTORS[1]:g}, got {factor:g}"
        )
    llama3 = RopeConfig(
        "llama3",
        theta,
        head_dim,
        factor=float(f"{factor:.7g}"),
        original_max_position=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    plain = RopeConfig(theta=theta, rotary_dim=head_dim)
    expected = frequencies(plain) / frequencies(llama3)
    if not torch.allclose(divisors, expected, rtol=1e-3):
        raise UnsupportedModelError(
            f"{file.path}: {ROPE_FACTORS}: expected the divisors of Llama 3.1, got others"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": llama3.factor,
        "low_freq_factor": llama3.low_freq_factor,
        "high_freq_factor": llama3.high_freq_factor,
        "original_max_position_embeddings": llama3.original_max_position,
    }
