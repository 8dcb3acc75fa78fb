"""Callers of an engine that one thread steps.

A caller puts messages into a queue and gets back the results of each step for its requests. It may
close at any moment, and does not wait then. If it is collected without having closed, the callback
of a weak reference puts it into the queue.

A request whose steps are not read is held after :data:`READ_AHEAD` of them: callers report by
messages what they have read.
"""

from __future__ import annotations

import itertools
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from weakref import ref

from eecore.errors import RequestError
from eecore.output import StepOutput
from eecore.scheduling.sequence import Sequence

# Unread steps of a request after which it is held.
READ_AHEAD = 16


class Add(NamedTuple):
    """Serve a request. Its key is never reused; its name may be, once the request is gone."""

    key: int
    sequence: Sequence
    whole: bool
    """The caller wants only the output, not what each step adds."""


class Cancel(NamedTuple):
    """End a request, if it is unfinished."""

    key: int


class Read(NamedTuple):
    """Another ``num_steps`` steps of a request have been read."""

    key: int
    num_steps: int


class Reset(NamedTuple):
    """Forget the contents of pages that no unfinished request holds."""


Message = Add | Cancel | Read | Reset
News = tuple[int, StepOutput | Exception]
"""The key of a request, and its new step or the exception that ended it."""
Batch = list[tuple["Caller", StepOutput | Exception]]


class Caller(ref[Any]):
    """The engine's side of a caller, which does not keep the caller itself alive.

    Args:
        owner: the caller's own side.
        inbox: the queue into which this is put when the owner is gone.
        sink: takes the results of the requests, once a step; several callers may share it. A
            RuntimeError from it means that they are gone.
        whole: the caller wants only outputs.
        is_gone: whether the owner can take no more results.
    """

    __slots__ = ("group", "is_closed", "is_gone", "read", "requests", "sink", "unfinished", "whole")

    def __new__(
        cls, owner: Any, inbox: queue.SimpleQueue[Any], *_: Any, **_settings: Any
    ) -> Caller:
        return super().__new__(cls, owner, inbox.put)

    def __init__(
        self,
        owner: Any,
        inbox: queue.SimpleQueue[Any],
        sink: Callable[[Batch], object],
        *,
        whole: bool = False,
        is_gone: Callable[[], bool] = bool,
        group: object = None,
    ) -> None:
        super().__init__(owner, inbox.put)  # type: ignore[call-arg]
        self.sink, self.whole, self.is_gone, self.group = sink, whole, is_gone, group
        self.requests: dict[str, int] = {}
        """The keys of its requests by their names, in order."""
        self.unfinished: dict[int, None] = {}
        self.read: dict[int, int] = {}
        """Steps that it has read and not reported yet, by the keys of requests."""
        self.is_closed = False


