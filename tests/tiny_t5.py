"""Small random T5 directories in Hugging Face layout, one per family, as tiny_models has Llamas."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tiny_models import write_byte_tokenizer

BASE: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "is_encoder_decoder": True,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_heads": 4,
    "num_layers": 4,
    "num_decoder_layers": 4,
    "vocab_size": 320,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "pad_token_id": 256,
    "decoder_start_token_id": 256,
    "eos_token_id": 257,
    "torch_dtype": "float32",
}

# The fields of config.json that differ from BASE.
FAMILIES: dict[str, dict[str, Any]] = {
    "t5": {"feed_forward_proj": "relu", "n_positions": 512},
    "t5_v1_1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "flan_t5": {
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "d_kv": 32,
        "n_positions": 512,
    },
    "deeper_encoder": {
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "num_layers": 5,
        "num_decoder_layers": 3,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20,
    },
    "mt5": {
        "architectures": ["MT5ForConditionalGeneration"],
        "model_type": "mt5",
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
}


def write_t5(
    directory: Path,
    family: str = "t5_v1_1",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    deep_gain: float = 1.0,
    **overrides: Any,
) -> Path:
    """Write a random model of the family into the directory, which is returned.

    Args:
        directory: the directory to make.
        family: one of FAMILIES.
        seed: seeds the weights.
        dtype: the dtype that they are stored in.
        deep_gain: factor of what the upper half of the decoder's layers adds: if small, the lower
            half mostly agrees with the whole model.
        **overrides: fields of config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = {**BASE, **FAMILIES[family], **overrides}
    config = {name: value for name, value in config.items() if value is not None}
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    tensors = random_tensors(config, seed, deep_gain)
    stored = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    write_byte_tokenizer(directory)
    return directory


def random_tensors(config: dict[str, Any], seed: int, deep_gain: float) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of the config, float32, named as transformers names them."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, heads = config["d_model"], config["d_ff"], config["num_heads"]
    size = heads * config["d_kv"]
    gated = config["feed_forward_proj"].startswith("gated")
    tensors: dict[str, torch.Tensor] = {}

    def linear(name: str, rows: int, columns: int, gain: float) -> None:
        weight = torch.randn(rows, columns, generator=generator)
        tensors[f"{name}.weight"] = weight * (gain / math.sqrt(columns))

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(hidden, generator=generator)

    def attention(name: str, gain: float) -> None:
        linear(f"{name}.q", size, hidden, 0.6)
        linear(f"{name}.k", size, hidden, 0.6)
        linear(f"{name}.v", size, hidden, 1.2)
        linear(f"{name}.o", hidden, size, 0.7 * gain)

    linear("shared", config["vocab_size"], hidden, 3)
    for stack, depth in (
        ("encoder", config["num_layers"]),
        ("decoder", config["num_decoder_layers"]),
    ):
        for layer in range(depth):
            gain = deep_gain if stack == "decoder" and layer >= depth // 2 else 1.0
            block = f"{stack}.block.{layer}.layer"
            attention(f"{block}.0.SelfAttention", gain)
            norm(f"{block}.0.layer_norm")
            last = 1
            if stack == "decoder":
                attention(f"{block}.1.EncDecAttention", gain)
                norm(f"{block}.1.layer_norm")
                last = 2
            for name in ("wi_0", "wi_1") if gated else ("wi",):
                linear(f"{block}.{last}.DenseReluDense.{name}", inner, hidden, 1)
            linear(f"{block}.{last}.DenseReluDense.wo", hidden, inner, gain)
            norm(f"{block}.{last}.layer_norm")
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        buckets = config["relative_attention_num_buckets"]
        tensors[bias] = torch.randn(buckets, heads, generator=generator)
        norm(f"{stack}.final_layer_norm")
    if not config.get("tie_word_embeddings", True):
        linear("lm_head", config["vocab_size"], hidden, 3)
    return tensors
