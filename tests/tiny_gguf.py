"""Small GGUF files, of the models that ``tiny_models`` writes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file
from tokenizers import pre_tokenizers

from eecore.models.gguf_checkpoint import TENSOR_NAMES

GGUF_NAMES = {hf: name for name, hf in TENSOR_NAMES.items()}
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from the order 0, 1, ..., d-1 to 0, d/2, 1, d/2+1, ..."""
    heads = rows.reshape(num_heads, -1, *rows.shape[1:])
    half = heads.shape[1] // 2
    out = np.empty_like(heads)
    out[:, 0::2], out[:, 1::2] = heads[:, :half], heads[:, half:]
    return out.reshape(rows.shape)


def write_gguf(
    path: Path,
    directory: Path,
    *,
    architecture: str = "llama",
    quantization: gguf.GGMLQuantizationType | None = None,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """The model of a Hugging Face directory as a GGUF file, with a byte-level tokenizer.

    Matrices are of one kind, those with a name in ``kinds`` of that one.
    """
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    tokenizer = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": ALPHABET + SPECIAL,
        "token_type": [1] * 256 + [3] * 4,
        "merges": ["h e", "l l"],
        "bos_token_id": 256,
        "eos_token_id": 257,
        "eot_token_id": 259,
    }
    tokenizer["tokens"][255] = "he"  # merges need their results in the vocabulary
    tokenizer["tokens"][254] = "ll"
    keys = {f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()}
    for name, value in {**keys, **(metadata or {})}.items():
        add = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool}
        add.get(type(value), writer.add_array)(name, value)
    for name, tensor in load_file(directory / "model.safetensors").items():
        layer, part, kind = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.*)\.(\w+)", name).groups()
        values = tensor.numpy()
        if architecture == "llama" and part.endswith(("q_proj", "k_proj")):
            heads = "num_attention_heads" if "q_proj" in part else "num_key_value_heads"
            values = interleaved(values, config[heads])
        stored = f"{f'blk.{layer}.' if layer else ''}{GGUF_NAMES[part]}.{kind}"
        chosen = (kinds or {}).get(stored.removesuffix(".weight"), quantization)
        if chosen is not None and values.ndim == 2:
            packed = gguf.quants.quantize(values, chosen)
            writer.add_tensor(stored, packed, raw_dtype=chosen)
        else:
            writer.add_tensor(stored, values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
