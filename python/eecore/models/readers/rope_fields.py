"""The rotary embeddings that a config.json describes, one for all layers or one for each kind."""

from __future__ import annotations

import math
import warnings
from typing import Any

from eecore.config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, RopeConfig
from eecore.files.json_fields import ABOVE_ZERO, REQUIRED
from eecore.models.readers.config_fields import FACTORS, THETAS, ConfigFields
from eecore.models.readers.families import Family

ROPE_FIELDS = {
    "default": {
        "rope_theta",
        "rope_type",
        "type",
        "partial_rotary_factor",
        "llama_4_scaling_beta",
        "max_position_embeddings",
        "mrope_section",  # positions of images, which are all the same in a text
        "mrope_interleaved",
    },
    "linear": {"factor"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "finetuned",
    },
    "longrope": {
        "short_factor",
        "long_factor",
        "factor",
        "attention_factor",
        "original_max_position_embeddings",
    },
}
"""The fields that each type of rotary embedding reads; those of "default" are read for all."""
ORIGINAL = "original_max_position_embeddings"
KINDS = ("full_attention", "sliding_attention")


def read_ropes(
    fields: ConfigFields,
    family: Family,
    head_dim: int,
    max_position: int,
    slides: tuple[bool, ...],
) -> tuple[tuple[RopeConfig, ...], tuple[int | None, ...]]:
    """The rotary embeddings of a model, and for each layer the index of its own; None: it has none.

    Args:
        max_position: the model's max_position, before it is stretched.
        slides: whether each layer has a sliding window.

    Raises:
        ModelError: the type of a rotary embedding is not known, or a setting is wrong.
    """
    layers = rotated_layers(fields, len(slides))
    if (
        family.is_hybrid
        and fields.choice("position_embedding_type", ("rope", "nope"), "nope") == "nope"
    ):
        layers = [False] * len(slides)
    if family.sliding_theta is None:
        rope = _of_all_layers(fields, family, head_dim, max_position)
        return (rope,), tuple(0 if rotates else None for rotates in layers)
    full, sliding = _by_kind(fields, family, head_dim, max_position)
    if full == sliding or len(set(slides)) == 1:  # one is enough
        return (sliding if slides[0] else full,), (0,) * len(slides)
    return (full, sliding), tuple(int(slide) for slide in slides)


def rotated_layers(fields: ConfigFields, num_layers: int) -> list[bool]:
    """Whether each layer has a rotary embedding at all."""
    interval = fields.integer("no_rope_layer_interval", 1, MAX_LAYERS, None)
    given = fields.integers("no_rope_layers", 0, 1, None, most=MAX_LAYERS)
    if interval is None:
        return [True] * num_layers
    if given is None:
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if len(given) < num_layers:
        raise fields.wrong("no_rope_layers", f"a list of {num_layers} numbers", list(given))
    return [bool(rotates) for rotates in given[:num_layers]]


def _of_all_layers(
    fields: ConfigFields, family: Family, head_dim: int, max_position: int
) -> RopeConfig:
    """The rotary embedding of all layers: if two fields describe it, that of ``rope_scaling``, as
    in transformers."""
    given = [fields.inner(name) for name in ("rope_scaling", "rope_parameters")]
    none = ConfigFields({}, fields.where, fields.error, "rope_parameters.")
    found = [rope for rope in given if rope is not None and rope.names] or [none]
    ropes = [_rope_of(rope, fields, family, head_dim, max_position) for rope in found]
    if ropes[0] != ropes[-1]:
        warnings.warn(
            f"{fields.where}: rope_parameters: expected what rope_scaling says, got another "
            "rotary embedding; rope_scaling is used",
            stacklevel=2,
        )
    return ropes[0]


def _by_kind(
    fields: ConfigFields, family: Family, head_dim: int, max_position: int
) -> tuple[RopeConfig, RopeConfig]:
    """The rotary embeddings of layers with full attention and of layers with a sliding window.

    ``rope_parameters`` has one set for each kind; ``rope_scaling`` and ``rope_theta`` are for full
    attention, as in transformers.
    """
    assert family.sliding_theta is not None
    name, usual = family.sliding_theta
    thetas = {
        "full_attention": fields.number("rope_theta", *THETAS, family.theta),
        "sliding_attention": fields.number(name, *THETAS, usual) if name else usual,
    }
    nested = fields.inner("rope_parameters")
    if nested is not None and (wrong := [n for n in nested.names if n not in KINDS]):
        raise fields.unsupported(
            "rope_parameters", f"one set for each of {', '.join(KINDS)}", wrong
        )
    ropes = []
    for kind in KINDS:
        rope = None if nested is None else nested.inner(kind)
        values = {} if rope is None else rope.values
        if kind == "full_attention":
            scaling = fields.inner("rope_scaling")
            values |= {} if scaling is None else scaling.values
        values.setdefault("rope_theta", thetas[kind])
        of_kind = ConfigFields(values, fields.where, fields.error, f"rope_parameters.{kind}.")
        ropes.append(_rope_of(of_kind, fields, family, head_dim, max_position))
    return ropes[0], ropes[1]


