"""The decoders that a config.json may name, and how each differs from Llama.

The table has no code: the defaults of fields that a family's files leave out, and the differences
of its layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Windows = Literal["none", "all", "flagged", "typed", "unrotated"]


@dataclass(frozen=True)
class Family:
    """One decoder architecture of config.json."""

    defaults: Mapping[str, Any]
    """Values of absent fields: the defaults of the class in transformers that differ from null and
    from the reader's defaults."""
    model_type: str = ""
    """The model_type of its config; empty: its name without ForCausalLM, in lower case."""
    flags: frozenset[str] = frozenset({"attention_bias"})
    """The flags of biases that are read: attention_bias, mlp_bias, both or none."""
    switches: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ModelConfig with fixed values."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """Numbers in config.json, and the fields of ModelConfig that they become."""
    activation: str = "hidden_act"
    """The field of the MLP's activation."""
    inner_size: str = "intermediate_size"
    """The field of the MLP's size."""
    norm_eps: str = "rms_norm_eps"
    """The field of the epsilon of norms."""
    windows: Windows = "none"
    """Which layers have sliding windows: no layer; all; the last layers, if use_sliding_window is
    true; the layers in layer_types; the layers without a rotary embedding."""
    window_period: int = 0
    """Without layer_types, layers whose number, from 1, is a multiple of this have no window; for
    windows "typed"."""
    theta: float = 10000.0
    """The base of the rotary embedding."""
    sliding_theta: tuple[str, float] | None = None
    """The rotary embedding of layers with sliding windows, if it differs: the field of its base
    (empty: there is no field), and the default."""
    partial_rotary: bool = False
    """Whether partial_rotary_factor is read."""
    rope_types: Mapping[str, str] = field(default_factory=dict)
    """Types in rope_scaling that eecore calls by another name."""
    is_hybrid: bool = False
    """Whether layers are Mamba layers unless layer_types says attention, and rotate only if
    position_embedding_type says so."""
    other_layers: Literal["", "conv", "linear_attention"] = ""
    """What layer_types calls the layers without attention: conv, a short convolution, in a config
    that may have the names of Liquid's own files; linear_attention, a gated delta rule; empty: all
    layers have attention."""
    scales_embeddings: bool = False
    """Whether embeddings are multiplied by hidden_size**0.5."""
    loops: str = ""
    """The field that says how many times the layers run, in config.json and in GGUF; empty: once.
    """
    gate: str = ""
    """The field of the threshold at which an exit gate ends a token's loops; empty: no gate."""
    unused: tuple[str, ...] = ()
    """Fields that change what the model computes and that no release sets; a file that sets one is
    refused."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields whose values are these in all releases; a file with another value is refused."""


