"""Ceilings of this machine, measured together with a benchmark to compare its result with.

An absolute time on a shared machine says little; a share of the machine's ceiling says a lot. Every
benchmark reports through :func:`report`, which measures the ceiling right after the benchmark
and puts GB/s, GFLOP/s and the fraction of the ceiling into pytest-benchmark's extra_info.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from eecore import _C

DRAM_FLOATS = 64 << 20  # 256 MB, beyond every cache
L3_FLOATS = 2 << 20  # 8 MB, beyond the second-level cache
L3_BYTES = 24 << 20  # larger working sets are compared with memory


@functools.cache
def read_buffer() -> torch.Tensor:
    """The buffer for measuring read rates."""
    return torch.ones(DRAM_FLOATS)


def read_ceiling(working_set: int) -> float:
    """Bytes per second of a plain read loop, from L3 or from memory, on torch's threads."""
    floats, runs = (L3_FLOATS, 50) if working_set <= L3_BYTES else (DRAM_FLOATS, 4)
    return float(max(_C.read_rate(read_buffer().data_ptr(), floats) for _ in range(runs)))


def read_rate(num_bytes: int) -> float:
    """Bytes per second of reading ``num_bytes``, at most 256 MB, again and again."""
    floats = min(max(num_bytes // 4, 1024), DRAM_FLOATS)
    runs = max(4, min(50, DRAM_FLOATS // floats))
    return float(max(_C.read_rate(read_buffer().data_ptr(), floats) for _ in range(runs)))


def are_cached(num_bytes: int) -> bool:
    """Whether ``num_bytes`` are read from a cache: clearly faster than memory."""
    return read_rate(num_bytes) > 1.25 * read_rate(4 * DRAM_FLOATS)


def weights_lie(num_bytes: int) -> str:
    """A sentence on where weights of ``num_bytes`` are read from."""
    rate, memory = read_rate(num_bytes), read_rate(4 * DRAM_FLOATS)
    where = "a cache" if rate > 1.25 * memory else "memory"
    return (
        f"Its {num_bytes / 1e6:.0f} MB of weights come from {where}: so many bytes are read at "
        f"{rate / 1e9:.0f} GB/s here, 256 MB at {memory / 1e9:.0f}."
    )


def multiply_ceiling(dtype: torch.dtype) -> float:
    """Operations per second of multiply-adds of float32, bfloat16 or int8, with the matrix tiles,
    pairs or dot products of the capability in use."""
    numbers = str(dtype).removeprefix("torch.")
    return float(max(_C.multiply_rate(numbers, 200_000) for _ in range(20)))


def ceilings() -> dict[str, float]:
    """The ceilings of this machine on torch's threads: bytes and operations per second."""
    return {
        "dram_read": read_ceiling(DRAM_FLOATS * 4),
        "l3_read": read_ceiling(L3_FLOATS * 4),
        "float32_multiply": multiply_ceiling(torch.float32),
        "bfloat16_multiply": multiply_ceiling(torch.bfloat16),
        "int8_multiply": multiply_ceiling(torch.int8),
    }


def describe_ceilings(measured: dict[str, float], threads: int) -> str:
    """A sentence on ceilings that were measured on so many threads, for the text of a table."""
    products = [
        f"{rate / threads / 1e9:.0f} in {name.removesuffix('_multiply')}"
        for name, rate in measured.items()
        if name.endswith("_multiply")
    ]
    return (
        f"Measured in the same run: memory read {measured['dram_read'] / 1e9:.1f} GB/s, L3 read "
        f"{measured['l3_read'] / 1e9:.1f} GB/s; multiply-adds, GOP/s a thread: "
        f"{', '.join(products)}"
    )


def report(
    benchmark: Any,
    *,
    moved_bytes: int,
    working_set: int | None = None,
    flops: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Add rates and fractions of the ceilings to a finished benchmark, by its fastest round.

    Args:
        moved_bytes: bytes that the op must read and write.
        working_set: bytes that it reads again and again; None: ``moved_bytes``.
        flops: operations of an op that may be bound by multiplication.
        dtype: of those operations.
    """
    if benchmark.stats is None:  # --benchmark-disable
        return
    seconds = benchmark.stats.stats.min
    rate = moved_bytes / seconds
    share = rate / read_ceiling(working_set or moved_bytes)
    if flops is not None:
        benchmark.extra_info["GFLOP/s"] = round(flops / seconds / 1e9, 1)
        share = max(share, flops / seconds / multiply_ceiling(dtype))
    benchmark.extra_info["GB/s"] = round(rate / 1e9, 2)
    benchmark.extra_info["of ceiling"] = round(share, 2)
