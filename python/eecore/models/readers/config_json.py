"""A Hugging Face ``config.json`` (and ``generation_config.json``) read into a model's config.

Both spellings are understood: ``rope_theta``, ``rope_scaling``, ``torch_dtype`` of transformers 4
and ``rope_parameters``, ``dtype`` of transformers 5. A field that is absent has the default of the
architecture's class in transformers, or is an error. What is not understood is an error too.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eecore.config import (
    MOST_DISTANCE,
    MOST_END_TOKENS,
    MOST_HEADS,
    MOST_HIDDEN,
    MOST_INNER,
    MOST_LAYERS,
    MOST_POSITIONS,
    MOST_VOCAB,
    NUM_BUCKETS,
    Activation,
    AnyModelConfig,
    ModelConfig,
    OwnSampling,
    QKNorm,
    RopeConfig,
    SamplingParams,
    T5Config,
)
from eecore.errors import (
    CheckpointError,
    ModelError,
    ModelNotFoundError,
    RequestError,
    UnsupportedModelError,
)
from eecore.json_fields import ABOVE_ZERO, REQUIRED, JsonFields
from eecore.readable import kind_of, shown_path
from eecore.values import shown


@dataclass(frozen=True)
class _Family:
    """What an architecture's config.json may leave out: what is always so, and the defaults."""

    max_position: int
    num_kv_heads: int | None = None
    """None: one for each query head."""
    head_dim: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    qkv_bias: bool = False
    qk_norm: QKNorm = "none"
    windows: str = "none"
    """Sliding windows: "none", of "all" layers, or "some" of them."""


FAMILIES = {
    "LlamaForCausalLM": _Family(max_position=2048, bos_token_id=1, eos_token_id=2),
    "MistralForCausalLM": _Family(
        max_position=131072, num_kv_heads=8, bos_token_id=1, eos_token_id=2, windows="all"
    ),
    "Qwen2ForCausalLM": _Family(max_position=32768, num_kv_heads=32, qkv_bias=True, windows="some"),
    "Qwen3ForCausalLM": _Family(
        max_position=32768, num_kv_heads=32, head_dim=128, qk_norm="head", windows="some"
    ),
}
WINDOW = 4096
"""The sliding window of a config.json that has none; null is no window."""
ROPE_FIELDS = {
    "default": {"rope_theta", "rope_type", "type", "partial_rotary_factor"},
    "linear": {"factor"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
        *("attention_factor", "mscale", "mscale_all_dim", "finetuned"),
    },
}
"""The fields that each type of rotary embedding reads; those of "default" are read for all."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
HEAD_DIMS = range(8, 256 + 1, 8)
T5_ARCHITECTURES = ("T5ForConditionalGeneration", "MT5ForConditionalGeneration")
THETAS = (1.0, 1e12)
FACTORS = (1.0, 1e6)
T5_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gated-gelu": "gelu_tanh",  # what the name has always meant in transformers
    "gated-silu": "silu",
}
FILTERS = ("temperature", "top_k", "top_p", "min_p")
"""The sampling settings of a generation_config.json that mean nothing to a greedy model."""
USUAL_FILTERS = {"temperature": (0, 1), "top_k": (-1, 0, 50), "top_p": (1,), "min_p": (0,)}
"""Values of them that say nothing: transformers writes its defaults out."""
NOT_SAMPLING = frozenset(
    {
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
        *("do_sample", "transformers_version", "use_cache", "cache_implementation"),
        # How long an answer may be, and what comes with it, is said with each request.
        *("max_length", "max_new_tokens", "output_attentions", "output_hidden_states"),
        *("output_logits", "output_scores", "return_dict_in_generate", "return_legacy_cache"),
        *("remove_invalid_values", "renormalize_logits", "trust_remote_code"),
    }
)
"""Fields of a generation_config.json that are read elsewhere, or change no text."""
T5_FUNCTIONS = {"relu": "relu", "gelu_tanh": "gelu_new", "silu": "silu"}
"""The names of ``dense_act_fn``, which says again what ``feed_forward_proj`` says."""


class ConfigFields(JsonFields):
    """The fields of a model: what is valid and yet not supported is an error of its own."""

    def unsupported(self, name: str, expected: str, got: Any) -> UnsupportedModelError:
        """The error of a field."""
        return UnsupportedModelError(
            f"{self.where}: {self.prefix}{name}: supported are {expected}, got {shown(got)}"
        )

    def choice(self, name: str, supported: Collection[str], default: Any = REQUIRED) -> str:
        """A text, of those that are supported."""
        text: str = self.text(name, default)
        if text not in supported:
            raise self.unsupported(name, ", ".join(supported), text)
        return text

    def head_dim(self, name: str, default: Any = REQUIRED) -> int:
        """A head's size, of those that there are kernels for."""
        size: int = self.integer(name, default=default)
        if size not in HEAD_DIMS:
            raise self.unsupported(
                name, f"multiples of {HEAD_DIMS.step} up to {HEAD_DIMS[-1]}", size
            )
        return size

    def default(self, name: str, value: Any, null: Any = None) -> Any:
        """The default of a field: ``value`` where it is absent, ``null`` where it is null."""
        return null if name in self.names else value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """An id or a list of them; none where the field is absent."""
        is_one = name in self and not self.has_list(name)
        ids = (self.integer(name, 0, MOST_VOCAB),) if is_one else ()
        if not is_one:
            ids = self.integers(name, 0, MOST_VOCAB, (), most=MOST_END_TOKENS)
        return tuple(dict.fromkeys(ids))


