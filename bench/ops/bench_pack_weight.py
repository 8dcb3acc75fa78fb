"""pack_weight of 64 MB of a file's blocks."""

from __future__ import annotations

import gguf
import pytest
import torch

from bench.harness.ceilings import report
from eecore import ops


@pytest.mark.parametrize("format", ops.BLOCK_FORMATS)
def bench_pack_weight(benchmark, format: str) -> None:
    columns, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format]]
    row_bytes = 2048 // columns * num_bytes
    blocks = torch.randint(0, 256, ((64 << 20) // row_bytes, row_bytes), dtype=torch.uint8)
    into = ops.pack_weight(blocks, format)
    benchmark(lambda: ops.pack_weight(blocks, format, packed=into.weight, table=into.table))
    report(benchmark, moved_bytes=blocks.nbytes + into.weight.nbytes)
