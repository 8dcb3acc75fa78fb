"""A Hugging Face ``config.json`` (and ``generation_config.json``) read into a model's config.

Both spellings are understood: ``rope_theta``, ``rope_scaling``, ``torch_dtype`` of transformers 4
and ``rope_parameters``, ``dtype`` of transformers 5. A field that is absent has the default of the
architecture's class in transformers, or is an error. A value that is not understood is also an
error.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from eecore.config import (
    MAX_DELTA_DIM,
    MAX_DISTANCE,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INNER,
    MAX_LAYERS,
    MAX_LOOPS,
    MAX_POSITIONS,
    MAX_TAPS,
    MAX_VOCAB,
    NUM_BUCKETS,
    Activation,
    AnyModelConfig,
    DeltaConfig,
    ModelConfig,
    OwnSampling,
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
from eecore.files.json_fields import ABOVE_ZERO
from eecore.files.readable import contents_of, kind_of, shown_path
from eecore.models.readers.config_fields import FACTORS, ConfigFields
from eecore.models.readers.families import FAMILIES, MULTIMODAL, Family, why_not
from eecore.models.readers.rope_fields import read_ropes, rotated_layers
from eecore.values import shown

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""The activations of a gated MLP by the names of transformers."""
ATTENTION = {
    "attention": "full_attention",
    "full_attention": "full_attention",
    "sliding_attention": "sliding_attention",
}
"""The kinds of layers that run, by their names in layer_types."""
OWN_NAMES = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
"""Names in the files of Liquid, and those of transformers."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
T5_ARCHITECTURES = ("T5ForConditionalGeneration", "MT5ForConditionalGeneration")
T5_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gated-gelu": "gelu_tanh",  # always so in transformers
    "gated-silu": "silu",
}
FILTERS = ("temperature", "top_k", "top_p", "min_p")
"""The sampling settings of a generation_config.json that have no effect in greedy decoding."""
USUAL_FILTERS = {"temperature": (0, 1), "top_k": (-1, 0, 50), "top_p": (1,), "min_p": (0,)}
"""Values that are ignored without a warning: transformers also writes its defaults."""
NOT_SAMPLING = frozenset(
    {
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "decoder_start_token_id",
        "do_sample",
        "transformers_version",
        "use_cache",
        "cache_implementation",
        # Each request sets the length of its answer, and what is returned with it.
        "max_length",
        "max_new_tokens",
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "return_dict_in_generate",
        "return_legacy_cache",
        "remove_invalid_values",
        "renormalize_logits",
        "trust_remote_code",
    }
)
"""Fields of a generation_config.json that are read elsewhere, or do not change the text."""
T5_FUNCTIONS = {"relu": "relu", "gelu_tanh": "gelu_new", "silu": "silu"}
"""Activations in ``dense_act_fn``, which repeats a part of ``feed_forward_proj``."""


def read_model_config(directory: Path) -> AnyModelConfig:
    """The config of a model directory.

    Raises:
        ModelError: says which file is missing or wrong, and how.
    """
    _refuse_adapter(directory)
    config, contents = kind_of(directory / "config.json"), contents_of(directory)
    if config in ("a file", "nothing") and contents != "a model":
        raise (ModelNotFoundError if config == "nothing" else UnsupportedModelError)(
            f"{shown_path(directory)}: expected a model directory (config.json, *.safetensors) "
            f"or a GGUF file, got {contents}"
        )
    return read_config_file(directory / "config.json")


def read_config_file(file: Path) -> AnyModelConfig:
    """The config in a config.json, of any file name, and in the generation_config.json next to it.

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

    ``do_sample`` false is greedy. Without ``do_sample`` a file with one of the :data:`FILTERS`
    samples, as in vLLM. A warning names a field that eecore does not have, unless it is off.

    Raises:
        ModelError: a value is out of range.
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
        given = {n: value for n, value in given.items() if n not in FILTERS} | {"temperature": 0.0}
        checked = replace(checked, temperature=0.0)
    for name in unused:
        expected = "none without do_sample" if name in FILTERS else "no such setting"
        got = shown(generation.values[name])
        warnings.warn(
            f"{generation.where}: {name}: expected {expected}, got {got}; it is not used",
            stacklevel=2,
        )
    return tuple((name, getattr(checked, name)) for name in given)