_LLAMA_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
_LLAMA_FLAGS = frozenset({"attention_bias", "mlp_bias"})
_MISTRAL: dict[str, Any] = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    **_LLAMA_TOKENS,
}
_GEMMA: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_GEMMA_SWITCHES = {"post_norm": True, "norm_offset": 1.0}
_GEMMA_NUMBERS = {
    "attn_logit_softcapping": "attention_soft_cap",
    "final_logit_softcapping": "logits_soft_cap",
}
_OLMO: dict[str, Any] = {"rms_norm_eps": 1e-5, "eos_token_id": 50279}
_OLMO_SWITCHES = {"pre_norm": False, "post_norm": True, "qk_norm": "projection"}
_GRANITE: dict[str, Any] = {**_LLAMA_TOKENS, "attention_multiplier": 1.0}
_GRANITE_NUMBERS = {
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "attention_multiplier": "attention_scale",
    "logits_scaling": "logits_divisor",
}
MINISTRAL_ROPE = {
    "type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        {"max_position_embeddings": 2048, **_LLAMA_TOKENS}, flags=_LLAMA_FLAGS
    ),
    "MistralForCausalLM": Family(_MISTRAL, flags=frozenset(), windows="all"),
    "MinistralForCausalLM": Family(_MISTRAL, flags=frozenset(), windows="all"),
    "Ministral3ForCausalLM": Family(
        {
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": MINISTRAL_ROPE,
            **_LLAMA_TOKENS,
        },
        flags=frozenset(),
        windows="all",
    ),
    "Qwen2ForCausalLM": Family(
        {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
        flags=frozenset(),
        switches={"attention_bias": True},
        windows="flagged",
    ),
    "MiMoForCausalLM": Family(
        {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
        flags=frozenset(),
        switches={"attention_bias": True},
        windows="flagged",
    ),
    "Qwen3ForCausalLM": Family(
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
        },
        switches={"qk_norm": "head"},
        windows="flagged",
    ),
    "Gemma2ForCausalLM": Family(
        {
            **_GEMMA,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        switches=_GEMMA_SWITCHES,
        numbers=_GEMMA_NUMBERS,
        activation="hidden_activation",
        windows="typed",
        window_period=2,
        scales_embeddings=True,
    ),
    "Gemma3ForCausalLM": Family(
        {**_GEMMA, "max_position_embeddings": 131072},
        model_type="gemma3_text",
        switches={**_GEMMA_SWITCHES, "qk_norm": "head"},
        numbers=_GEMMA_NUMBERS,
        activation="hidden_activation",
        windows="typed",
        window_period=6,
        theta=1000000.0,
        sliding_theta=("rope_local_base_freq", 10000.0),
        scales_embeddings=True,
    ),
    "SmolLM3ForCausalLM": Family(
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        flags=_LLAMA_FLAGS,
        windows="unrotated",
        theta=2000000.0,
    ),
    "Olmo2ForCausalLM": Family({**_OLMO, "max_position_embeddings": 2048}, switches=_OLMO_SWITCHES),
    "Olmo3ForCausalLM": Family(
        {**_OLMO, "max_position_embeddings": 2048, "sliding_window": 4096},
        switches=_OLMO_SWITCHES,
        windows="typed",
        window_period=4,
        theta=500000.0,
        sliding_theta=("", 500000.0),
    ),
    "GraniteForCausalLM": Family(
        {**_GRANITE, "max_position_embeddings": 2048}, flags=_LLAMA_FLAGS, numbers=_GRANITE_NUMBERS
    ),
    "GraniteMoeHybridForCausalLM": Family(
        {
            **_GRANITE,
            "max_position_embeddings": 2048,
            "shared_intermediate_size": 1024,
            "num_local_experts": 8,
        },
        numbers=_GRANITE_NUMBERS,
        inner_size="shared_intermediate_size",
        is_hybrid=True,
    ),
    "Lfm2ForCausalLM": Family(
        {
            "max_position_embeddings": 128000,
            "num_key_value_heads": 8,
            "norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        flags=frozenset(),
        switches={"qk_norm": "head"},
        norm_eps="norm_eps",
        theta=1000000.0,
        other_layers="conv",
        unused=("conv_bias",),
    ),
    "Qwen3_5ForCausalLM": Family(
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "partial_rotary_factor": 0.25,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
        },
        model_type="qwen3_5_text",
        switches={"qk_norm": "head", "norm_offset": 1.0, "attention_gate": True},
        partial_rotary=True,
        other_layers="linear_attention",
        only={
            "hidden_act": ("silu", "swish"),
            "attn_output_gate": (True,),
            "output_gate_type": ("silu", "swish"),
        },
    ),
    "OuroForCausalLM": Family(
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "total_ut_steps": 4,
            "early_exit_threshold": 1.0,
        },
        flags=frozenset(),
        switches={"post_norm": True},
        windows="flagged",
        loops="total_ut_steps",
        gate="early_exit_threshold",
    ),
    "NanbeigeForCausalLM": Family(
        {"max_position_embeddings": 2048, **_LLAMA_TOKENS},
        flags=frozenset(),
        loops="num_loops",
        unused=(
            "attention_bias",
            "mlp_bias",
            "qk_layernorm",
            "skip_loop_final_norm",
            "loop_loss_weights",
            "enable_double_loop_split",
            "loop_middle_layers",
            "loop_share_kv",
            "emb_neighbor_num",
            "insert_ngram_layer_idx",
            "ngram_insert_all_layers",
            "enable_hyper_connection",
            "enable_mhc",
            "enable_h_res_identity",
            "enable_depth_attention",
        ),
    ),
    "Phi3ForCausalLM": Family(
        {
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 32000,
        },
        flags=frozenset(),
        windows="all",
        partial_rotary=True,
        rope_types={"su": "longrope", "yarn": "longrope"},
    ),
}

