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

from bench.decode.models import add_settings, interleave_rotary
from eecore.models.readers.gguf_checkpoint import TENSOR_NAMES
from packed_blocks import random_blocks

GGUF_NAMES = {hf: name for name, hf in TENSOR_NAMES.items()}
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def blocks_of(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """A matrix in blocks: of its values where gguf quantises to the kind, random ones elsewhere."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        return random_blocks(kind.name, *values.shape, size=float(values.std())).numpy()


def write_gguf(
    path: Path,
    directory: Path,
    *,
    architecture: str = "llama",
    quantization: gguf.GGMLQuantizationType | None = None,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    tensors_per_part: int = 0,
) -> Path:
    """The model of a Hugging Face directory as a GGUF file, with a byte-level tokenizer.

    Matrices are of one kind, those with a name in ``kinds`` of that one; of a kind that gguf does
    not quantise they are random, of the same size. With ``tensors_per_part`` there are several
    files, the first of which is returned.
    """
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_part)
    add_settings(writer, config)
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
        add[float] = writer.add_float32
        add.get(type(value), writer.add_array)(name, value)
    for name, tensor in load_file(directory / "model.safetensors").items():
        layer, part, kind = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.*)\.(\w+)", name).groups()
        values = tensor.numpy()
        if architecture in ("llama", "nanbeige") and part.endswith(("q_proj", "k_proj")):
            heads = "num_attention_heads" if "q_proj" in part else "num_key_value_heads"
            values = interleave_rotary(values, config[heads])
        stored = f"{f'blk.{layer}.' if layer else ''}{GGUF_NAMES[part]}.{kind}"
        chosen = (kinds or {}).get(stored.removesuffix(".weight"), quantization)
        if chosen is not None and values.ndim == 2:
            writer.add_tensor(stored, blocks_of(values, chosen), raw_dtype=chosen)
        else:
            writer.add_tensor(stored, values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.exists() else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))
