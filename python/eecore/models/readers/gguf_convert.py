"""Converts a GGUF file to a model directory: config, dequantised safetensors, tokenizer.

It reads the architectures of ``GGUF_FAMILIES`` in every tensor type that the ``gguf`` package
dequantises. The directory appears whole or not at all.
"""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eecore.errors import ModelError, UnsupportedModelError
from eecore.files.readable import kind_of, path_of, shown_path
from eecore.files.whole import appearing
from eecore.models.readers.checkpoint import DTYPES, INDEX, WHOLE
from eecore.models.readers.gguf_checkpoint import GGUFCheckpoint
from eecore.models.readers.gguf_file import GGUFFile
from eecore.models.readers.gguf_tokenizer import build_tokenizer

BYTES_PER_SHARD = 2 << 30


def convert_gguf(
    file: str | Path, directory: str | Path, dtype: str | torch.dtype = torch.float32
) -> Path:
    """Convert a GGUF file into a new model directory, which is returned.

    Args:
        file: a GGUF file of a supported architecture.
        directory: the new directory; it must not exist, or be empty.
        dtype: the dtype of the written tensors. Only float32 keeps every dequantised value exactly.

    Raises:
        ModelError: the file is missing, not GGUF, truncated or of an unsupported kind, or the
            directory is in use. No files are left then.
    """
    source, target = path_of(file, ModelError), path_of(directory, ModelError)
    stored_as = DTYPES.get(str(dtype).removeprefix("torch."))
    if stored_as is None:
        raise ModelError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype}")
    _check_unused(target)
    checkpoint = GGUFCheckpoint(source)
    values = checkpoint.values
    with appearing(target) as partial:
        values["dtype"] = str(stored_as).removeprefix("torch.")
        _write_json(partial / "config.json", values)
        ids = {name: value for name, value in values.items() if name.endswith("os_token_id")}
        sampling = dict(checkpoint.config.sampling)
        if "temperature" in sampling:
            sampling = {"do_sample": sampling["temperature"] > 0, **sampling}
        _write_json(partial / "generation_config.json", ids | sampling)
        _write_tokenizer(checkpoint.file, partial, checkpoint.config.vocab_size)
        _write_tensors(checkpoint, partial, stored_as)
    return target


def _check_unused(target: Path) -> None:
    kind = kind_of(target)
    if kind != "nothing" and (kind != "a directory" or any(target.iterdir())):
        found = "one in use" if kind == "a directory" else kind
        raise ModelError(f"{shown_path(target)}: expected a new or empty directory, got {found}")


def _write_tensors(stored: GGUFCheckpoint, directory: Path, dtype: torch.dtype) -> None:
    """Write shards of bounded size, so that a file larger than memory can be converted."""
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name in stored.names:
        num_bytes = math.prod(stored.shape(name)) * dtype.itemsize
        if shards[-1] and shard_bytes + num_bytes > BYTES_PER_SHARD:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += num_bytes
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        path = WHOLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: stored.whole_tensor(name).to(dtype).contiguous() for name in names}
        save_file(tensors, directory / path, {"format": "pt"})
        weight_map |= dict.fromkeys(names, path)
    if len(shards) > 1:
        _write_json(directory / INDEX, {"metadata": {}, "weight_map": weight_map})


def _write_tokenizer(file: GGUFFile, directory: Path, vocab_size: int) -> None:
    try:
        tokenizer, settings = build_tokenizer(file, vocab_size)
    except UnsupportedModelError as error:
        warnings.warn(f"{error}; the directory gets no tokenizer", stacklevel=3)
        return
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
