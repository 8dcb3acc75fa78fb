"""The limit of sequences that requests may have at once; none once the server is closing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from eecore.serving.refusals import ApiError, unavailable

# Weight of the newest request in the mean of seconds.
NEWEST = 0.1
MAX_RETRY_S = 60


class Admission:
    """Counts the sequences that requests have in the engine, or are about to have.

    Args:
        max_running: sequences that the engine runs at once.
        max_waiting: sequences that may also wait.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running = max_running
        self.capacity = max_running + max_waiting
        self.taken = 0
        self.is_closing = False
        self._seconds = 1.0  # mean seconds of a request, recent ones first

    @contextmanager
    def seats(self) -> Iterator[Seats]:
        """The seats of a request, at first one; the request gives them back when it ends.

        Raises:
            ApiError: 503: the server is closing. 429: all seats are taken.
        """
        if self.is_closing:
            raise unavailable("the server is shutting down", self.retry_after)
        seats, since = Seats(self), time.monotonic()
        try:
            seats.take(1)
            yield seats
            # A request has been answered.
            self._seconds += NEWEST * (time.monotonic() - since - self._seconds)
        finally:
            self.taken -= seats.count

    @property
    def retry_after(self) -> int:
        """Seconds until a client may expect a free seat."""
        turns = max(self.taken - self.max_running, 0) / self.max_running + 1
        return max(1, min(round(self._seconds * turns), MAX_RETRY_S))


class Seats:
    """The seats that one request has taken."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.count = 0

    def take(self, count: int) -> None:
        """Raise the number of seats to ``count`` in all.

        Raises:
            ApiError: 429: fewer are free.
        """
        admission = self._admission
        more = count - self.count
        if admission.taken + more > admission.capacity:
            raise ApiError(
                429,
                f"expected at most {admission.capacity} sequences at once, got {count} more: "
                "try again later",
                code="too_many_requests",
                retry_after=admission.retry_after,
            )
        admission.taken += more
        self.count = count
