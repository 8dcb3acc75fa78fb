"""A Hugging Face ``config.json`` (and ``generation_config.json``) read into a model's config.

Both spellings are understood: ``rope_theta``, ``rope_scaling``, ``torch_dtype`` of transformers 4
and ``rope_parameters``, ``dtype`` of transformers 5. What is not understood is an error, not a
default.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eecore.config import Activation, AnyModelConfig, ModelConfig, RopeConfig, T5Config
from eecore.errors import CheckpointError, ModelError, ModelNotFoundError, UnsupportedModelError

REQUIRED = object()


@dataclass(frozen=True)
class _Family:
    """What an architecture leaves out of its config.json because it is always so."""

    max_position: int
    head_dim: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: str = "none"
    """Sliding windows: "none", of "all" layers, or "some" of them."""


FAMILIES = {
    "LlamaForCausalLM": _Family(max_position=2048),
    "MistralForCausalLM": _Family(max_position=131072, windows="all"),
    "Qwen2ForCausalLM": _Family(max_position=32768, qkv_bias=True, windows="some"),
    "Qwen3ForCausalLM": _Family(max_position=32768, head_dim=128, qk_norm=True, windows="some"),
}
T5_ARCHITECTURES = ("T5ForConditionalGeneration", "MT5ForConditionalGeneration")
T5_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gated-gelu": "gelu_tanh",  # what the name has always meant in transformers
    "gated-silu": "silu",
}


def read_model_config(directory: Path) -> AnyModelConfig:
    """The model's sizes and switches; a ModelError says which file is missing or wrong, and how."""
    if not directory.is_dir():
        found = "a file" if directory.exists() else "nothing"
        raise ModelNotFoundError(
            f"{directory}: expected a model directory (config.json, *.safetensors), got {found}"
        )
    path = directory / "config.json"
    if not path.is_file():
        raise ModelNotFoundError(f"{path}: expected a file, got nothing")
    fields = Fields(read_json(path), path)
    try:
        architecture = _architecture(fields)
        generation = _generation_fields(directory)
        if architecture in T5_ARCHITECTURES:
            return _t5_config(architecture, fields, generation)
        return _model_config(architecture, fields, generation)
    except UnsupportedModelError:
        raise
    except ModelError as error:
        if str(error).startswith(str(path)):
            raise
        raise CheckpointError(f"{path}: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a CheckpointError says where it is not JSON."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON, got: {error}") from None
    except OSError as error:
        raise ModelNotFoundError(f"{path}: {error.strerror or error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


class Fields:
    """Typed look-ups in a JSON object; errors name the file and the field."""

    def __init__(self, values: dict[str, Any], path: Path, prefix: str = "") -> None:
        self.values = values
        self.path = path
        self.prefix = prefix

    def integer(self, name: str, default: Any = REQUIRED) -> Any:
        return self._typed(name, default, (int,), "an integer")

    def number(self, name: str, default: Any = REQUIRED) -> Any:
        value = self._typed(name, default, (int, float), "a number")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.wrong(name, "a finite number", value)
        return value

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._typed(name, default, (bool,), "true or false"))

    def text(self, name: str, default: Any = REQUIRED) -> Any:
        return self._typed(name, default, (str,), "a string")

    def inner(self, name: str) -> Fields | None:
        """The fields of a nested object; None when it is absent or null."""
        value = self._typed(name, None, (dict,), "an object")
        return None if value is None else Fields(value, self.path, f"{self.prefix}{name}.")

    def wrong(self, name: str, expected: str, got: Any) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {self.prefix}{name}: expected {expected}, got {got!r}"
        )

    def unsupported(self, name: str, expected: str, got: Any) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.path}: {self.prefix}{name}: supported are {expected}, got {got!r}"
        )

    def _typed(self, name: str, default: Any, types: tuple[type, ...], expected: str) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is REQUIRED:
                raise self.wrong(name, expected, None)
            return default
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise self.wrong(name, expected, value)
        return value


def _generation_fields(directory: Path) -> Fields:
    path = directory / "generation_config.json"
    return Fields(read_json(path) if path.is_file() else {}, path)


def _model_config(architecture: str, fields: Fields, generation: Fields) -> ModelConfig:
    family = FAMILIES[architecture]
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.unsupported("hidden_act", "silu", activation)
    _refuse_quantized(fields)
    num_layers = fields.integer("num_hidden_layers")
    num_q_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", family.head_dim or hidden_size // max(num_q_heads, 1))
    max_position = fields.integer("max_position_embeddings", family.max_position)
    rope = _rope(fields, head_dim, max_position)
    if rope.type == "yarn":
        max_position = max(max_position, round(rope.factor * rope.original_max_position))
    attention_bias = fields.flag("attention_bias", False) and architecture != "MistralForCausalLM"
    ends = _eos_token_ids(generation) or _eos_token_ids(fields)
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_q_heads=num_q_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_q_heads),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        rms_norm_eps=float(fields.number("rms_norm_eps", 1e-6)),
        max_position=max_position,
        rope=rope,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias and not family.qkv_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        layer_windows=_layer_windows(fields, family, num_layers),
        bos_token_id=fields.integer("bos_token_id", generation.integer("bos_token_id", None)),
        eos_token_ids=ends,
        dtype=_dtype(fields),
    )


def _architecture(fields: Fields) -> str:
    known = (*FAMILIES, *T5_ARCHITECTURES)
    names = fields.values.get("architectures")
    if not names:
        model_type = str(fields.text("model_type", None)).lower()
        names = [name for name in known if name.lower() == f"{model_type}forcausallm"]
        names += [n for n in known if n.lower() == f"{model_type}forconditionalgeneration"]
        if not names:
            raise fields.unsupported("architectures", ", ".join(known), model_type)
    if not isinstance(names, list) or names[0] not in known:
        raise fields.unsupported("architectures", ", ".join(known), names)
    return str(names[0])


