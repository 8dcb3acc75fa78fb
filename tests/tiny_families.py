"""Small random models of the families beyond Llama's, which transformers writes and answers for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

SIZES: dict[str, Any] = {
    "vocab_size": 128,
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

# A config class of transformers and its fields, by the names of families and their shapes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2Config", {**HEADS, "sliding_window": 7, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **HEADS,
            "sliding_window": 7,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
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
            "original_max_position_embeddings": 64,
            "rope_parameters": LONGROPE,
            "sliding_window": 21,
        },
    ),
    "ministral3": ("Ministral3Config", {**HEADS, "rope_parameters": YARN}),
    "mimo": ("Qwen2Config", {}),
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2_large": ("gemma2", {"num_key_value_heads": 4, "final_logit_softcapping": None}),
    "gemma3_one_kv_head": ("gemma3", {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    "gemma3_old_pattern": ("gemma3", {"sliding_window_pattern": 2, "rope_parameters": None}),
    "smollm3_windows": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 5, "tie_word_embeddings": False},
    ),
    "smollm3_odd": ("smollm3", ODD),
    "olmo2_odd": ("olmo2", {**ODD, "tie_word_embeddings": True}),
    "olmo3_no_gqa": ("olmo3", {"num_key_value_heads": 4, "sliding_window": 3}),
    "granite_tied": ("granite", {"tie_word_embeddings": True, "attention_bias": True}),
    "granite4_without_rope": ("granite4", {"position_embedding_type": "nope"}),
    "phi3_long": ("phi3", {"original_max_position_embeddings": 16}),
    "phi3_plain": ("phi3", {"rope_parameters": None, "tie_word_embeddings": True, **ODD}),
    "ministral3_tied": ("ministral3", {"tie_word_embeddings": True, "sliding_window": 9}),
}
"""Further shapes: a family, and what differs."""


def make_oracle(family: str, seed: int = 0) -> Any:
    """The model of transformers, in float32."""
    base, changes = SHAPES.get(family, (family, {}))
    kind, fields = FAMILIES[base]
    config = getattr(transformers, kind)(**{**SIZES, **fields, **changes})
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
    centre = 0.0 if "Gemma" in type(model).__name__ else 1.0
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        if weight.ndim > 1:
            gain = 3.0 if "embed" in name or "lm_head" in name else 1.2
            drawn *= gain / math.sqrt(weight.shape[-1])
        elif name.endswith("bias"):
            drawn *= 0.3
        else:
            drawn = centre + 0.2 * drawn
        weight.copy_(drawn)


def write_family(directory: Path, family: str, seed: int = 0) -> Any:
    """Write a model into a directory, as transformers saves it; the oracle is returned."""
    oracle = make_oracle(family, seed)
    oracle.save_pretrained(directory)
    if family == "mimo":
        make_mimo(directory)
    return oracle


def make_mimo(directory: Path) -> None:
    """Make a directory of a Qwen2 that of a MiMo, with the layer that drafts further tokens."""
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
