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

__all__ = ["CallByCall", "Capture", "Graphs", "RunProgram", "Tapes", "run_program_on"]


@dataclass(frozen=True)
class Capture:
    """A captured program, and what it took."""

    run: Callable[[], None]
    seconds: float
    num_bytes: int
    """Memory that a graph and what it allocates, or a tape's intermediate results, hold."""


class RunProgram(ABC):
    """Runs programs."""

    returns_early = False
    """Whether a run returns before the device has done it: the next can be launched then before the
    outcome of this one is known.
    """

    @property
    def captures(self) -> list[Capture]:
        """All that were captured and are still held."""
        return []

    def num_bytes(self, program: Program) -> int:  # noqa: ARG002
        """Memory that a program's capture holds besides the program's own; 0 without one."""
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
    """Captures a program when it first runs, and holds that for as long as there is the program."""

    def __init__(self) -> None:
        # By the program's id, until it goes: this is looked up for every run.
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
        """Capture a program, and forget it when the program goes."""
        captures, key = self._captures, id(program)
        held = self._capture(program), ref(program, lambda _: captures.pop(key, None))
        captures[key] = held
        return held

    @abstractmethod
    def _capture(self, program: Program) -> Capture: ...


class Tapes(_Capturing):
    """Replays programs on the CPU, each by one call that holds no lock of the interpreter.

    Args:
        replay: what is done with a tape to run it.
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
    """Launches programs on a GPU, each as one graph in which the GPU decides how deep it goes.

    Raises:
        RuntimeError: torch's allocator of CUDA memory is another one than its own.
    """

    returns_early = True
    # While a graph gets its memory no pool may go: torch ends the process. Pools go with engines,
    # of other threads too, and with what is collected.
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
        # Graphs never run side by side: they share their memory, all of it of one stream.
        self._pool: Any = torch.cuda.MemPool()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def __del__(self) -> None:
        with self._alone:
            vars(self).pop("_pool", None)

    def _capture(self, program: Program) -> Capture:
        program.run(Always())  # loads what a graph will launch; the graph's first run does it again
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
    """No garbage is collected inside; one thread at a time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def run_program_on(device: torch.device) -> RunProgram:
    """How programs run on a device."""
    return Graphs(device) if device.type == "cuda" else Tapes()