def _refuse_adapter(directory: Path) -> None:
    """Raise if the directory holds an adapter, which would change what the weights compute."""
    for name in ADAPTER_FILES:
        if kind_of(directory / name) != "nothing":
            raise UnsupportedModelError(
                f"{directory}: expected weights alone, got an adapter ({name}): merge it first, by "
                "merge_and_unload()"
            )


def model_config(fields: ConfigFields, generation: ConfigFields) -> AnyModelConfig:
    """The config from the fields of a config.json and of a generation_config.json."""
    fields = _text_part(fields)
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


def layers_config(fields: ConfigFields) -> ModelConfig:
    """The config of a draft head's decoder layers, by their ``model_type``.

    Raises:
        ModelError: says which field is missing or wrong, and how.
    """
    listed = {model_type_of(name): name for name in ("LlamaForCausalLM", "Qwen3ForCausalLM")}
    architecture = listed[fields.choice("model_type", listed)]
    named = fields.replaced({**fields.values, "architectures": [architecture]})
    config = model_config(named, fields.replaced({}))
    assert isinstance(config, ModelConfig)
    return config


def _model_config(architecture: str, fields: ConfigFields, generation: ConfigFields) -> ModelConfig:
    family = FAMILIES[architecture]
    fields = fields.replaced({**family.defaults, **fields.values})
    if family.other_layers == "conv":
        fields = _without_own_names(fields)
    usual = family.defaults.get(family.activation, "silu")
    activation = fields.choice(family.activation, ACTIVATIONS, usual)
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    num_q_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    hidden_size = fields.integer("hidden_size", 1, MAX_HIDDEN)
    head_dim = fields.head_dim("head_dim", hidden_size // num_q_heads)
    max_position = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    windows = _layer_windows(fields, family, num_layers)
    slides = tuple(window > 0 for window in windows) or (False,) * num_layers
    ropes, layer_ropes = read_ropes(fields, family, head_dim, max_position, slides)
    for rope in ropes:
        if rope.type == "yarn":
            max_position = max(max_position, round(rope.factor * rope.original_max_position))
    _refuse_parts(fields, family)
    biases = {name: fields.flag(name, False) for name in sorted(family.flags)}
    attention_bias = biases.get("attention_bias", False)
    settings = {
        "attention_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": biases.get("mlp_bias", False),
        "activation": ACTIVATIONS[activation],
        **_numbers(fields, family, hidden_size),
        **_other_layers(fields, family, num_layers),
        **family.switches,
    }
    if family.loops:
        settings["num_loops"] = fields.integer(family.loops, 1, MAX_LOOPS)
    if family.gate:
        settings["gate_threshold"] = fields.number(family.gate, 0.0, 1.0)
    num_loops = settings.get("num_loops", 1)
    if num_layers * num_loops > MAX_LAYERS:
        raise fields.wrong(family.loops, f"at most {MAX_LAYERS} layers in all loops", num_loops)
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers * num_loops,
        hidden_size=hidden_size,
        intermediate_size=_inner_size(fields, family),
        num_q_heads=num_q_heads,
        num_kv_heads=fields.integer("num_key_value_heads", 1, num_q_heads, num_q_heads),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", 2, MAX_VOCAB),
        rms_norm_eps=fields.number(family.norm_eps, 0.0, 1.0, 1e-6),
        max_position=max_position,
        ropes=ropes,
        layer_ropes=layer_ropes,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        layer_windows=windows,
        bos_token_id=_bos_token_id(fields, generation),
        eos_token_ids=_eos_token_ids(fields, generation, None),
        dtype=_dtype(fields),
        **settings,
    )


