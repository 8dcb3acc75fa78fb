"""The decoders that a GGUF file may hold: GGUF's names of architectures, fields and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
SLIDING_THETA = "rope.freq_base_swa"
RECURRENT, ATTENDING_PERIOD = "attention.recurrent_layers", "full_attention_interval"
DRAFTING_LAYERS = "nextn_predict_layers"
"""The field of the number of layers after the model's own that draft the tokens after the next."""


@dataclass(frozen=True)
class GGUFFamily:
    """One architecture of llama.cpp."""

    architecture: str
    """The name in config.json."""
    with_windows: str = ""
    """The name in config.json for a file with sliding windows, if it differs."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """Fields that are numbers, and their names in config.json; 0 means that the field is absent."""
    required: tuple[str, ...] = ()
    """The fields among ``numbers`` that each file has."""
    fields: tuple[str, ...] = ()
    """Other fields that are read."""
    window: int | None = None
    """The sliding window of a file without the field; None: no file has sliding windows."""
    sliding_theta: float | None = None
    """The base of the rotary embedding in layers with sliding windows; None: as in other layers."""
    large_layers: int = 0
    """The number of layers of a model whose scores are scaled by (hidden_size / heads)**-0.5, which
    no field says; other models scale by head_dim**-0.5."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Tensors whose names differ from Llama's files, and their names in a checkpoint."""
    taps: str = ""
    """The field of the positions that a convolution sees; layers without key heads then have one.
    """
    delta_rules: bool = False
    """Whether layers have gated delta rules, whose sizes are those of a state space model."""
    is_interleaved: bool = False
    """Whether rows of queries and keys are ordered for rotary embedding of neighbouring pairs."""


_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_TENSORS = {**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}

GGUF_FAMILIES: dict[str, GGUFFamily] = {
    "llama": GGUFFamily("LlamaForCausalLM", is_interleaved=True),
    "qwen2": GGUFFamily("Qwen2ForCausalLM"),
    "qwen3": GGUFFamily("Qwen3ForCausalLM"),
    "gemma2": GGUFFamily(
        "Gemma2ForCausalLM",
        numbers=_CAPS,
        window=4096,
        large_layers=46,
        tensors=_GEMMA_TENSORS,
    ),
    "gemma3": GGUFFamily(
        "Gemma3ForCausalLM",
        numbers=_CAPS,
        fields=(SLIDING_THETA,),
        window=0,
        sliding_theta=10000.0,
        large_layers=62,
        tensors=_GEMMA_TENSORS,
    ),
    "smollm3": GGUFFamily("SmolLM3ForCausalLM", is_interleaved=True),
    "olmo2": GGUFFamily(
        "Olmo2ForCausalLM",
        with_windows="Olmo3ForCausalLM",
        fields=(SLIDING_THETA,),
        window=0,
        tensors=_POST_NORMS,
    ),
    "nanbeige": GGUFFamily("NanbeigeForCausalLM", fields=("num_loops",), is_interleaved=True),
    "granite": GGUFFamily(
        "GraniteForCausalLM",
        numbers={
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "attention.scale": "attention_multiplier",
            "logit_scale": "logits_scaling",
        },
        required=("logit_scale",),
        is_interleaved=True,
    ),
    "phi3": GGUFFamily(
        "Phi3ForCausalLM",
        window=0,
        tensors={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "lfm2": GGUFFamily(
        "Lfm2ForCausalLM",
        taps="shortconv.l_cache",
        tensors={
            "token_embd_norm": "model.embedding_norm",
            "attn_norm": "operator_norm",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "attn_output": "self_attn.out_proj",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.conv": "conv.conv",
            "shortconv.out_proj": "conv.out_proj",
        },
    ),
    "qwen35": GGUFFamily(
        "Qwen3_5ForCausalLM",
        fields=(
            *(f"ssm.{name}" for name in ("conv_kernel", "inner_size", "state_size")),
            *(f"ssm.{name}" for name in ("time_step_rank", "group_count")),
            RECURRENT,
            ATTENDING_PERIOD,
            DRAFTING_LAYERS,
            "rope.dimension_sections",  # positions of images, which are all the same in a text
        ),
        delta_rules=True,
        tensors={
            "post_attention_norm": "post_attention_layernorm",
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_beta": "linear_attn.in_proj_b",
            "ssm_alpha": "linear_attn.in_proj_a",
            "ssm_conv1d": "linear_attn.conv1d",
            "ssm_norm": "linear_attn.norm",
            "ssm_out": "linear_attn.out_proj",
            "nextn.eh_proj": "mtp.fc",
            "nextn.enorm": "mtp.pre_fc_norm_embedding",
            "nextn.hnorm": "mtp.pre_fc_norm_hidden",
            "nextn.shared_head_norm": "mtp.norm",
        },
    ),
    "mistral3": GGUFFamily(
        "Ministral3ForCausalLM",
        fields=("attention.temperature_scale", "attention.temperature_length"),
        is_interleaved=True,
    ),
}
