"""Random weights in the blocks of GGUF files, and packed ones of several layers and formats."""

from __future__ import annotations

from collections.abc import Sequence

import gguf
import numpy as np
import torch

from eecore import ops

# Offsets of a block's float16 numbers, and their values for weights of about 1: scales, minima. The
# scale of MXFP4 is a byte, an exponent.
SCALES: dict[str, tuple[int, tuple[float, ...]]] = {
    "Q4_0": (0, (1 / 5,)),
    "Q4_1": (0, (1 / 5, -1.5)),
    "Q5_0": (0, (1 / 10,)),
    "Q5_1": (0, (1 / 10, -1.5)),
    "Q8_0": (0, (1 / 75,)),
    "Q4_K": (0, (1 / 160, 1 / 20)),
    "Q5_K": (0, (1 / 320, 1 / 20)),
    "Q6_K": (208, (1 / 1400,)),
    "Q2_K": (80, (1 / 8, 1 / 5)),
    "Q3_K": (108, (1 / 40,)),
    "IQ4_NL": (0, (1 / 60,)),
    "IQ4_XS": (0, (1 / 1000,)),
    "MXFP4": (0, (1 / 4,)),
}
SMALL_FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
"""Formats whose blocks have 32 columns."""


def block_sizes(format: str) -> tuple[int, int]:
    """Columns and bytes of a block."""
    columns, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format]]
    return columns, num_bytes


def random_blocks(
    format: str, num_rows: int, columns: int, size: float = 1.0, seed: int = 0
) -> torch.Tensor:
    """uint8 [num_rows, row_bytes]: every bit pattern of quants, weights of about ``size``."""
    random = np.random.default_rng(seed)
    per_block, num_bytes = block_sizes(format)
    blocks = random.integers(0, 256, (num_rows, columns // per_block, num_bytes), dtype=np.uint8)
    first, sizes = SCALES[format]
    for i, value in enumerate(sizes):
        scales = value * size * random.uniform(0.5, 1.5, blocks.shape[:2])
        if format == "MXFP4":
            blocks[..., 0] = 128 + np.floor(np.log2(scales))
            break
        at = slice(first + 2 * i, first + 2 * i + 2)
        blocks[..., at] = scales.astype(np.float16)[..., None].view(np.uint8)
    return torch.from_numpy(blocks.reshape(num_rows, columns // per_block * num_bytes))


def packed_layers(
    parts: Sequence[Sequence[tuple[str, int]]], columns: int, *, size: float = 1.0, seed: int = 0
) -> ops.Matrix:
    """A matrix of several layers, each with parts of (format, rows) one after the other."""
    sizes = [[ops.packed_bytes(*part, columns) for part in layer] for layer in parts]
    packed = torch.zeros(sum(map(sum, sizes)), dtype=torch.uint8)
    table = torch.zeros(len(parts), sum(rows for _, rows in parts[0]), dtype=torch.int64)
    offset = 0
    for layer, own, own_sizes in zip(table, parts, sizes, strict=True):
        first = 0
        for (format, rows), num_bytes in zip(own, own_sizes, strict=True):
            seed += 1
            blocks = random_blocks(format, rows, columns, size, seed)
            into = layer[first : first + rows]
            ops.pack_weight(blocks, format, offset=offset, packed=packed, table=into)
            first, offset = first + rows, offset + num_bytes
    return ops.Matrix(packed, None, None, table)