def read_model_config(directory: Path) -> AnyModelConfig:
    """The model's sizes and switches; a ModelError says which file is missing or wrong, and how."""
    if (kind := kind_of(directory)) != "a directory":
        raise ModelNotFoundError(
            f"{shown_path(directory)}: expected a model directory (config.json, *.safetensors) "
            f"or a GGUF file, got {kind}"
        )
    return read_config_file(directory / "config.json")


def read_config_file(file: Path) -> AnyModelConfig:
    """The config in a config.json, of any name, and in the generation_config.json beside it.

    Raises:
        ModelError: says which file is missing or wrong, and how.
    """
    _refuse_adapter(file.parent)
    beside = file.with_name("generation_config.json")
    fields = ConfigFields.read(file, CheckpointError, ModelNotFoundError)
    generation = ConfigFields.read_if_there(beside, CheckpointError)
    config = model_config(fields, generation)
    return replace(config, sampling=own_sampling(generation))


def own_sampling(generation: ConfigFields) -> OwnSampling:
    """The sampling settings of a generation_config.json.

    ``do_sample`` false is greedy. Without it a file that names one of the filters samples, as in
    vLLM. A field that eecore does not have is named in a warning, unless it asks for nothing.

    Raises:
        ModelError: a value that cannot be.
    """
    samples = generation.flag("do_sample", None)
    given = {n: generation.values[n] for n in (*FILTERS, "repetition_penalty") if n in generation}
    known = {*given, *NOT_SAMPLING}
    unused = [n for n in generation.names if n not in known and not n.startswith("_")]
    unused = [n for n in unused if generation.values[n] not in (None, 0, 1, "", [], {})]
    if given.get("top_k") == -1:
        given["top_k"] = 0
    if samples or (samples is None and given.keys() & set(FILTERS)):
        given.setdefault("temperature", 1.0)
    try:
        checked = SamplingParams(**given)
    except RequestError as error:
        raise generation.error(f"{generation.where}: {error}") from None
    if samples is False:
        dropped = [n for n in FILTERS if n in given and given[n] not in USUAL_FILTERS[n]]
        unused = [*unused, *dropped]
        given = {n: value for n, value in given.items() if n not in FILTERS}
    for name in unused:
        expected = "none without do_sample" if name in FILTERS else "no such setting"
        got = shown(generation.values[name])
        warnings.warn(
            f"{generation.where}: {name}: expected {expected}, got {got}; it is not used",
            stacklevel=2,
        )
    return tuple((name, getattr(checked, name)) for name in given)


