"""Callers of an engine that one thread steps.

A caller puts its requests into a queue and gets back the results of each step. It may close at any
moment, and does not wait then. If it is collected without having closed, the callback of a weak
reference puts it into the queue.

A request whose steps are not read is held after :data:`READ_AHEAD` of them: callers report what
they have read.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

from eecore.output import StepOutput
from eecore.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from eecore.engine.worker import Worker

# Unread steps of a request after which it is held.
READ_AHEAD = 16


@dataclass(eq=False, slots=True)
class Request:
    """A request of a caller, until the caller is closed."""

    caller: Caller
    sequence: Sequence
    name: str
    is_over: bool = False
    """Whether the caller gets no more results."""
    num_read: int = 0
    """Steps that the caller has read and not reported yet."""
    num_unread: int = 0
    """Steps that the caller is not known to have read."""


News = tuple[Request, StepOutput | Exception]
"""A request, and its new step or the exception that ended it."""


class Caller(ref[Any]):
    """The engine's side of a caller, which does not keep the caller itself alive.

    Args:
        owner: the caller's own side.
        inbox: the queue into which this is put when the owner is gone.
        sink: takes the results of the requests, once a step; several callers may share it. A
            RuntimeError from it means that they are gone.
        whole: the caller wants only outputs, not what each step adds.
        is_gone: whether the owner can take no more results.
    """

    __slots__ = ("group", "is_closed", "is_gone", "names", "sink", "whole")

    def __new__(
        cls, owner: Any, inbox: queue.SimpleQueue[Any], *_: Any, **_settings: Any
    ) -> Caller:
        return super().__new__(cls, owner, inbox.put)

    def __init__(
        self,
        owner: Any,
        inbox: queue.SimpleQueue[Any],
        sink: Callable[[list[News]], object],
        *,
        whole: bool = False,
        is_gone: Callable[[], bool] = bool,
        group: object = None,
    ) -> None:
        super().__init__(owner, inbox.put)  # type: ignore[call-arg]
        self.sink, self.whole, self.is_gone, self.group = sink, whole, is_gone, group
        self.names: list[str] = []
        """The names of its requests, in order."""
        self.is_closed = False


class Client:
    """One call on a thread: its requests are opened, read, and always closed.

    Args:
        worker: steps the engine.
        whole: whether only outputs are read, not what each step adds.
    """

    def __init__(self, worker: Worker, *, whole: bool = False) -> None:
        self._worker = worker
        self._batches: queue.SimpleQueue[list[News]] = queue.SimpleQueue()
        self._unread: deque[StepOutput | Exception] = deque()
        self._num_unfinished = 0
        self._caller: Caller | None = Caller(self, worker.inbox, self._batches.put, whole=whole)

    def open(self, requests: list[Sequence]) -> list[str]:
        """Queue requests that the engine has prepared; returns their names."""
        assert self._caller is not None
        self._num_unfinished = len(requests)
        self._worker.open(self._caller, requests)
        return list(self._caller.names)

    def __iter__(self) -> Iterator[StepOutput]:
        """The steps of its requests as they arrive; with ``whole`` only the last ones.

        Raises:
            Exception: the error that ended a request without an output.
        """
        caller = self._caller
        while self._num_unfinished and caller is not None:
            if not self._unread:
                self._worker.check()
                self._unread.extend(item for _, item in self._batches.get())
            item = self._unread.popleft()
            if isinstance(item, Exception):
                raise item
            if item.output is not None:
                self._num_unfinished -= 1
            self._worker.read(caller, item)
            yield item

    def close(self) -> None:
        """Cancel unfinished requests, without waiting."""
        if self._caller is not None:
            self._worker.close(self._caller)
            self._caller = None  # no notice is needed when this is collected