MULTIMODAL: dict[str, Mapping[str, Any]] = {
    "Gemma3ForConditionalGeneration": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
    },
    "Mistral3ForConditionalGeneration": {
        "model_type": "mistral",
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "Qwen3_5ForConditionalGeneration": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
    },
}
"""Multimodal models whose text part runs, and defaults for fields that text_config leaves out."""


_MISSING: dict[tuple[str, str], str] = {
    ("per-layer inputs and shared keys and values", "Gemma 3"): "gemma3n gemma4",
    ("an encoder that pools", "Gemma 3"): "gemmaembedding",
    ("two stacks of layers and two streams", "OuroForCausalLM"): "hrmtext",
    ("a mixture of experts (MoE)", "Qwen3_5ForCausalLM"): "qwen35moe qwen3next kimilinear",
    ("a mixture of experts (MoE) and attention sinks", "Qwen3ForCausalLM"): "gptoss",
    (
        "a mixture of experts (MoE) and latent attention (MLA)",
        "Qwen3ForCausalLM",
    ): "deepseek glmdsa mistral4",
    ("attention sinks and a mixture of experts (MoE)", "MiMoForCausalLM"): "mimov2 mimo2",
    ("positions in images (mRoPE)", "Qwen3ForCausalLM"): "qwen2vl qwen25vl qwen3vl",
    ("a mixture of experts (MoE)", "Lfm2ForCausalLM"): "lfm2moe",
    (
        "hybrid layers (Mamba)",
        "the dense Granite 4 (GraniteMoeHybridForCausalLM without Mamba layers)",
    ): "granitehybrid bamba jamba falconh1 nemotronh zamba mamba linearattention",
    ("a mixture of experts (MoE)", "Granite 4"): "granitemoe",
    ("a mixture of experts (MoE)", "MistralForCausalLM"): "mixtral",
    ("a mixture of experts (MoE)", "Qwen3ForCausalLM"): "qwen2moe qwen3moe",
    ("a mixture of experts (MoE)", "Olmo2ForCausalLM"): "olmoe flexolmo",
    ("a mixture of experts (MoE)", "Phi3ForCausalLM"): "phimoe",
    ("layers with chunked attention and experts", "LlamaForCausalLM"): "llama4",
    ("layer norms with a mean", "Olmo2ForCausalLM"): "olmofor",
    ("layer norms with a mean", "Phi3ForCausalLM"): "phifor phi2",
    ("latent attention (MLA)", "LlamaForCausalLM"): "minicpm3",
    ("layer norms with a mean", "LlamaForCausalLM"): "gpt2 gptneox gptj bloom opt falcon starcoder "
    "stablelm cohere commandr mpt persimmon",
}
"""Features that keep models from running and the nearest model that runs, with prefixes of the
models' names in config.json or GGUF: lower case, only letters and digits."""


def why_not(name: str) -> str:
    """Why an architecture does not run, and the nearest that runs, as the end of a sentence; empty
    if unknown.

    Args:
        name: an architecture or model_type of config.json, or general.architecture of GGUF.
    """
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    for (feature, nearest), names in _MISSING.items():
        if plain.startswith(tuple(names.split())):
            return f" (it has {feature}; the nearest that runs is {nearest})"
    if "moe" in plain:
        return " (it has a mixture of experts (MoE); dense models run)"
    return ""
