"""How a program says what depends on data: which rows are there, and what is passed over.

A program is written once. Run call by call, or captured as a CUDA graph, all its rows take part in
every call, and those that are out are masked. On the CPU, where a masked row costs as much as any
other, it is recorded as a tape: calls get their number of rows from memory, rows that are out are
moved out of the way (``compacts``), and flags are jumps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from eecore import ops

__all__ = ["Control", "InGraph", "OnHost", "OnTape", "Program"]


class Control(ABC):
    """Decides on what only the device knows."""

    compacts = False
    """Whether the rows that are left stand in front, and no others take part in a call."""

    def rows(self, count: Tensor, seqs: Tensor | None = None) -> AbstractContextManager[None]:  # noqa: ARG002
        """Calls inside are about the first ``count`` rows, of ``seqs`` sequences (int32 [1] each),
        where :attr:`compacts`; about all of them elsewhere.
        """
        return nullcontext()

    def condition(self, flag: Tensor) -> int | None:  # noqa: ARG002
        """What the op that writes ``flag`` last is told where it decides on what :meth:`unless`
        passes over, which then gets it too.
        """
        return None

    @abstractmethod
    def unless(self, flag: Tensor, body: Callable[[], None], condition: int | None = None) -> None:
        """Run ``body`` if ``flag`` (bool [1]) is false by then; where it is true, it may run too:
        it has no effect then.
        """


class Program(Protocol):
    """Everything from the first embedding to the last token of some rows, over fixed memory."""

    def send(self) -> None:
        """Have its rows sent to the device, where a run may change what it was given."""
        ...

    def run(self, control: Control) -> None:
        """All of its calls."""
        ...


class OnHost(Control):
    """Runs call by call; the host waits for the device and looks at flags."""

    def unless(self, flag: Tensor, body: Callable[[], None], condition: int | None = None) -> None:  # noqa: ARG002
        if not flag.item():
            body()


class Always(Control):
    """Runs every body, needed or not."""

    def unless(self, flag: Tensor, body: Callable[[], None], condition: int | None = None) -> None:  # noqa: ARG002
        body()


class InGraph(Control):
    """Makes every decision an IF node of the CUDA graph under capture."""

    def condition(self, flag: Tensor) -> int | None:
        return ops.captured_condition(flag.device)

    def unless(self, flag: Tensor, body: Callable[[], None], condition: int | None = None) -> None:
        with ops.captured_body(flag, when=False, condition=condition):
            body()


class OnTape(Control):
    """Makes every decision a jump of the tape that is being recorded."""

    compacts = True

    def __init__(self, tape: ops.Tape) -> None:
        self._tape = tape

    def rows(self, count: Tensor, seqs: Tensor | None = None) -> AbstractContextManager[None]:
        return self._tape.rows(count, seqs)

    def unless(self, flag: Tensor, body: Callable[[], None], condition: int | None = None) -> None:  # noqa: ARG002
        with self._tape.unless(flag):
            body()
