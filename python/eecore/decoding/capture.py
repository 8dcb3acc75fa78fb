"""Programs, recorded when they first run: a tape on the CPU, a CUDA graph on a GPU."""

from __future__ import annotations

import gc
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch

from eecore import ops
from eecore.decoding.control import Always, InGraph, OnHost, OnTape, Program


@dataclass(frozen=True)
class Capture:
    """A captured program, with the time and memory of its capture."""

    run: Callable[[], None]
    seconds: float
    num_bytes: int
    """Memory of a graph and its allocations, or of a tape's intermediate results."""


class RunProgram(ABC):
    """Runs programs."""

    returns_early = False
    """Whether a run returns before the device has done it, so that the next run can be launched
    before the outcome of this one is known.
    """
    captures_chunks = False
    """Whether chunks of prompts run as programs too, padded to a few sizes: where each call costs
    the host more than padding costs the device.
    """

    @property
    def captures(self) -> list[Capture]:
        """All captures that are still held."""
        return []

    def num_bytes(self, program: Program) -> int:  # noqa: ARG002
        """Memory of a program's capture, without the program's own memory; 0 without a capture."""
        return 0

    @abstractmethod
    def __call__(self, program: Program) -> None:
        """Run a program once."""


class CallByCall(RunProgram):
    """Runs a program's calls one by one; the host looks at its flags."""

    @torch.inference_mode()
    def __call__(self, program: Program) -> None:
        program.run(OnHost())


class _Capturing(RunProgram):
    """Captures a program when it first runs; the capture lives as long as the program."""

    def __init__(self) -> None:
        # By the program's id, which is quick to look up for every run; dropped with the program.
        self._captures: dict[int, tuple[Capture, ReferenceType[Program]]] = {}

    @property
    def captures(self) -> list[Capture]:
        return [capture for capture, _ in list(self._captures.values())]

    def num_bytes(self, program: Program) -> int:
        held = self._captures.get(id(program))
        return 0 if held is None else held[0].num_bytes

    def __call__(self, program: Program) -> None:
        held = self._captures.get(id(program))
        if held is None:
            held = self._hold(program)
        held[0].run()

    @torch.inference_mode()
    def _hold(self, program: Program) -> tuple[Capture, ReferenceType[Program]]:
        """Capture a program, and drop the capture when the program is deleted."""
        captures, key = self._captures, id(program)
        held = self._capture(program), ref(program, lambda _: captures.pop(key, None))
        captures[key] = held
        return held

    @abstractmethod
    def _capture(self, program: Program) -> Capture: ...


class Tapes(_Capturing):
    """Replays programs on the CPU, each by one call without the interpreter's lock.

    Args:
        replay: runs a tape.
    """

    def __init__(self, replay: Callable[[ops.Tape], None] = ops.Tape.replay) -> None:
        super().__init__()
        self._replay = replay

    def _capture(self, program: Program) -> Capture:
        started = time.perf_counter()
        tape = ops.Tape()
        with tape.record():
            program.run(OnTape(tape))
        seconds = time.perf_counter() - started
        return Capture(partial(self._replay, tape), seconds, tape.num_bytes)


class Graphs(_Capturing):
    """Launches programs on a GPU, each as one graph in which the GPU decides how many layers run.

    Raises:
        RuntimeError: torch is set to another CUDA allocator than its native one.
    """

    returns_early = captures_chunks = True
    # While a graph allocates memory no pool may be deleted, or torch ends the process. Pools are
    # deleted with engines, also in other threads, and by the garbage collector.
    _alone = threading.RLock()

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        backend = torch.cuda.memory.get_allocator_backend()
        if backend != "native":
            raise RuntimeError(
                "PYTORCH_CUDA_ALLOC_CONF: expected backend:native, whose pools keep the memory of "
                f"CUDA graphs, got backend:{backend}"
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        # Graphs never run at the same time, so they share one pool, on one stream.
        self._pool: Any = torch.cuda.MemPool()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def __del__(self) -> None:
        with self._alone:
            vars(self).pop("_pool", None)

    def _capture(self, program: Program) -> Capture:
        program.run(Always())  # loads the kernels; the graph's first run repeats the calls
        program.send()
        torch.cuda.synchronize(self._device)
        started, free = time.perf_counter(), torch.cuda.mem_get_info(self._device)[0]
        graph = ops.CapturedGraph(self._device)
        with (
            self._alone,
            _nothing_collected(),
            torch.cuda.use_mem_pool(self._pool, self._device),
            graph.capture(self._stream),
        ):
            program.run(InGraph())
        torch.cuda.synchronize(self._device)
        held = free - torch.cuda.mem_get_info(self._device)[0]
        return Capture(graph.launch, time.perf_counter() - started, max(held, 0))


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """A context in which no garbage is collected; for one thread at a time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def run_program_on(device: torch.device) -> RunProgram:
    """The way to run programs on a device."""
    return Graphs(device) if device.type == "cuda" else Tapes()
