"""Kernels in the model of time: grid, bytes and operations, and their expected seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.gpu.devices import Gpu

# Seconds of a kernel in addition to its bytes and operations: dependent instructions and memory
# accesses. Counted over its machine code for one row after griddepcontrol.wait, with stall counts
# and 290 cycles for a load from L2 at 1.755 GHz, accurate to 20 %; for products, from the times of
# ops on an H100 less the times of their bytes (2.2 to 3.0 us, the boundary included). They are not
# measured one by one; `bench gpu-kernels` does that.
FEW_TRIPS = 0.4e-6
LATENCIES = {
    "append_kv_float8_kernel": 1.0e-6,
    "append_kv_kernel": 1.0e-6,
    "exit_confidence_softmax_kernel": 1.6e-6,
    "exit_confidence_softmax_many_kernel": 2.0e-6,
    "kv_fill_kernel": 1.6e-6,
    "kv_fill_pairs_kernel": 1.6e-6,
    "kv_fill_rows_kernel": 1.0e-6,
    "paged_attention_combine_kernel": 1.0e-6,
    "paged_attention_float8_kernel": 2.5e-6,
    "paged_attention_kernel": 1.8e-6,
    # Never measured: the first keys, then the products and weights of two steps before the turns
    # overlap, and the rows at the end.
    "paged_attention_prompt_kernel": 4.0e-6,
    "paged_attention_wide_kernel": 1.8e-6,  # never measured: that of one band of rows
    "rms_norm_kernel": 1.0e-6,
    "skinny_append_kernel": 1.0e-6,
    "skinny_gated_linear_kernel": 1.6e-6,
    "skinny_linear_kernel": 1.5e-6,
    # Never measured: those of the others, and a barrier ahead of the first product.
    "exit_confidence_softmax_warpgroup_kernel": 1.7e-6,
    "kv_fill_warpgroup_kernel": 1.7e-6,
    "skinny_warpgroup_append_kernel": 1.1e-6,
    "skinny_warpgroup_gated_kernel": 1.7e-6,
    "skinny_warpgroup_linear_kernel": 1.6e-6,
}
# The same for kernels that read the places of rows and keys after the wait: the kernels of the run
# on an H100 in bench/results.
LATENCIES_AFTER_THE_WAIT = {
    **LATENCIES,
    "paged_attention_float8_kernel": 4.5e-6,
    "paged_attention_kernel": 4.5e-6,
    "skinny_append_kernel": 1.6e-6,
    "skinny_linear_kernel": 1.6e-6,
}


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel of a call.

    Args:
        kernel: its name in include/eecore, without template arguments.
        grid: blocks in x and y.
        reads: bytes of global memory by operand, each byte once.
        repeats: bytes by operand that blocks read again, from the L2 cache.
        writes: bytes written to global memory.
        workspace: bytes written for the next kernel of the call, or read from the previous one. The
            L2 cache keeps them if they fit.
        last_blocks: blocks that read the workspace after all other blocks have ended.
        last_bytes: bytes of the workspace that these blocks read.
        flops: operations of the matrix instructions, padding included.
        starts_early: whether it may start before the previous kernel ends (Launch::kAfterPrevious).
        at_work: blocks that have work; None: all.
        latency: seconds in addition to :data:`LATENCIES`.
    """

    kernel: str
    grid: tuple[int, int]
    reads: Mapping[str, float] = field(default_factory=dict)
    repeats: Mapping[str, float] = field(default_factory=dict)
    writes: float = 0.0
    workspace: float = 0.0
    last_blocks: int = 0
    last_bytes: float = 0.0
    flops: float = 0.0
    starts_early: bool = True
    at_work: int | None = None
    latency: float = 0.0

    @property
    def blocks(self) -> int:
        return math.prod(self.grid)

    @property
    def moved_bytes(self) -> float:
        """Bytes to and from memory, without the workspace."""
        return sum(self.reads.values()) + self.writes


def set_condition() -> KernelLaunch:
    """The kernel before an IF node, which sets its condition."""
    return KernelLaunch("set_condition_kernel", (1, 1), {"flag": 1}, starts_early=False)


@dataclass(frozen=True)
class IfNode:
    """A conditional node of a graph, which runs its body or skips it."""


Node = KernelLaunch | IfNode


def work_seconds(gpu: Gpu, launch: KernelLaunch) -> float:
    """Seconds of a kernel without its boundary: the longest of memory, L2 and tensor cores.

    A kernel with fewer blocks than multiprocessors gets only their share of L2 and tensor cores.
    """
    blocks = launch.blocks if launch.at_work is None else launch.at_work
    busy = min(1.0, blocks / gpu.num_multiprocessors)
    if busy == 0.0:
        return 0.0
    left = launch.workspace + launch.last_bytes
    spilt = left if launch.workspace > gpu.l2_bytes / 2 else 0.0
    through_l2 = launch.moved_bytes + launch.workspace + sum(launch.repeats.values())
    at_once = max(
        (launch.moved_bytes + spilt) / gpu.memory_rate,
        through_l2 / (gpu.l2_rate * busy),
        launch.flops / (gpu.tensor_rate * busy),
    )
    if launch.last_blocks == 0:
        return at_once
    still_busy = min(1.0, launch.last_blocks / gpu.num_multiprocessors)
    return at_once + launch.last_bytes / (gpu.l2_rate * still_busy)


def seconds(gpu: Gpu, nodes: Sequence[Node], latencies: Mapping[str, float] = LATENCIES) -> float:
    """Seconds of consecutive kernels in a graph, each with its boundary, latency and work.

    A kernel starts early only directly after another kernel, and an IF node is assumed to cost a
    boundary of its own: csrc/cuda/device.cu, may_start_early.
    """
    total = 0.0
    after_kernel = True  # replays follow each other
    for node in nodes:
        if isinstance(node, IfNode):
            total += gpu.boundary
            after_kernel = False
            continue
        early = node.starts_early and after_kernel and gpu.capability >= 90
        total += gpu.early_boundary if early else gpu.boundary
        total += work_seconds(gpu, node)
        total += latencies.get(node.kernel, FEW_TRIPS) + node.latency
        after_kernel = True
    return total


def kernels(nodes: Iterable[Node]) -> list[KernelLaunch]:
    """The nodes that are kernels."""
    return [node for node in nodes if isinstance(node, KernelLaunch)]
