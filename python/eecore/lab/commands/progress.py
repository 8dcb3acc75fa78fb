"""The progress of a command, in a line on stderr."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.markup import escape

LINE_SECONDS = 10.0
"""Seconds between two lines where stderr is not a terminal."""


class ProgressLine:
    """The progress of a run, in a line on stderr: overwritten on a terminal, else every 10
    seconds.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status = self._console.status("starting") if self._console.is_terminal else None
        self._shown_at = -LINE_SECONDS
        # of each part: the time and the count of its beginning
        self._begun: dict[str, tuple[float, float]] = {}
        self.last = ""
        """The last text, shown or not."""

    def __enter__(self) -> ProgressLine:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str, *, last: bool = False) -> None:
        """Show the state of the run; the last text is always shown."""
        now = time.monotonic()
        self.last = text
        if self._status is not None:
            self._status.update(escape(text))
        elif now - self._shown_at >= LINE_SECONDS or last:
            self._shown_at = now
            print(text, file=sys.stderr, flush=True)

    def count(self, part: str, done: float, wanted: float, unit: str) -> None:
        """Show the progress of a part of the run, and about how long the rest of it takes."""
        now = time.monotonic()
        if part not in self._begun and 0 < done < wanted:
            self.keep(f"resuming {part} after {done:.0f} of {wanted:.0f} {unit}")
        begun, before = self._begun.setdefault(part, (now, done))
        left = ""
        if done > before:
            left = f", {shown_seconds((wanted - done) * (now - begun) / (done - before))} left"
        of = f"{done:.0f} of {wanted:.0f}"
        self.say(f"{part}: {of} {unit}{left if done < wanted else ''}", last=done >= wanted)

    def keep(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, soft_wrap=True, markup=False)


def shown_seconds(seconds: float) -> str:
    """A rounded length of time."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