def _rope_of(
    rope: ConfigFields, fields: ConfigFields, family: Family, head_dim: int, max_position: int
) -> RopeConfig:
    for name in rope.names:
        if rope.has_inner(name):
            raise fields.unsupported("rope_parameters", "one set for all layers", rope.names)
    partial = rope.number(
        "partial_rotary_factor", default=fields.number("partial_rotary_factor", default=1.0)
    )
    if partial != 1 and not (family.partial_rotary and 0 < partial < 1):
        raise rope.unsupported("partial_rotary_factor", "1", partial)
    rotary_dim = int(head_dim * partial)
    given = rope.text("rope_type", rope.text("type", "default"))
    rope_type = family.rope_types.get(given, given)
    if rope_type not in ROPE_FIELDS:
        raise rope.unsupported("rope_type", ", ".join(ROPE_FIELDS), given)
    unread = set(rope.names) - ROPE_FIELDS["default"] - ROPE_FIELDS[rope_type]
    if "llama_4_scaling_beta" in rope:
        unread.discard(ORIGINAL)
    for name in sorted(unread):
        warnings.warn(
            f"{rope.where}: {rope.prefix}{name}: expected no such field for a rope_type of "
            f"{rope_type}; it is not used",
            stacklevel=2,
        )
    theta = rope.number("rope_theta", *THETAS, fields.number("rope_theta", *THETAS, family.theta))
    original = rope.integer(ORIGINAL, 1, MAX_POSITIONS, max_position)
    original = fields.integer(ORIGINAL, 1, MAX_POSITIONS, original)
    beta = rope.number("llama_4_scaling_beta", 0.0, FACTORS[1], 0.0)
    settings: dict[str, Any] = {"query_scale_beta": beta} if beta else {}
    if rope_type in ("linear", "llama3", "yarn"):
        default = max_position / original if rope_type == "yarn" else REQUIRED
        settings["factor"] = rope.number("factor", *FACTORS, default)
    if rope_type in ("llama3", "yarn", "longrope") or beta:
        settings["original_max_position"] = original
    if rope_type == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            settings[name] = rope.number(name, ABOVE_ZERO, FACTORS[1])
    if rope_type == "yarn":
        for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            settings[name] = rope.number(name, 0.0, FACTORS[1], 0.0) or usual
        settings["truncate"] = rope.flag("truncate", True)
        settings["attention_factor"] = _yarn_attention_factor(rope, settings["factor"])
    if rope_type == "longrope":
        settings |= _longrope_settings(rope, rotary_dim // 2, max_position, original)
    return RopeConfig(rope_type, theta=theta, rotary_dim=rotary_dim, **settings)


def _yarn_attention_factor(rope: ConfigFields, factor: float) -> float:
    """The factor of cosines and sines, by default from the logarithm of the factor (YaRN §3.3)."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given: float | None = rope.number("attention_factor", ABOVE_ZERO, FACTORS[1], None)
    if given is not None:
        return given
    above, below = (
        rope.number(name, 0.0, FACTORS[1], 0.0) for name in ("mscale", "mscale_all_dim")
    )
    return mscale(above) / mscale(below) if above and below else mscale(1.0)


def _longrope_settings(
    rope: ConfigFields, num_pairs: int, max_position: int, original: int
) -> dict[str, Any]:
    """The divisors of frequencies, and the factor of attention: LongRoPE §3.4 (Phi-3)."""
    settings: dict[str, Any] = {}
    for name in ("short_factor", "long_factor"):
        divisors = rope.numbers(name, ABOVE_ZERO, FACTORS[1], most=MAX_HEAD_DIM)
        if len(divisors) != num_pairs:
            raise rope.wrong(name, f"{num_pairs} numbers, one a pair of dimensions", len(divisors))
        settings[f"{name}s"] = divisors
    factor = rope.number("factor", *FACTORS, max(max_position / original, 1.0))
    hotter = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    settings["attention_factor"] = rope.number("attention_factor", ABOVE_ZERO, FACTORS[1], hotter)
    return settings