def _refuse_adapter(directory: Path) -> None:
    """Raise where an adapter lies beside the weights, which would change what they compute."""
    for name in ADAPTER_FILES:
        if kind_of(directory / name) != "nothing":
            raise UnsupportedModelError(
                f"{directory}: expected weights alone, got an adapter ({name}): merge it first, by "
                "merge_and_unload()"
            )


def model_config(fields: ConfigFields, generation: ConfigFields) -> AnyModelConfig:
    """The config of a config.json's fields and a generation_config.json's."""
    architecture = _architecture(fields)
    try:
        if architecture in T5_ARCHITECTURES:
            return _t5_config(architecture, fields, generation)
        return _model_config(architecture, fields, generation)
    except UnsupportedModelError:
        raise
    except ModelError as error:
        if str(error).startswith((fields.where, generation.where)):
            raise
        raise CheckpointError(f"{fields.where}: {error}") from None


def _model_config(architecture: str, fields: ConfigFields, generation: ConfigFields) -> ModelConfig:
    family = FAMILIES[architecture]
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.unsupported("hidden_act", "silu", activation)
    num_layers = fields.integer("num_hidden_layers", 1, MOST_LAYERS)
    num_q_heads = fields.integer("num_attention_heads", 1, MOST_HEADS)
    hidden_size = fields.integer("hidden_size", 1, MOST_HIDDEN)
    head_dim = fields.head_dim("head_dim", family.head_dim or hidden_size // num_q_heads)
    max_position = fields.integer("max_position_embeddings", 1, MOST_POSITIONS, family.max_position)
    rope = _rope(fields, head_dim, max_position)
    if rope.type == "yarn":
        max_position = max(max_position, round(rope.factor * rope.original_max_position))
    attention_bias = fields.flag("attention_bias", False) and architecture != "MistralForCausalLM"
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, MOST_INNER),
        num_q_heads=num_q_heads,
        num_kv_heads=fields.integer(
            "num_key_value_heads",
            1,
            num_q_heads,
            fields.default("num_key_value_heads", family.num_kv_heads) or num_q_heads,
        ),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", 2, MOST_VOCAB),
        rms_norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        max_position=max_position,
        ropes=(rope,),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias and not family.qkv_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        layer_windows=_layer_windows(fields, family, num_layers),
        bos_token_id=_bos_token_id(fields, generation, family),
        eos_token_ids=_eos_token_ids(fields, generation, family.eos_token_id),
        dtype=_dtype(fields),
    )


def _architecture(fields: ConfigFields) -> str:
    known = (*FAMILIES, *T5_ARCHITECTURES)
    names = fields.texts("architectures", ())
    if names and names[0] not in known:
        raise fields.unsupported("architectures", ", ".join(known), list(names))
    model_type = str(fields.text("model_type", None)).lower()
    of_type = [name for name in known if name.lower().startswith(f"{model_type}for")]
    if not (names or of_type):
        raise fields.unsupported("architectures", ", ".join(known), model_type)
    if names and "model_type" in fields and names[0] not in of_type:
        raise fields.unsupported("model_type", f"that of {names[0]}", model_type)
    if "per_layer_config" in fields:
        raise fields.unsupported("per_layer_config", "one for all layers", "several")
    return str([*names, *of_type][0])


def refuse_quantised(fields: ConfigFields, supported: str) -> None:
    """Raise where a config.json says that its weights are not floats."""
    quantisation = fields.inner("quantization_config")
    if quantisation is not None:
        method = quantisation.text("quant_method", "quantised weights")
        raise fields.unsupported("quantization_config", supported, method)


def _dtype(fields: ConfigFields) -> str | None:
    name = fields.text("dtype", fields.text("torch_dtype", None))
    return name.removeprefix("torch.") if isinstance(name, str) else None


