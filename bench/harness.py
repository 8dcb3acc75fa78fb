"""What a benchmark result is held against: ceilings of this machine, measured in the same run.

An absolute time on a shared machine says little; a share of what the machine can do says a lot.
Every benchmark reports through :func:`report`, which puts GB/s or GFLOP/s and the fraction of the
ceiling into pytest-benchmark's extra_info, next to the minimum and the median.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from eecore import _C

DRAM_FLOATS = 64 << 20  # 256 MB, beyond every cache
L3_FLOATS = 2 << 20  # 8 MB, beyond the second-level cache


@dataclass(frozen=True)
class Ceilings:
    """The machine's limits with a number of threads."""

    num_threads: int
    dram_read: float
    """Bytes per second."""
    l3_read: float
    """Bytes per second."""
    fp32: float
    """Floating-point operations per second."""
    bf16: float
    """Likewise, bfloat16 pairs into float32; that of fp32 where the CPU has no such instruction."""

    def read(self, working_set: int) -> float:
        """The ceiling of a kernel that reads ``working_set`` bytes a call."""
        return self.l3_read if working_set < 24 << 20 else self.dram_read


@functools.cache
def _buffer() -> torch.Tensor:
    return torch.ones(DRAM_FLOATS)


def measure(num_threads: int | None = None) -> Ceilings:
    """Best of several runs of the plainest read and multiply-add loops."""
    return _measure(num_threads or torch.get_num_threads())


@functools.cache
def _measure(num_threads: int) -> Ceilings:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    data = _buffer().data_ptr()
    ceilings = Ceilings(
        num_threads=num_threads,
        dram_read=max(_C.read_rate(data, DRAM_FLOATS) for _ in range(8)),
        l3_read=max(_C.read_rate(data, L3_FLOATS) for _ in range(100)),
        fp32=max(_C.multiply_rate(False, 2_000_000) for _ in range(5)),
        bf16=max(_C.multiply_rate(True, 2_000_000) for _ in range(5)),
    )
    torch.set_num_threads(before)
    return ceilings


def report(benchmark: Any, *, moved_bytes: int, working_set: int | None = None) -> None:
    """Add GB/s and the fraction of the read ceiling to a finished benchmark."""
    if benchmark.stats is None:  # --benchmark-disable
        return
    ceiling = measure().read(working_set or moved_bytes)
    rate = moved_bytes / benchmark.stats.stats.min
    benchmark.extra_info["GB/s"] = round(rate / 1e9, 2)
    benchmark.extra_info["of ceiling"] = round(rate / ceiling, 3)
