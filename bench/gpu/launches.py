"""Kernels as the model of time sees them: grid, bytes, operations; how long they should take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.gpu.devices import Gpu

# Seconds that a kernel takes beside what it moves and multiplies: instructions and trips to memory
# that wait for each other. From a count over its machine code of what one row takes after
# griddepcontrol.wait, stall counts and 290 cycles for a load from L2 at 1.755 GHz, give or take
# 20 %, and of products from what ops took on an H100 beside their bytes (2.2 to 3.0 us, the
# boundary included). Not measured one by one; `bench gpu-kernels` does that.
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
    "rms_norm_kernel": 1.0e-6,
    "skinny_append_kernel": 1.0e-6,
    "skinny_gated_linear_kernel": 1.6e-6,
    "skinny_linear_kernel": 1.5e-6,
    # Never measured: those of the others, and a barrier ahead of the first product.
    "skinny_warpgroup_gated_kernel": 1.7e-6,
    "skinny_warpgroup_linear_kernel": 1.6e-6,
}
# The same of kernels that found out where rows and keys are after the wait: those of the run on an
# H100 that bench/RESULTS.md shows.
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
        repeats: bytes by operand that blocks read once more, which the L2 cache gives.
        writes: bytes written to global memory.
        workspace: bytes that it leaves to the next kernel of its call, or was left. The L2 cache
            keeps them where they fit.
        last_blocks, last_bytes: of the workspace what so many of its blocks read once all others
            have ended.
        flops: operations of the matrix instructions, padding included.
        starts_early: it asks to start before the kernel ahead has ended (Launch::kAfterPrevious).
        at_work: blocks that find something to do; None: all.
        latency: seconds more than :data:`LATENCIES` says.
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
        """To and from memory, the workspace left out."""
        return sum(self.reads.values()) + self.writes


def set_condition() -> KernelLaunch:
    """What runs ahead of an IF node."""
    return KernelLaunch("set_condition_kernel", (1, 1), {"flag": 1}, starts_early=False)


@dataclass(frozen=True)
class IfNode:
    """A node of a graph that has a body, or passes over it."""


Node = KernelLaunch | IfNode


def work_seconds(gpu: Gpu, launch: KernelLaunch) -> float:
    """A kernel without its boundary: the longest of what memory, L2 and tensor cores take.

    Fewer blocks than multiprocessors have their share of L2 and of the tensor cores alone.
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
    """Kernels one after the other in a graph, each with its boundary, its latency and its work.

    A kernel starts early only right behind another one, and an IF node is taken to cost a boundary
    of its own: csrc/cuda/device.cu, may_start_early.
    """
    total = 0.0
    behind_kernel = True  # replays follow each other
    for node in nodes:
        if isinstance(node, IfNode):
            total += gpu.boundary
            behind_kernel = False
            continue
        early = node.starts_early and behind_kernel and gpu.capability >= 90
        total += gpu.early_boundary if early else gpu.boundary
        total += work_seconds(gpu, node)
        total += latencies.get(node.kernel, FEW_TRIPS) + node.latency
        behind_kernel = True
    return total


def kernels(nodes: Iterable[Node]) -> list[KernelLaunch]:
    """Those of the nodes that are one."""
    return [node for node in nodes if isinstance(node, KernelLaunch)]
