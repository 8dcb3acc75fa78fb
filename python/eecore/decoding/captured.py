"""Plans as CUDA graphs: an iteration is one launch, and the GPU decides how deep it goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
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
    """Runs every body, needed or not."""

    def unless(self, flag: Tensor, body: Callable[[], None]) -> None:  # noqa: ARG002
        """See :class:`eecore.decoding.decode_plan.Control`."""
        body()


class Segments:
    """Cuts the capture at every decision: a graph for each stretch, and one for what is behind.

    Each decision's flag is copied to the host at the end of its graph. The host launches a stretch
    before it knows of the last decision, which it looks up while the stretch runs: a body that runs
    for nothing has no effect.
    """

    def __init__(self, stream: torch.cuda.Stream, device: torch.device) -> None:
        self._stream = stream
        self._device = device
        self._graphs: list[ops.CapturedGraph] = []
        self._flags: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []
        self._depth = 0
        self._open = ExitStack()

    def capture(self, plan: Plan) -> None:
        """All of a plan."""
        with self._open:
            self._cut()
            plan.run(self)

    def unless(self, flag: Tensor, body: Callable[[], None]) -> None:
        """See :class:`eecore.decoding.decode_plan.Control`."""
        told = torch.zeros(1, dtype=torch.bool, pin_memory=True)
        told.copy_(flag, non_blocking=True)
        self._flags.append(told)
        self._events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        self._cut()
        self._depth += 1
        body()
        self._depth -= 1
        if self._depth == 0:  # what follows runs in any case
            self._cut()

    def _cut(self) -> None:
        """The end of one graph, if any, and the beginning of the next."""
        self._open.close()
        self._graphs.append(ops.CapturedGraph(self._device))
        self._open.enter_context(self._graphs[-1].capture(self._stream))

    def run(self) -> None:
        """Launch the stretches until a flag says that the others are not needed."""
        for i, graph in enumerate(self._graphs[:-1]):
            if i >= 2:  # the stretch before this one is running meanwhile
                self._events[i - 2].synchronize()
                if self._flags[i - 2].item():
                    break
            graph.launch()
            if i < len(self._events):
                self._events[i].record()
        self._graphs[-1].launch()


@dataclass(frozen=True)
class Capture:
    """A captured plan, and what it took."""

    plan: Plan
    run: Callable[[], None]
    seconds: float
    num_bytes: int
    """Device memory that its graphs and what they allocate hold."""


class CapturedPlans:
    """Runs plans as graphs, captured when each first runs.

    Args:
        device: a GPU.
        in_segments: cut a plan at its decisions, which the host follows one behind, instead of
            leaving them to the GPU.
    """

    def __init__(self, device: torch.device, *, in_segments: bool = False) -> None:
        self._device = device
        self._in_segments = in_segments
        # Graphs never run side by side: they share their memory.
        self._pool: Any = torch.cuda.MemPool()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._captures: dict[int, Capture] = {}

    @property
    def captures(self) -> list[Capture]:
        """All of them so far."""
        return list(self._captures.values())

    def __call__(self, plan: Plan) -> None:
        """One iteration; returns before the GPU has done it."""
        capture = self._captures.get(id(plan))
        if capture is None:
            capture = self._captures[id(plan)] = self._capture(plan)
        capture.run()

    def _capture(self, plan: Plan) -> Capture:
        plan.run(Always())  # loads what a graph will launch; the graph's first run does it again
        plan.send()
        torch.cuda.synchronize(self._device)
        started, free = time.perf_counter(), torch.cuda.mem_get_info(self._device)[0]
        with torch.cuda.use_mem_pool(self._pool, self._device):
            run = self._segments(plan) if self._in_segments else self._one_graph(plan)
        torch.cuda.synchronize(self._device)
        held = free - torch.cuda.mem_get_info(self._device)[0]
        return Capture(plan, run, time.perf_counter() - started, max(held, 0))

    def _one_graph(self, plan: Plan) -> Callable[[], None]:
        graph = ops.CapturedGraph(self._device)
        with graph.capture(self._stream):
            plan.run(InGraph())
        return graph.launch

    def _segments(self, plan: Plan) -> Callable[[], None]:
        segments = Segments(self._stream, self._device)
        segments.capture(plan)
        return segments.run
