"""Faults at any line of the engine, and failures without a planted one.

A fault is an exception where a call begins its n-th line. Lines are counted in the folders that
keep the books of requests, whatever is called from there. Some of what fails without a planted
fault is done again by the engine, so that outputs never show it: it is watched for here.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import pytest

import eecore
from eecore.errors import GuideError

PACKAGE = Path(eecore.__file__).parent
FOLDERS = ("engine", "scheduling", "planning", "decoding")
WATCHED = tuple(str(PACKAGE / folder) for folder in FOLDERS)


class Fault(Exception):
    """The error of a faulty program: the only one for which an engine may repeat work."""


class Interrupt(BaseException):
    """An exception from outside, like KeyboardInterrupt."""


class Tripwire:
    """Raises ``error`` before the ``at``-th line is run inside; counts lines without one.

    Attributes:
        lines: the number of lines begun.
    """

    def __init__(self, at: int | None = None, error: type[BaseException] = Interrupt) -> None:
        self._at, self._error = at, error
        self._tracer: Any = None
        self.lines = 0

    def __enter__(self) -> Tripwire:
        self._tracer = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        sys.settrace(self._tracer)

    @property
    def tripped(self) -> bool:
        """Whether the tripwire has raised."""
        return self._at is not None and self.lines >= self._at

    def _on_call(self, frame: FrameType, _event: str, _arg: object) -> Any:
        return self._on_line if frame.f_code.co_filename.startswith(WATCHED) else None

    def _on_line(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self._at:
                where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise self._error(where)
        return self._on_line


@contextmanager
def nothing_done_again() -> Iterator[None]:
    """Fails if an engine of this process repeats an iteration that no :class:`Fault` broke.

    Raises:
        AssertionError: with the traceback of each failure.
    """
    found: list[str] = []
    counted = eecore.Engine._failed

    def failed(engine: eecore.Engine, what: str) -> None:
        if not _is_planted(sys.exc_info()[1]):
            found.append(f"{what}\n{traceback.format_exc()}")
        counted(engine, what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eecore.Engine, "_failed", failed)
        yield
    assert not found, "an engine did work again:\n" + "\n".join(found)


def _is_planted(error: BaseException | None) -> bool:
    """Whether an error, or one that it comes from, is a planted fault, an interrupt, or a guide
    that explodes.

    A matcher finds out that a hostile guide is one in the middle of an iteration.
    """
    while isinstance(error, Exception) and not isinstance(error, (Fault, GuideError)):
        error = error.__cause__ or error.__context__
    return error is not None