def _without_own_names(fields: ConfigFields) -> ConfigFields:
    """The fields under transformers' names, which the names of Liquid's own files win over."""
    values = dict(fields.values)
    for name, other in OWN_NAMES.items():
        if values.get(name) is not None:
            values[other] = values[name]
    return fields.replaced(values)


def _inner_size(fields: ConfigFields, family: Family) -> int:
    """The size of the MLP; of a family with convolutions by default two thirds of the field, times
    a factor, rounded up."""
    size: int = fields.integer(family.inner_size, 1, MAX_INNER)
    if not (family.other_layers == "conv" and fields.flag("block_auto_adjust_ff_dim", True)):
        return size
    size = int(2 * size / 3)
    factor = fields.number("block_ffn_dim_multiplier", ABOVE_ZERO, FACTORS[1], None)
    if factor is not None:
        step = fields.integer("block_multiple_of", 1, MAX_INNER, 256)
        size = step * -(-int(factor * size) // step)
    if not 1 <= size <= MAX_INNER:
        expected = f"a size that becomes 1 to {MAX_INNER}"
        raise fields.wrong(family.inner_size, expected, fields.values[family.inner_size])
    return size


def _other_layers(fields: ConfigFields, family: Family, num_layers: int) -> dict[str, Any]:
    """The layers without attention, and the sizes of what they have."""
    other = family.other_layers
    if not other:
        return {}
    kinds = fields.texts("layer_types", None, most=MAX_LAYERS)
    if kinds is None:
        attending = _attending(fields, other, num_layers)
        kinds = tuple("full_attention" if n in attending else other for n in range(num_layers))
    if len(kinds) != num_layers:
        raise fields.wrong("layer_types", f"a list of {num_layers} kinds", list(kinds))
    for kind in kinds:
        if kind not in (other, "full_attention"):
            raise fields.unsupported("layer_types", f"{other}, full_attention", kind)
    layers = tuple(n for n, kind in enumerate(kinds) if kind == other)
    if other == "linear_attention":
        return {"delta": _delta(fields, layers) if layers else None}
    taps = fields.integer("conv_L_cache", 1, MAX_TAPS, 3)
    return {"conv_layers": layers, "conv_taps": taps if layers else 0}


def _attending(fields: ConfigFields, other: str, num_layers: int) -> Collection[int]:
    """The layers with attention, without layer_types."""
    layers = range(num_layers)
    if other == "linear_attention":
        period = fields.integer("full_attention_interval", 1, MAX_LAYERS, 4)
        return layers[period - 1 :: period]
    given = fields.integers("full_attn_idxs", 0, num_layers - 1, None, most=MAX_LAYERS)
    return layers if given is None else given


def _delta(fields: ConfigFields, layers: tuple[int, ...]) -> DeltaConfig:
    num_key_heads, num_value_heads = (
        fields.integer(f"linear_num_{kind}_heads", 1, MAX_HEADS) for kind in ("key", "value")
    )
    if num_value_heads % num_key_heads:
        expected = f"a multiple of linear_num_key_heads={num_key_heads}"
        raise fields.wrong("linear_num_value_heads", expected, num_value_heads)
    return DeltaConfig(
        layers=layers,
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=fields.integer("linear_key_head_dim", 1, MAX_DELTA_DIM),
        value_dim=fields.integer("linear_value_head_dim", 1, MAX_DELTA_DIM),
        taps=fields.integer("linear_conv_kernel_dim", 1, MAX_TAPS),
    )


def _numbers(fields: ConfigFields, family: Family, hidden_size: int) -> dict[str, float]:
    """Factors and caps of a family, by the fields of ModelConfig; nulls are left out."""
    found = {}
    for name, own in family.numbers.items():
        value = fields.number(name, ABOVE_ZERO, FACTORS[1], None)
        if value is not None:
            found[own] = value
    if family.scales_embeddings:
        found["embedding_multiplier"] = hidden_size**0.5
    scalar = fields.number("query_pre_attn_scalar", ABOVE_ZERO, FACTORS[1], None)
    if scalar is not None:
        found["attention_scale"] = scalar**-0.5
    return found


def _refuse_parts(fields: ConfigFields, family: Family) -> None:
    """Raise if a model of a supported family has a part that is not supported."""
    for name in family.unused:
        if value := fields.values.get(name):
            raise fields.unsupported(name, "models without it", value)
    for name, known in family.only.items():
        if (value := fields.values.get(name, known[0])) not in known:
            raise fields.unsupported(name, ", ".join(map(shown, known)), value)
    if fields.integer("num_local_experts", 0, default=0):
        listed = f"0, a dense model{why_not('granitemoe')}"
        raise fields.unsupported("num_local_experts", listed, fields.values["num_local_experts"])
    if fields.flag("use_bidirectional_attention", False):
        raise fields.unsupported("use_bidirectional_attention", "false, a causal model", True)


def _text_part(fields: ConfigFields) -> ConfigFields:
    """The fields of a multimodal model's text part; for any other model all fields."""
    names = fields.texts("architectures", ())
    if not names or names[0] not in MULTIMODAL:
        return fields
    text = fields.inner("text_config")
    if text is None:
        raise fields.wrong("text_config", "the config of the text part", None)
    values = {**MULTIMODAL[names[0]], **text.values}
    values["tie_word_embeddings"] = fields.flag("tie_word_embeddings", True)
    for name in ("bos_token_id", "eos_token_id", "dtype", "torch_dtype"):
        if values.get(name) is None and name in fields:
            values[name] = fields.values[name]
    values.pop("architectures", None)
    return ConfigFields(values, fields.where, fields.error, "text_config.")


def _architecture(fields: ConfigFields) -> str:
    known = (*FAMILIES, *T5_ARCHITECTURES)
    names = fields.texts("architectures", ())
    if names and names[0] not in known:
        listed = ", ".join((*known, *MULTIMODAL)) + why_not(names[0])
        raise fields.unsupported("architectures", listed, list(names))
    model_type = str(fields.text("model_type", None)).lower()
    of_type = [name for name in known if model_type_of(name) == model_type]
    if not (names or of_type):
        listed = ", ".join(known) + why_not(model_type)
        raise fields.unsupported("architectures", listed, model_type)
    if names and "model_type" in fields and names[0] not in of_type:
        raise fields.unsupported("model_type", f"that of {names[0]}", model_type)
    if "per_layer_config" in fields:
        raise fields.unsupported("per_layer_config", "one for all layers", "several")
    return str([*names, *of_type][0])


def model_type_of(architecture: str) -> str:
    """The model_type that a config.json of an architecture has."""
    own = FAMILIES[architecture].model_type if architecture in FAMILIES else ""
    return own or architecture.lower().split("for", maxsplit=1)[0]


def refuse_quantised(fields: ConfigFields, supported: str) -> None:
    """Raise if a config.json says that the weights are not floats."""
    quantisation = fields.inner("quantization_config")
    if quantisation is not None:
        method = quantisation.text("quant_method", "quantised weights")
        raise fields.unsupported("quantization_config", supported, method)


def _dtype(fields: ConfigFields) -> str | None:
    name = fields.text("dtype", fields.text("torch_dtype", None))
    return name.removeprefix("torch.") if isinstance(name, str) else None


def _bos_token_id(fields: ConfigFields, generation: ConfigFields) -> int | None:
    of_generation = generation.integer("bos_token_id", 0, MAX_VOCAB, None)
    own: int | None = fields.integer("bos_token_id", 0, MAX_VOCAB, of_generation)
    return own


def _eos_token_ids(
    fields: ConfigFields, generation: ConfigFields, default: int | None
) -> tuple[int, ...]:
    given = generation.token_ids("eos_token_id") or fields.token_ids("eos_token_id")
    token = None if "eos_token_id" in fields.names else default
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
    num_encoder_layers = fields.integer("num_layers", 1, MAX_LAYERS)
    tied = fields.flag("tie_word_embeddings", True)
    vocab_size = fields.integer("vocab_size", 2, MAX_VOCAB)
    last = vocab_size - 1
    start = fields.integer(
        "decoder_start_token_id", 0, last, fields.integer("pad_token_id", default=0)
    )
    num_buckets = fields.integer("relative_attention_num_buckets", *NUM_BUCKETS, 32)
    return T5Config(
        architecture=architecture,
        num_layers=fields.integer("num_decoder_layers", 1, MAX_LAYERS, num_encoder_layers),
        num_encoder_layers=num_encoder_layers,
        hidden_size=fields.integer("d_model", 1, MAX_HIDDEN),
        intermediate_size=fields.integer("d_ff", 1, MAX_INNER),
        num_heads=fields.integer("num_heads", 1, MAX_HEADS),
        head_dim=fields.head_dim("d_kv"),
        vocab_size=vocab_size,
        rms_norm_eps=fields.number("layer_norm_epsilon", 0.0, 1.0, 1e-6),
        activation=activation,
        decoder_start_token_id=generation.integer("decoder_start_token_id", 0, last, start),
        max_input=fields.integer("n_positions", 1, MAX_POSITIONS, 512),
        num_buckets=num_buckets,
        max_distance=fields.integer(
            "relative_attention_max_distance", num_buckets // 2 + 1, MAX_DISTANCE, 128
        ),
        tie_word_embeddings=tied,
        # An mT5 never scales outputs, whatever transformers writes about its embeddings.
        scale_outputs=architecture != T5_ARCHITECTURES[1]
        and fields.flag("scale_decoder_outputs", tied),
        eos_token_ids=_eos_token_ids(fields, generation, 1),
        dtype=_dtype(fields),
    )


def _layer_windows(fields: ConfigFields, family: Family, num_layers: int) -> tuple[int, ...]:
    """The sliding window of each layer; 0: none; empty: no layer has one."""
    if family.windows == "none" and not family.is_hybrid:
        return ()
    kinds = fields.texts("layer_types", None, most=MAX_LAYERS)
    if kinds is None and family.is_hybrid:
        kinds = ("mamba",) * num_layers
    if kinds is not None:
        if len(kinds) != num_layers:
            raise fields.wrong("layer_types", f"a list of {num_layers} kinds", list(kinds))
        for kind in kinds:
            if kind not in ATTENTION:
                listed = ", ".join(ATTENTION) + why_not(kind)
                raise fields.unsupported("layer_types", listed, kind)
    if family.is_hybrid:
        return ()
    uses = family.windows in ("all", "typed") or fields.flag("use_sliding_window", False)
    window = fields.integer("sliding_window", 1, MAX_POSITIONS, None) if uses else None
    slides = _slides(fields, family, num_layers, kinds, uses and window is not None)
    if any(slides) and not uses:
        raise fields.wrong("use_sliding_window", "true for its layers", False)
    if any(slides) and window is None:
        raise fields.wrong("sliding_window", "a size for its layers", None)
    return tuple((window or 0) if slide else 0 for slide in slides)


def _slides(
    fields: ConfigFields,
    family: Family,
    num_layers: int,
    kinds: tuple[str, ...] | None,
    uses: bool,
) -> list[bool]:
    """Whether each layer has a sliding window: by layer_types, else by the family's rule."""
    layers = range(num_layers)
    if kinds is not None:
        return [ATTENTION[kind] == "sliding_attention" for kind in kinds]
    if family.windows == "all":
        return [uses] * num_layers
    if family.windows == "flagged":
        first = fields.integer("max_window_layers", default=28)
        return [uses and layer >= first for layer in layers]
    if family.windows == "unrotated":
        rotates = rotated_layers(fields, num_layers)
        return [uses and not rotates[layer] for layer in layers]
    period = fields.integer("sliding_window_pattern", 1, MAX_LAYERS, family.window_period)
    return [(layer + 1) % period != 0 for layer in layers]
