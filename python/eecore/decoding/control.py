"""How a program depends on data: which rows take part in its calls, and which calls are skipped.

A program is written once. Run call by call, or captured as a CUDA graph, all its rows take part in
every call, and inactive rows are masked. On the CPU, where a masked row costs as much as an active
one, the program is recorded as a tape: calls get their number of rows from memory, active rows are
moved to the front (``compacts``), and flags are jumps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from eecore import ops


class Control(ABC):
    """Decides by values that only the device knows."""

    compacts = False
    """Whether active rows are moved to the front, and no other rows take part in a call."""

    def rows(self, count: Tensor, seqs: Tensor | None = None) -> AbstractContextManager[None]:  # noqa: ARG002
        """A context whose calls are about the first ``count`` rows, of ``seqs`` sequences (int32
        [1] each); about all rows without :attr:`compacts`.
        """
        return nullcontext()

    def condition(self, flag: Tensor) -> int | None:  # noqa: ARG002
        """A handle for the op that writes ``flag`` last, where that op sets the condition of
        :meth:`unless`: both get the handle. None where the flag is read instead.
        """
        return None

    @abstractmethod
    def unless(self, flag: Tensor, body: Callable[[], None], condition: int | None = None) -> None:
        """Run ``body`` if ``flag`` (bool [1]) is false by then. Where the flag is true ``body`` may
        run as well, without effect.
        """


class Program(Protocol):
    """All calls from the embeddings to the tokens of some rows, over fixed memory."""

    def send(self) -> None:
        """Send the loaded rows to the device, where a run may have changed them."""
        ...

    def run(self, control: Control) -> None:
        """Make all calls of the program."""
        ...


class OnHost(Control):
    """Runs call by call; the host waits for the device and reads flags."""

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