def _refuse_quantized(fields: Fields) -> None:
    quantization = fields.inner("quantization_config")
    if quantization is not None:
        method = quantization.values.get("quant_method", "quantized")
        raise fields.unsupported("quantization_config", "float checkpoints", method)


def _dtype(fields: Fields) -> str | None:
    name = fields.text("dtype", fields.text("torch_dtype", None))
    return name.removeprefix("torch.") if isinstance(name, str) else None


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    value = fields.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise fields.wrong("eos_token_id", "an integer or a list of them", value)
    return tuple(dict.fromkeys(ids))


def _t5_config(architecture: str, fields: Fields, generation: Fields) -> T5Config:
    _refuse_quantized(fields)
    if not fields.flag("is_encoder_decoder", True):
        raise fields.unsupported("is_encoder_decoder", "true", False)
    default = "relu" if architecture == "T5ForConditionalGeneration" else "gated-gelu"
    projection = fields.text("feed_forward_proj", default)
    if projection not in T5_ACTIVATIONS:
        raise fields.unsupported("feed_forward_proj", ", ".join(T5_ACTIVATIONS), projection)
    num_encoder_layers = fields.integer("num_layers")
    tied = fields.flag("tie_word_embeddings", True)
    start = fields.integer("decoder_start_token_id", fields.integer("pad_token_id", 0))
    return T5Config(
        architecture=architecture,
        num_layers=fields.integer("num_decoder_layers", num_encoder_layers),
        num_encoder_layers=num_encoder_layers,
        hidden_size=fields.integer("d_model"),
        intermediate_size=fields.integer("d_ff"),
        num_heads=fields.integer("num_heads"),
        head_dim=fields.integer("d_kv"),
        vocab_size=fields.integer("vocab_size"),
        rms_norm_eps=float(fields.number("layer_norm_epsilon", 1e-6)),
        activation=T5_ACTIVATIONS[projection],
        decoder_start_token_id=generation.integer("decoder_start_token_id", start),
        max_input=fields.integer("n_positions", 512),
        num_buckets=fields.integer("relative_attention_num_buckets", 32),
        max_distance=fields.integer("relative_attention_max_distance", 128),
        tie_word_embeddings=tied,
        scale_outputs=fields.flag("scale_decoder_outputs", tied),
        eos_token_ids=_eos_token_ids(generation) or _eos_token_ids(fields),
        dtype=_dtype(fields),
    )


def _layer_windows(fields: Fields, family: _Family, num_layers: int) -> tuple[int, ...]:
    """Keys that a query sees in each layer; 0 for all of them."""
    if family.windows == "none":
        return ()
    window = fields.integer("sliding_window", None)
    if family.windows == "some" and not fields.flag("use_sliding_window", False):
        window = None
    kinds = fields.values.get("layer_types") if family.windows == "some" else None
    if kinds is None:
        first = fields.integer("max_window_layers", 28) if family.windows == "some" else 0
        slides = [window is not None and layer >= first for layer in range(num_layers)]
    else:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise fields.wrong("layer_types", f"a list of {num_layers} kinds", kinds)
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise fields.unsupported("layer_types", "full_attention, sliding_attention", kind)
        slides = [kind == "sliding_attention" for kind in kinds]
    if any(slides) and (window is None or window < 1):
        raise fields.wrong("sliding_window", "a positive size for its layers", window)
    return tuple(window if slide else 0 for slide in slides)


def _rope(fields: Fields, head_dim: int, max_position: int) -> RopeConfig:
    rope = fields.inner("rope_parameters") or fields.inner("rope_scaling")
    if rope is None:
        rope = Fields({}, fields.path, "rope_parameters.")
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise fields.unsupported("rope_parameters", "one set for all layers", rope.values)
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1:
        raise rope.unsupported("partial_rotary_factor", "1", partial)
    rope_type = rope.text("rope_type", rope.text("type", "default"))
    theta = float(rope.number("rope_theta", fields.number("rope_theta", 10000.0)))
    original = fields.integer(
        "original_max_position_embeddings",
        rope.integer("original_max_position_embeddings", max_position),
    )
    if rope_type == "default":
        return RopeConfig(theta=theta, rotary_dim=head_dim)
    if rope_type == "linear":
        factor = float(rope.number("factor"))
        return RopeConfig("linear", theta=theta, rotary_dim=head_dim, factor=factor)
    if rope_type == "llama3":
        return RopeConfig(
            "llama3",
            theta=theta,
            rotary_dim=head_dim,
            factor=float(rope.number("factor")),
            original_max_position=original,
            low_freq_factor=float(rope.number("low_freq_factor")),
            high_freq_factor=float(rope.number("high_freq_factor")),
        )
    if rope_type == "yarn":
        factor = float(rope.number("factor", max_position / max(original, 1)))
        return RopeConfig(
            "yarn",
            theta=theta,
            rotary_dim=head_dim,
            factor=factor,
            original_max_position=original,
            beta_fast=float(rope.number("beta_fast", None) or 32),
            beta_slow=float(rope.number("beta_slow", None) or 1),
            truncate=rope.flag("truncate", True),
            attention_factor=_yarn_attention_factor(rope, factor),
        )
    raise rope.unsupported("rope_type", "default, linear, llama3, yarn", rope_type)


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """YaRN §3.3: attention gets hotter with the logarithm of the factor, unless told otherwise."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = rope.number("attention_factor", None)
    if given is not None:
        return float(given)
    above, below = rope.number("mscale", None), rope.number("mscale_all_dim", None)
    return mscale(above) / mscale(below) if above and below else mscale(1.0)
