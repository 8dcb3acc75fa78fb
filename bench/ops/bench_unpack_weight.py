"""unpack_weight: rows of a packed weight as float32, from many rows and from one."""

from __future__ import annotations

import pytest
import torch

from bench.harness.ceilings import report
from eecore import ops


@pytest.mark.parametrize("num_rows", [1, 4096])
@pytest.mark.parametrize("format", ["Q4_0", "Q8_0"])
def bench_unpack_weight(benchmark, format: str, num_rows: int) -> None:
    row_bytes = {"Q4_0": 18, "Q8_0": 34}[format] * 64
    blocks = torch.randint(0, 256, (4096, row_bytes), dtype=torch.uint8)
    packed = ops.pack_weight(blocks, format)
    out = torch.empty(num_rows, 2048)
    benchmark(lambda: ops.unpack_weight(packed.weight, packed.table[:num_rows], out=out))
    report(benchmark, moved_bytes=out.nbytes)