def _bos_token_id(fields: ConfigFields, generation: ConfigFields, family: _Family) -> int | None:
    default = fields.default("bos_token_id", family.bos_token_id)
    of_generation = generation.integer("bos_token_id", 0, MOST_VOCAB, default)
    own: int | None = fields.integer("bos_token_id", 0, MOST_VOCAB, of_generation)
    return own


def _eos_token_ids(
    fields: ConfigFields, generation: ConfigFields, default: int | None
) -> tuple[int, ...]:
    given = generation.token_ids("eos_token_id") or fields.token_ids("eos_token_id")
    token = fields.default("eos_token_id", default)
    return given if given or token is None else (token,)


def _t5_config(architecture: str, fields: ConfigFields, generation: ConfigFields) -> T5Config:
    refuse_quantised(fields, "T5 models in floats")
    if not fields.flag("is_encoder_decoder", True):
        raise fields.unsupported("is_encoder_decoder", "true", False)
    default = "relu" if architecture == "T5ForConditionalGeneration" else "gated-gelu"
    projection = fields.choice("feed_forward_proj", T5_ACTIVATIONS, default)
    activation = T5_ACTIVATIONS[projection]
    fields.text("dense_act_fn", None, one_of=[T5_FUNCTIONS[activation]])
    gated = activation != "relu"
    if fields.flag("is_gated_act", gated) != gated:
        raise fields.wrong("is_gated_act", f"{gated} for {projection}", not gated)
    num_encoder_layers = fields.integer("num_layers", 1, MOST_LAYERS)
    tied = fields.flag("tie_word_embeddings", True)
    vocab_size = fields.integer("vocab_size", 2, MOST_VOCAB)
    last = vocab_size - 1
    start = fields.integer(
        "decoder_start_token_id", 0, last, fields.integer("pad_token_id", default=0)
    )
    num_buckets = fields.integer("relative_attention_num_buckets", *NUM_BUCKETS, 32)
    return T5Config(
        architecture=architecture,
        num_layers=fields.integer("num_decoder_layers", 1, MOST_LAYERS, num_encoder_layers),
        num_encoder_layers=num_encoder_layers,
        hidden_size=fields.integer("d_model", 1, MOST_HIDDEN),
        intermediate_size=fields.integer("d_ff", 1, MOST_INNER),
        num_heads=fields.integer("num_heads", 1, MOST_HEADS),
        head_dim=fields.head_dim("d_kv"),
        vocab_size=vocab_size,
        rms_norm_eps=fields.number("layer_norm_epsilon", 0.0, 1.0, 1e-6),
        activation=activation,
        decoder_start_token_id=generation.integer("decoder_start_token_id", 0, last, start),
        max_input=fields.integer("n_positions", 1, MOST_POSITIONS, 512),
        num_buckets=num_buckets,
        max_distance=fields.integer(
            "relative_attention_max_distance", num_buckets // 2 + 1, MOST_DISTANCE, 128
        ),
        tie_word_embeddings=tied,
        # An mT5 never does, whatever transformers writes about its embeddings.
        scale_outputs=architecture != T5_ARCHITECTURES[1]
        and fields.flag("scale_decoder_outputs", tied),
        eos_token_ids=_eos_token_ids(fields, generation, 1),
        dtype=_dtype(fields),
    )


