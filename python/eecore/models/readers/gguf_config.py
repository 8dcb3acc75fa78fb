"""The metadata of a GGUF file as a config.json, read as llama.cpp reads it.

A field of the architecture that eecore does not read is an error, unless the field is off.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from eecore.config import (
    MAX_DELTA_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INNER,
    MAX_LAYERS,
    MAX_LOOPS,
    MAX_POSITIONS,
    MAX_TAPS,
    RopeConfig,
)
from eecore.errors import CheckpointError, UnsupportedModelError
from eecore.files.json_fields import ABOVE_ZERO, REQUIRED, JsonFields
from eecore.files.tensors import shown_name
from eecore.models.readers.config_fields import FACTORS, THETAS
from eecore.models.readers.config_json import model_type_of
from eecore.models.readers.families import FAMILIES, why_not
from eecore.models.readers.gguf_families import (
    ATTENDING_PERIOD,
    DRAFTING_LAYERS,
    GGUF_FAMILIES,
    PATTERN,
    RECURRENT,
    SLIDING_THETA,
    WINDOW,
    GGUFFamily,
)
from eecore.models.readers.gguf_file import GGUFFile
from eecore.models.readers.gguf_tokenizer import special_token_ids
from eecore.models.rope import frequencies
from eecore.values import shown

ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)
"""Tensors of divisors that stretch the rotary embedding."""
SAMPLING = {
    **{name: name for name in ("top_k", "top_p", "min_p")},
    "temp": "temperature",
    "penalty_repeat": "repetition_penalty",
}
"""The sampling settings of a GGUF file, and their names in a generation_config.json."""
ATTENTION_FACTOR = "rope.scaling.attn_factor"
"""The field of a factor of cosines and sines, multiplied with yarn's own."""
YARN_ATTENTION_FACTOR = "rope.scaling.yarn_attn_factor"
"""The field of all of yarn's own factor, which llama.cpp stores and does not read."""
FIELDS = (
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "vocab_size",
    "expert_count",
    "expert_used_count",
    "tensor_data_layout",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.causal",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    ATTENTION_FACTOR,
    YARN_ATTENTION_FACTOR,
    "rope.scaling.yarn_ext_factor",  # no effect: llama.cpp reads it for Grok alone
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier",
)
"""The known fields of an architecture; without experts their sizes have no effect."""


