"""Faults at any line of the engine: an exception where a call begins its n-th line.

Lines are counted in the folders that keep the books of requests, whatever is called from there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import eecore

PACKAGE = Path(eecore.__file__).parent
WATCHED = tuple(str(PACKAGE / folder) for folder in ("engine", "scheduling", "decoding"))


class Fault(Exception):
    """What a faulty program raises."""


class Interrupt(BaseException):
    """What somebody else raises, like KeyboardInterrupt."""


class Tripwire:
    """Raises ``error`` before the ``at``-th line is run inside; counts lines without one.

    Attributes:
        lines: that were begun.
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
        """Whether it has raised."""
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
