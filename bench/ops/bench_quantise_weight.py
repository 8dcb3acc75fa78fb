"""quantise_weight of 64 MB of float32."""

from __future__ import annotations

import pytest
import torch

from bench.harness.ceilings import report
from eecore import ops


@pytest.mark.parametrize("format", ops.FLOAT_BLOCK_FORMATS)
def bench_quantise_weight(benchmark, format: str) -> None:
    weight = torch.randn(8192, 2048) * 0.02
    blocks = ops.quantise_weight(weight, format)
    benchmark(lambda: ops.quantise_weight(weight, format, blocks=blocks))
    report(benchmark, moved_bytes=weight.nbytes + blocks.nbytes)
