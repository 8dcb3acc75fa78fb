"""Who is let in: so many requests at once and no more, and nobody once the server is closing."""

from __future__ import annotations

import time
from types import TracebackType

from eecore.serving.refusals import ApiError, unavailable

__all__ = ["Admission", "Seats"]

# Of the time that a request takes: how much the newest says.
NEWEST = 0.1
MOST_RETRY_S = 60


class Admission:
    """Counts the sequences that requests have in the engine, or are about to have.

    Args:
        max_running: how many the engine runs at once.
        max_waiting: how many may wait besides.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running = max_running
        self.capacity = max_running + max_waiting
        self.taken = 0
        self.is_closing = False
        self._seconds = 1.0  # that a request takes, recently

    def seats(self) -> Seats:
        """One for a request, for a start.

        Raises:
            ApiError: 503: the server is closing. 429: all seats are taken.
        """
        if self.is_closing:
            raise unavailable("the server is shutting down", self.retry_after)
        seats = Seats(self)
        seats.take(1)
        return seats

    @property
    def retry_after(self) -> int:
        """Seconds after which there may be a seat again."""
        turns = max(self.taken - self.max_running, 0) / self.max_running + 1
        return max(1, min(round(self._seconds * turns), MOST_RETRY_S))

    def took(self, seconds: float) -> None:
        """A request has been answered."""
        self._seconds += NEWEST * (seconds - self._seconds)


class Seats:
    """Those that one request has taken; given back when it is left."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._count = 0
        self._since = time.monotonic()

    def take(self, count: int) -> None:
        """Have so many in all.

        Raises:
            ApiError: 429: they are taken.
        """
        admission = self._admission
        more = count - self._count
        if admission.taken + more > admission.capacity:
            raise ApiError(
                429,
                f"expected at most {admission.capacity} sequences at once, got {count} more: "
                "try again later",
                code="too_many_requests",
                retry_after=admission.retry_after,
            )
        admission.taken += more
        self._count = count

    def __enter__(self) -> Seats:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._admission.taken -= self._count
        self._count = 0
        if kind is None:
            self._admission.took(time.monotonic() - self._since)
