"""Plans as CUDA graphs: an iteration is one launch, and the GPU decides how deep it goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eecore import ops
from eecore.decoding.planned import Plan

__all__ = ["Capture", "CapturedPlans"]


class InGraph:
    """Makes every decision an IF node of the graph under capture."""

    def unless(self, flag: Tensor, body: Callable[[], None]) -> None:
        """See :class:`eecore.decoding.decode_plan.Control`."""
        with ops.captured_body(flag, when=False):
            body()


class Always:
    """Runs every body, needed or not: what a graph will launch is loaded then."""

    def unless(self, flag: Tensor, body: Callable[[], None]) -> None:  # noqa: ARG002
        """See :class:`eecore.decoding.decode_plan.Control`."""
        body()


@dataclass(frozen=True)
class Capture:
    """A captured plan, and what it took."""

    graph: torch.cuda.CUDAGraph
    seconds: float
    num_bytes: int
    """Device memory that the graph and its pool hold."""


class CapturedPlans:
    """Runs plans as graphs, each captured when it first runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Graphs never run side by side: they share their memory.
        self._pool: Any = torch.cuda.MemPool()
        self._captures: dict[int, tuple[Plan, Capture]] = {}

    @property
    def captures(self) -> list[Capture]:
        """All of them so far."""
        return [capture for _, capture in self._captures.values()]

    def __call__(self, plan: Plan) -> None:
        """One iteration; returns before the GPU has done it."""
        if id(plan) not in self._captures:
            self._captures[id(plan)] = plan, self._capture(plan)
        self._captures[id(plan)][1].graph.replay()

    def _capture(self, plan: Plan) -> Capture:
        plan.run(Always())  # what it writes, the graph's first run writes again
        torch.cuda.synchronize(self._device)
        started, free = time.perf_counter(), torch.cuda.mem_get_info(self._device)[0]
        graph = torch.cuda.CUDAGraph()
        # Bodies are captured on streams of their own, which the graph's own pool does not know.
        with (
            torch.cuda.use_mem_pool(self._pool, self._device),
            torch.cuda.graph(graph, pool=self._pool.id, capture_error_mode="relaxed"),
        ):
            plan.run(InGraph())
        torch.cuda.synchronize(self._device)
        held = free - torch.cuda.mem_get_info(self._device)[0]
        return Capture(graph, time.perf_counter() - started, max(held, 0))