def config_values(file: GGUFFile) -> dict[str, Any]:
    """The config.json of a GGUF file's metadata.

    Raises:
        CheckpointError: a field is missing or wrong.
        UnsupportedModelError: the file holds another kind of model, or has a field that is not
            read.
    """
    architecture, fields = file.architecture, file.fields
    kind = fields.text("general.type", "model")
    if kind != "model":
        raise file.unsupported("general.type", "is model", shown_name(kind))
    if architecture not in GGUF_FAMILIES:
        known = f"are {', '.join(GGUF_FAMILIES)}{why_not(architecture)}"
        raise file.unsupported("general.architecture", known, shown_name(architecture))
    family = GGUF_FAMILIES[architecture]
    own = file.fields_under(f"{architecture}.")
    if own.integer("expert_count", default=0):
        raise UnsupportedModelError(f"{file.path}: expected a dense model, got one of experts")
    if family.window is None and own.integer(WINDOW, default=0):
        raise UnsupportedModelError(f"{file.path}: expected full attention, got a sliding window")
    # A field of the architecture that is not read may change what the model computes.
    read = {*FIELDS, *family.fields, *family.numbers}
    read |= set() if family.window is None else {WINDOW, PATTERN}
    read |= {family.taps} - {""}
    for name, value in file.unread(f"{architecture}.", read).items():
        raise file.unsupported(shown_name(name), "are models without it", shown(value))
    if "token_embd.weight" not in file.names:
        raise CheckpointError(f"{file.path}: expected tensor token_embd.weight, got none")
    num_heads = own.integer("attention.head_count", 1, MAX_HEADS)
    hidden_size = own.integer("embedding_length", 1, MAX_HIDDEN)
    head_dim = own.integer("attention.key_length", default=hidden_size // num_heads)
    if not own.flag("attention.causal", True):
        raise file.unsupported("attention.causal", "is true", False)
    max_position = own.integer("context_length", 1, MAX_POSITIONS)
    vocab_size = file.shape("token_embd.weight")[0]
    bos, ends = special_token_ids(file, vocab_size)
    num_layers = drafting_layers(file).start
    rope, partial = _rope_parameters(file, own, family, head_dim, max_position)
    eps = FAMILIES[family.architecture].norm_eps
    values = {
        "architectures": [family.architecture],
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": own.integer("feed_forward_length", 1, MAX_INNER),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position,
        eps: _real(own, "attention.layer_norm_rms_epsilon", 0.0, 1.0),
        "tie_word_embeddings": "output.weight" not in file.names,
        "attention_bias": architecture != "qwen2"
        and any(name.endswith(".attn_q.bias") for name in file.names),
        "mlp_bias": "blk.0.ffn_up.bias" in file.names,
        "rope_parameters": rope,
        "bos_token_id": bos,
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
    }
    if partial != FAMILIES[family.architecture].defaults.get("partial_rotary_factor", 1.0):
        values["partial_rotary_factor"] = partial
    if rope["rope_type"] == "longrope":
        values["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    for name, config_name in family.numbers.items():
        value = _real(own, name, 0.0, FACTORS[1], REQUIRED if name in family.required else 0.0)
        if value or name in own:
            values[config_name] = value or None
    if architecture == "granite":
        values.setdefault("attention_multiplier", None)
        values["attention_multiplier"] = values["attention_multiplier"] or head_dim**-0.5
        if not own.flag("rope.scaling.finetuned", True):
            known = "is true, which rotates, for granite"
            raise file.unsupported("rope.scaling.finetuned", known, False)
    if family.taps:
        values |= _convolutions(own, family, num_layers, num_heads)
    else:
        kv_heads = own.integer("attention.head_count_kv", 1, num_heads, num_heads)
        values["num_key_value_heads"] = kv_heads
    if family.delta_rules:
        values |= _delta_rules(own, num_layers)
    if family.large_layers:
        by_heads = num_layers == family.large_layers
        values["query_pre_attn_scalar"] = hidden_size / num_heads if by_heads else head_dim
        values["hidden_activation"] = "gelu_pytorch_tanh"
    if family.window is not None:
        _add_windows(own, family, num_layers, values)
    if loops := FAMILIES[family.architecture].loops:
        if loops not in own:
            known = "are files with it: its converter left out how many times the layers run"
            raise file.unsupported(f"{architecture}.{loops}", known, "none")
        values[loops] = own.integer(loops, 1, MAX_LOOPS)
    values["model_type"] = model_type_of(values["architectures"][0])
    return values


def drafting_layers(file: GGUFFile) -> range:
    """The numbers of the layers after the model's own, which draft further tokens."""
    own = file.fields_under(f"{file.architecture}.")
    count = own.integer("block_count", 1, MAX_LAYERS)
    return range(count - own.integer(DRAFTING_LAYERS, 0, count - 1, 0), count)


def _convolutions(
    own: JsonFields, family: GGUFFamily, num_layers: int, num_heads: int
) -> dict[str, Any]:
    """The kinds of layers, by their numbers of key heads, and the sizes of both kinds."""
    counts = own.integers("attention.head_count_kv", 0, num_heads, most=MAX_LAYERS)
    different = sorted(set(counts) - {0})
    if len(counts) != num_layers or len(different) != 1:
        expected = f"{num_layers} numbers, 0 for a convolution and else the same"
        raise own.wrong("attention.head_count_kv", expected, list(counts))
    return {
        "num_key_value_heads": different[0],
        "layer_types": ["full_attention" if count else "conv" for count in counts],
        "conv_L_cache": own.integer(family.taps, 1, MAX_TAPS),
        "block_auto_adjust_ff_dim": False,
    }


def _delta_rules(own: JsonFields, num_layers: int) -> dict[str, Any]:
    """The kinds of layers, and the sizes of gated delta rules."""
    num_heads = own.integer("ssm.time_step_rank", 1, MAX_HEADS)
    inner_size = own.integer("ssm.inner_size", 1, MAX_HEADS * MAX_DELTA_DIM)
    if inner_size % num_heads:
        expected = f"a multiple of ssm.time_step_rank={num_heads}"
        raise own.wrong("ssm.inner_size", expected, inner_size)
    values = {
        "linear_num_key_heads": own.integer("ssm.group_count", 1, MAX_HEADS),
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": own.integer("ssm.state_size", 1, MAX_DELTA_DIM),
        "linear_value_head_dim": inner_size // num_heads,
        "linear_conv_kernel_dim": own.integer("ssm.conv_kernel", 1, MAX_TAPS),
        "full_attention_interval": own.integer(ATTENDING_PERIOD, 1, MAX_LAYERS, 4),
    }
    if RECURRENT in own:
        flags = own.values[RECURRENT]
        if not isinstance(flags, list) or len(flags) < num_layers:
            raise own.wrong(RECURRENT, f"{num_layers} flags, one a layer", flags)
        kinds = ("full_attention", "linear_attention")
        values["layer_types"] = [kinds[bool(flag)] for flag in flags[:num_layers]]
    return values


def _add_windows(
    own: JsonFields, family: GGUFFamily, num_layers: int, values: dict[str, Any]
) -> None:
    """Add the layers' sliding windows and, if any, the rotary embedding of each kind of layer."""
    window = own.integer(WINDOW, 0, MAX_POSITIONS, family.window)
    values["sliding_window"] = window or None
    usual = FAMILIES[family.with_windows or family.architecture].window_period
    if not usual:  # all layers have one
        return
    pattern = own.values.get(PATTERN, usual)
    if isinstance(pattern, list):
        slides = [bool(each) for each in pattern]
        if len(slides) != num_layers:
            raise own.wrong(PATTERN, f"{num_layers} flags, one a layer", len(slides))
    else:
        period = own.integer(PATTERN, 1, MAX_LAYERS, usual)
        slides = [(layer + 1) % period != 0 for layer in range(num_layers)]
    kinds = ("full_attention", "sliding_attention")
    typed = [kinds[slide and window > 0] for slide in slides]
    if family.with_windows and "sliding_attention" not in typed:
        return
    values["architectures"] = [family.with_windows or family.architecture]
    values["layer_types"] = typed
    if family.sliding_theta is None and SLIDING_THETA not in family.fields:
        return
    rope = values["rope_parameters"]
    base = rope["rope_theta"] if family.sliding_theta is None else family.sliding_theta
    theta = _real(own, SLIDING_THETA, *THETAS, base)
    sliding = {"rope_type": "default", "rope_theta": theta}
    values["rope_parameters"] = dict(zip(kinds, (rope, sliding), strict=True))


def generation_values(file: GGUFFile) -> dict[str, Any]:
    """The sampling settings of a GGUF file under their names in a generation_config.json.

    Settings that eecore does not support keep llama.cpp's names.
    """
    values = file.fields_under("general.sampling.").values
    found = {
        SAMPLING.get(name, f"general.sampling.{name}"): float(f"{value:.7g}")
        if isinstance(value, float)
        else value
        for name, value in values.items()
    }
    for name, off in (("top_k", 0), ("temperature", 0.0)):  # lower values also mean off
        if isinstance(found.get(name), (int, float)) and found[name] < off:
            found[name] = off
    return found


def _real(own: JsonFields, name: str, low: float, high: float, default: Any = REQUIRED) -> float:
    """A float32 field as the intended decimal number: 1e-05, not 9.99999975e-06."""
    return float(f"{own.number(name, low, high, default):.7g}")


def _rope_parameters(
    file: GGUFFile, own: JsonFields, family: GGUFFamily, head_dim: int, max_position: int
) -> tuple[dict[str, Any], float]:
    """The rotary embedding, and the share of a head that it rotates."""
    rotary_dim = own.integer("rope.dimension_count", default=head_dim)
    partial = FAMILIES[family.architecture].partial_rotary
    if rotary_dim != head_dim and not (partial and rotary_dim in range(2, head_dim, 2)):
        raise UnsupportedModelError(
            f"{file.path}: rope.dimension_count: expected head_dim={head_dim}, got {rotary_dim}"
        )
    if LONG_FACTORS in file.names or SHORT_FACTORS in file.names:
        rope = _longrope(file, own, family, rotary_dim, max_position)
    else:
        rope = _one_rope(file, own, head_dim, max_position)
    beta = 0.0
    if "attention.temperature_scale" in family.fields:
        beta = _real(own, "attention.temperature_scale", 0.0, FACTORS[1], 0.0)
        original = own.integer(
            "rope.scaling.original_context_length", 1, MAX_POSITIONS, max_position
        )
        length = own.integer("attention.temperature_length", 0, MAX_POSITIONS, 0) or original
        if beta and length != original:
            name = "attention.temperature_length"
            raise own.wrong(name, f"the original context length, {original}", length)
        rope |= {"llama_4_scaling_beta": beta, "original_max_position_embeddings": original}
    return rope, rotary_dim / head_dim


def _longrope(
    file: GGUFFile, own: JsonFields, family: GGUFFamily, rotary_dim: int, max_position: int
) -> dict[str, Any]:
    """The rotary embedding with the file's tensors of divisors, for short and for long texts."""
    if "longrope" not in FAMILIES[family.architecture].rope_types.values():
        raise file.unsupported(LONG_FACTORS, "are models without it", "a tensor")
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": _real(own, "rope.freq_base", *THETAS, 10000.0),
        "original_max_position_embeddings": own.integer(
            "rope.scaling.original_context_length", 1, MAX_POSITIONS, max_position
        ),
        "attention_factor": _real(own, ATTENTION_FACTOR, ABOVE_ZERO, FACTORS[1], 1.0),
    }
    for key, name in (("short_factor", SHORT_FACTORS), ("long_factor", LONG_FACTORS)):
        shape = file.shape(name) if name in file.names else None
        if shape != (rotary_dim // 2,):
            got = "nothing" if shape is None else list(shape)
            raise CheckpointError(f"{file.path}: {name}: expected [{rotary_dim // 2}], got {got}")
        rope[key] = [float(f"{value:.7g}") for value in file.read(name).tolist()]
    return rope


def _one_rope(file: GGUFFile, own: JsonFields, head_dim: int, max_position: int) -> dict[str, Any]:
    theta = _real(own, "rope.freq_base", *THETAS, 10000.0)
    kind = own.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise file.unsupported("rope.scaling.type", "are none, linear, yarn", shown_name(kind))
    factor = 1.0 if kind == "none" else _factor(own)
    if kind == "yarn":
        if ROPE_FACTORS in file.names:
            raise file.unsupported("rope.scaling.type", f"is none beside {ROPE_FACTORS}", kind)
        return _yarn_rope(own, theta, factor, max_position)
    magnitude = _real(own, ATTENTION_FACTOR, ABOVE_ZERO, FACTORS[1], 1.0)
    if magnitude != 1:
        raise file.unsupported(ATTENTION_FACTOR, "is 1 without yarn", magnitude)
    if ROPE_FACTORS in file.names:
        if factor != 1:
            raise file.unsupported("rope.scaling.factor", f"is 1 beside {ROPE_FACTORS}", factor)
        return _llama3_rope(file, theta, head_dim)
    linear = {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    return {"rope_type": "default", "rope_theta": theta} if factor == 1 else linear


def _factor(own: JsonFields) -> float:
    """The factor by which positions are stretched; 0 or no field: 1. ``scale_linear`` is the older
    name of the field."""
    names = ("rope.scaling.factor", "rope.scale_linear")
    factor, older = values = [_real(own, name, 0.0, FACTORS[1], 0.0) for name in names]
    for name, value in zip(names, values, strict=True):
        if 0 < value < FACTORS[0]:
            raise own.wrong(name, f"0, or a number of at least {FACTORS[0]:g}", value)
    if factor and older and factor != older:
        raise own.wrong(names[1], f"what rope.scaling.factor says, {factor:g}", older)
    return factor or older or 1.0


def _yarn_rope(own: JsonFields, theta: float, factor: float, max_position: int) -> dict[str, Any]:
    original = "rope.scaling.original_context_length"
    rope: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": own.integer(original, 1, MAX_POSITIONS, max_position),
    }
    for name in ("beta_fast", "beta_slow"):
        if f"rope.scaling.yarn_{name}" in own:
            rope[name] = _real(own, f"rope.scaling.yarn_{name}", ABOVE_ZERO, FACTORS[1], 1.0)
    log = 0.1 * math.log(factor)
    damped = _real(own, "rope.scaling.yarn_log_multiplier", 0.0, FACTORS[1], 0.0)
    if damped or not {ATTENTION_FACTOR, YARN_ATTENTION_FACTOR}.isdisjoint(own.values):
        whole = (log + 1) / (damped * log + 1)
        whole = _real(own, YARN_ATTENTION_FACTOR, ABOVE_ZERO, FACTORS[1], whole)
        magnitude = _real(own, ATTENTION_FACTOR, ABOVE_ZERO, FACTORS[1], 1.0)
        rope["attention_factor"] = magnitude * whole
    return rope


def _llama3_rope(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3.1's settings for a file's table of divisors, checked by computing the table again.

    GGUF stores only the table; all settings but the factor are the same for all models.
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
    settings: dict[str, Any] = {"factor": float(f"{factor:.7g}")}
    settings |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 = RopeConfig("llama3", theta, head_dim, original_max_position=8192, **settings)
    expected = frequencies(RopeConfig(theta=theta, rotary_dim=head_dim)) / frequencies(llama3)
    if not torch.allclose(divisors, expected, rtol=1e-3):
        raise UnsupportedModelError(
            f"{file.path}: {ROPE_FACTORS}: expected the divisors of Llama 3.1, got other numbers"
        )
    rope: dict[str, Any] = {"rope_type": "llama3", "rope_theta": theta, **settings}
    return rope | {"original_max_position_embeddings": llama3.original_max_position}