class Callers:
    """The callers of one engine, on any thread.

    The thread that steps the engine takes messages from the inbox with :meth:`messages`, and gives
    callers their results with :meth:`deliver`.

    Attributes:
        inbox: messages, and callers that are gone.
    """

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._names: dict[str, Caller] = {}
        self._requests: dict[int, tuple[Caller, Sequence]] = {}
        """Callers and requests by the requests' keys, until the callers are closed."""

    # For callers

    def open(self, caller: Caller, requests: Iterable[Sequence], name: str | None = None) -> None:
        """Queue the requests of a caller; ``name`` is the id of a single request.

        Raises:
            RequestError: the name is in use.
        """
        self.check()
        added = [self._claimed(caller, request, name) for request in requests]
        if caller.is_closed:  # closed by another thread, which may have missed a name
            self._forget(caller)
            return
        caller.unfinished = dict.fromkeys(caller.requests.values())
        self.inbox.put(added)  # in one message: no step has only some of them

    def close(self, caller: Caller) -> None:
        """Cancel unfinished requests, without waiting; from any thread, any number of times."""
        caller.is_closed = True
        if caller.unfinished:
            self.inbox.put(caller)
        self._forget(caller)

    def read(self, caller: Caller, step: StepOutput) -> None:
        """Count a step that a caller has read of one of its requests."""
        if caller.whole or step.output is not None:
            return
        key = caller.requests[step.request_id]
        caller.read[key] = count = caller.read.get(key, 0) + 1
        if count >= READ_AHEAD // 2:
            caller.read[key] = 0
            self.inbox.put(Read(key, count))

    def check(self) -> None:
        """Check that requests are taken, and that the calling thread may wait for them.

        Raises:
            RuntimeError: requests are not taken, or the thread may not wait.
        """

    def reset_prefix_cache(self) -> None:
        """Forget the contents of pages that no unfinished request holds: now, or when the step that
        is running is done.
        """
        self.inbox.put(Reset())

    def let_go(self) -> None:
        """Let the engine's thread know that no more callers are expected."""

    def group(self, group: object) -> list[Caller]:
        """The callers of a group that are not closed."""
        return [caller for caller in list(self._names.values()) if caller.group is group]

    @property
    def num_unfinished(self) -> int:
        """Requests that callers still wait for."""
        requests = list(self._requests.items())
        return sum(key in caller.unfinished for key, (caller, _) in requests)

    # For the thread that steps the engine

    def messages(self, item: Message | list[Add] | Caller) -> Iterator[Message]:
        """The messages of an item from the inbox."""
        if isinstance(item, Caller):
            self._forget(item)
            unfinished, item.unfinished = item.unfinished, {}
            yield from map(Cancel, unfinished)
        elif isinstance(item, list):
            yield from (add for add in item if self._waiting_for(add.key) is not None)
        else:
            yield item

    def deliver(self, news: Iterable[News]) -> None:
        """Give callers the results of their requests."""
        batches: dict[Callable[[Batch], object], Batch] = {}
        for key, item in news:
            caller = self._waiting_for(key)
            if caller is None:
                continue
            if isinstance(item, Exception) or item.output is not None:
                caller.unfinished.pop(key, None)
            batches.setdefault(caller.sink, []).append((caller, item))
        for sink, batch in batches.items():
            try:
                sink(batch)
            except RuntimeError:  # its event loop is closed
                for caller, _ in batch:
                    self.close(caller)

    def look_for_gone(self) -> None:
        """Close callers that are gone without having closed."""
        for caller in list(self._names.values()):
            if caller.is_gone():
                self.close(caller)

    def _waiting_for(self, key: int) -> Caller | None:
        """The caller that waits for a request, if one does."""
        caller, _ = self._requests.get(key, (None, None))
        return caller if caller is not None and key in caller.unfinished else None

    def _claimed(self, caller: Caller, request: Sequence, name: str | None) -> Add:
        """A request under a name that belongs to its caller until the caller is closed."""
        if name is not None and not isinstance(name, str):
            raise RequestError(f"request_id: expected a string, got {name!r}")
        while True:
            key = next(self._numbers)
            claimed = f"request-{key}" if name is None else str.__str__(name)
            caller.requests[claimed] = key  # first, so that closing always finds it
            other = self._names.setdefault(claimed, caller)
            if other is caller:
                break
            del caller.requests[claimed]
            if other() is None:  # gone, and the engine has not handled that yet
                self._forget(other)
            elif name is not None:
                raise RequestError(f"request_id: {name!r} is in use")
        request.request_id = claimed
        self._requests[key] = caller, request
        return Add(key, request, caller.whole)

    def _forget(self, caller: Caller) -> None:
        """Free the names of a caller."""
        for name, key in list(caller.requests.items()):
            self._requests.pop(key, None)
            if self._names.get(name) is caller:
                self._names.pop(name, None)


class Client:
    """One call on a thread: its requests are opened, read, and always closed.

    Args:
        callers: the engine's callers.
        whole: whether only outputs are read, not what each step adds.
    """

    def __init__(self, callers: Callers, *, whole: bool = False) -> None:
        self._callers = callers
        self._batches: queue.SimpleQueue[Batch] = queue.SimpleQueue()
        self._unread: deque[StepOutput | Exception] = deque()
        self._num_unfinished = 0
        self._caller: Caller | None = Caller(self, callers.inbox, self._batches.put, whole=whole)

    def open(self, requests: list[Sequence]) -> list[str]:
        """Queue requests that the engine has prepared; returns their names."""
        assert self._caller is not None
        self._num_unfinished = len(requests)
        self._callers.open(self._caller, requests)
        return list(self._caller.requests)

    def __iter__(self) -> Iterator[StepOutput]:
        """The steps of its requests as they arrive; with ``whole`` only the last ones.

        Raises:
            Exception: the error that ended a request without an output.
        """
        caller = self._caller
        while self._num_unfinished and caller is not None:
            if not self._unread:
                self._callers.check()
                self._unread.extend(item for _, item in self._batches.get())
            item = self._unread.popleft()
            if isinstance(item, Exception):
                raise item
            if item.output is not None:
                self._num_unfinished -= 1
            self._callers.read(caller, item)
            yield item

    def close(self) -> None:
        """Cancel unfinished requests, without waiting."""
        if self._caller is not None:
            self._callers.close(self._caller)
            self._caller = None  # no notice is needed when this is collected