def _layer_windows(fields: ConfigFields, family: _Family, num_layers: int) -> tuple[int, ...]:
    """Keys that a query sees in each layer; 0 for all of them."""
    if family.windows == "none":
        return ()
    some = family.windows == "some"
    uses = not some or fields.flag("use_sliding_window", False)
    default = fields.default("sliding_window", WINDOW)
    window = fields.integer("sliding_window", 1, MOST_POSITIONS, default) if uses else None
    kinds = fields.texts("layer_types", None, most=MOST_LAYERS)
    if kinds is None:
        first = fields.integer("max_window_layers", default=28) if some else 0
        return tuple((window or 0) if layer >= first else 0 for layer in range(num_layers))
    if len(kinds) != num_layers:
        raise fields.wrong("layer_types", f"a list of {num_layers} kinds", list(kinds))
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.unsupported("layer_types", "full_attention, sliding_attention", kind)
    slides = [kind == "sliding_attention" for kind in kinds]
    if any(slides) and not uses:
        raise fields.wrong("use_sliding_window", "true for its layers", False)
    if any(slides) and window is None:
        raise fields.wrong("sliding_window", "a size for its layers", None)
    return tuple((window or 0) if slide else 0 for slide in slides)


def _rope(fields: ConfigFields, head_dim: int, max_position: int) -> RopeConfig:
    """The rotary embedding; where two fields describe it, that of ``rope_scaling``, as in
    transformers."""
    given = [fields.inner(name) for name in ("rope_scaling", "rope_parameters")]
    none = ConfigFields({}, fields.where, fields.error, "rope_parameters.")
    found = [rope for rope in given if rope is not None and rope.names] or [none]
    ropes = [_rope_of(rope, fields, head_dim, max_position) for rope in found]
    if ropes[0] != ropes[-1]:
        warnings.warn(
            f"{fields.where}: rope_parameters: expected what rope_scaling says, got another "
            "rotary embedding; that of rope_scaling is used",
            stacklevel=2,
        )
    return ropes[0]


def _rope_of(
    rope: ConfigFields, fields: ConfigFields, head_dim: int, max_position: int
) -> RopeConfig:
    for name in rope.names:
        if rope.has_inner(name):
            raise fields.unsupported("rope_parameters", "one set for all layers", rope.names)
    partial = rope.number(
        "partial_rotary_factor", default=fields.number("partial_rotary_factor", default=1.0)
    )
    if partial != 1:
        raise rope.unsupported("partial_rotary_factor", "1", partial)
    rope_type = rope.choice("rope_type", ROPE_FIELDS, rope.text("type", "default"))
    unread = set(rope.names) - ROPE_FIELDS["default"] - ROPE_FIELDS[rope_type]
    for name in sorted(unread):
        warnings.warn(
            f"{rope.where}: {rope.prefix}{name}: expected no such field for a rope_type of "
            f"{rope_type}; it is not used",
            stacklevel=2,
        )
    theta = rope.number("rope_theta", *THETAS, fields.number("rope_theta", *THETAS, 10000.0))
    name = "original_max_position_embeddings"
    original = rope.integer(name, 1, MOST_POSITIONS, max_position)
    original = fields.integer(name, 1, MOST_POSITIONS, original)
    settings: dict[str, Any] = {}
    if rope_type != "default":
        default = max_position / original if rope_type == "yarn" else REQUIRED
        settings["factor"] = rope.number("factor", *FACTORS, default)
    if rope_type in ("llama3", "yarn"):
        settings["original_max_position"] = original
    if rope_type == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            settings[name] = rope.number(name, ABOVE_ZERO, FACTORS[1])
    if rope_type == "yarn":
        for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            settings[name] = rope.number(name, 0.0, FACTORS[1], 0.0) or usual
        settings["truncate"] = rope.flag("truncate", True)
        settings["attention_factor"] = _yarn_attention_factor(rope, settings["factor"])
    return RopeConfig(rope_type, theta=theta, rotary_dim=head_dim, **settings)


def _yarn_attention_factor(rope: ConfigFields, factor: float) -> float:
    """YaRN §3.3: attention gets hotter with the logarithm of the factor, unless told otherwise."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given: float | None = rope.number("attention_factor", ABOVE_ZERO, FACTORS[1], None)
    if given is not None:
        return given
    above, below = (
        rope.number(name, 0.0, FACTORS[1], 0.0) for name in ("mscale", "mscale_all_dim")
    )
    return mscale(above) / mscale(below) if above and below else mscale(1.0)
