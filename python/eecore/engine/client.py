"""A caller of an engine that others call too: its requests, and what has come of them."""

from __future__ import annotations

import queue
from collections.abc import Callable

from eecore.output import StepOutput
from eecore.scheduling.sequence import Sequence

__all__ = ["READ_AHEAD", "Client"]

# Steps of a request that nobody has read, after which it is put on hold.
READ_AHEAD = 16


class Client:
    """A caller: its requests, and what has come of them that it has not read.

    Args:
        requests: that the engine has prepared.
        whole: it reads outputs alone, not what each step adds.
        rings: called when there is something to read, by the thread that steps; a RuntimeError from
            it means that the caller is gone.
        is_gone: whether the caller is gone.
    """

    def __init__(
        self,
        requests: list[Sequence],
        *,
        whole: bool = False,
        rings: Callable[[], None] | None = None,
        is_gone: Callable[[], bool] | None = None,
    ) -> None:
        self.requests = requests
        self.whole = whole
        self.rings = rings
        self.is_gone = is_gone
        self.names: list[str] = []
        """Of its requests, in order."""
        self.mail: queue.SimpleQueue[StepOutput | Exception] = queue.SimpleQueue()
        # What the caller wants. None of it is ever taken back.
        self.follows = False
        """The worker is to step for it."""
        self.closed = False
        # What has come of it, by the thread whose turn it is.
        self.unfinished: dict[str, None] = {}
        self.entered = False
        """The engine has its requests."""
        self.held = False
        """Its requests are on hold."""

    @property
    def is_full(self) -> bool:
        return not self.whole and self.mail.qsize() >= READ_AHEAD * len(self.unfinished)

    @property
    def is_low(self) -> bool:
        return self.mail.qsize() <= READ_AHEAD * len(self.unfinished) // 2
