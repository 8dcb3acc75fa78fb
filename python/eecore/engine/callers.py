"""How callers reach an engine that one thread steps, in this process or in another.

A caller puts messages in a queue and gets back what each step made of its requests. It waits for
nothing when it leaves, and it may leave at any moment: where it is lost without having closed,
Python itself puts it into the queue.

A request whose steps are not read is held after :data:`READ_AHEAD` of them: callers say what they
have read, by the messages that say everything else.
"""

from __future__ import annotations

import itertools
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from weakref import ref

from eecore.engine.view import EngineView
from eecore.errors import RequestError
from eecore.output import StepOutput
from eecore.scheduling.sequence import Sequence

__all__ = ["READ_AHEAD", "Add", "Caller", "Callers", "Cancel", "Client", "Message", "Read", "Reset"]

# Steps of a request that its caller has not read, after which it is held.
READ_AHEAD = 16


class Add(NamedTuple):
    """Serve a request. Its key is its own for good; its name another one may have after it."""

    key: int
    sequence: Sequence
    whole: bool
    """The caller wants the output alone, not what each step adds."""


class Cancel(NamedTuple):
    """End a request, if it is unfinished."""

    key: int


class Read(NamedTuple):
    """So many steps of a request have been read."""

    key: int
    num_steps: int


class Reset(NamedTuple):
    """Forget what pages hold that no unfinished request has."""


Message = Add | Cancel | Read | Reset
News = tuple[int, StepOutput | Exception]
"""The key of a request, and what came of it. After an exception there is no more."""
Batch = list[tuple["Caller", StepOutput | Exception]]


class Caller(ref[Any]):
    """The engine's side of a caller, which does not keep the caller itself alive.

    Args:
        owner: the caller's own side.
        inbox: gets this when the owner is gone.
        sink: takes what came of the requests, once a step; it may be that of several callers. A
            RuntimeError from it means that they are gone.
        whole: the caller wants outputs alone.
        is_gone: whether nobody can take anything any more.
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
        """Steps that it has read and not said so yet, by the keys of requests."""
        self.is_closed = False


class Callers:
    """The callers of one engine, on any thread.

    Whoever steps the engine takes messages from the inbox, by :meth:`messages`, and has what came
    of requests delivered.

    Attributes:
        inbox: messages, and callers that are gone.
        is_up: whether requests are taken just now.
        num_restarts: how often the engine had to be started again.
        failure: why it will never take requests again, if that is so.
    """

    engine: EngineView
    is_up: bool = True
    num_restarts = 0
    failure: Exception | None = None

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._names: dict[str, Caller] = {}
        self._requests: dict[int, tuple[Caller, Sequence]] = {}
        """By their keys, until their callers are closed."""

    # For callers

    def open(self, caller: Caller, requests: Iterable[Sequence], name: str | None = None) -> None:
        """Queue the requests of a caller; ``name`` is that of its only one.

        Raises:
            RequestError: the name is in use.
        """
        self.check()
        added = [self._claimed(caller, request, name) for request in requests]
        if caller.is_closed:  # by another thread, which may have missed a name
            self._forget(caller)
            return
        caller.unfinished = dict.fromkeys(caller.requests.values())
        self.inbox.put(added)  # at once: no step has some of them and not the others

    def close(self, caller: Caller) -> None:
        """Cancel what is unfinished. It waits for nothing, from any thread, any number of times."""
        caller.is_closed = True
        if caller.unfinished:
            self.inbox.put(caller)
        self._forget(caller)

    def read(self, caller: Caller, step: StepOutput) -> None:
        """A caller has read a step of one of its requests."""
        if caller.whole or step.output is not None:
            return
        key = caller.requests[step.request_id]
        caller.read[key] = count = caller.read.get(key, 0) + 1
        if count >= READ_AHEAD // 2:
            caller.read[key] = 0
            self.inbox.put(Read(key, count))

    def check(self) -> None:
        """See to it that requests are taken, and that the calling thread may wait for them.

        Raises:
            RuntimeError: they are not, or it may not.
        """

    def reset_prefix_cache(self) -> None:
        """Forget what pages hold that no unfinished request has: now, or when the step that is
        running is done.
        """
        self.inbox.put(Reset())

    def let_go(self) -> None:
        """No more callers are expected."""

    def group(self, group: object) -> list[Caller]:
        """The callers of a group that are not closed."""
        return [caller for caller in list(self._names.values()) if caller.group is group]

    @property
    def num_unfinished(self) -> int:
        """Requests that callers still wait for."""
        requests = list(self._requests.items())
        return sum(key in caller.unfinished for key, (caller, _) in requests)

    # For whoever steps the engine

    def messages(self, item: Message | list[Add] | Caller) -> Iterator[Message]:
        """What something from the inbox asks for."""
        if isinstance(item, Caller):
            self._forget(item)
            unfinished, item.unfinished = item.unfinished, {}
            yield from map(Cancel, unfinished)
        elif isinstance(item, list):
            yield from (add for add in item if self._waiting_for(add.key) is not None)
        else:
            yield item

    def deliver(self, news: Iterable[News]) -> None:
        """Give callers what came of their requests."""
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
        """Close callers that are gone without having said so."""
        for caller in list(self._names.values()):
            if caller.is_gone():
                self.close(caller)

    def _waiting_for(self, key: int) -> Caller | None:
        """The caller that waits for a request, if one does."""
        caller, _ = self._requests.get(key, (None, None))
        return caller if caller is not None and key in caller.unfinished else None

    def _claimed(self, caller: Caller, request: Sequence, name: str | None) -> Add:
        """A request under a name that is its caller's until that is closed."""
        if name is not None and not isinstance(name, str):
            raise RequestError(f"request_id: expected a string, got {name!r}")
        while True:
            key = next(self._numbers)
            claimed = f"request-{key}" if name is None else str.__str__(name)
            caller.requests[claimed] = key  # first, so that it is found whatever happens
            other = self._names.setdefault(claimed, caller)
            if other is caller:
                break
            del caller.requests[claimed]
            if other() is None:  # lost, and the engine has not looked at it yet
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
    """One call of a caller on a thread: opened, read, and closed, whatever happens.

    Args:
        callers: of the engine.
        whole: it reads outputs alone, not what each step adds.
    """

    def __init__(self, callers: Callers, *, whole: bool = False) -> None:
        self._callers = callers
        self._mail: queue.SimpleQueue[Batch] = queue.SimpleQueue()
        self._unread: deque[StepOutput | Exception] = deque()
        self._num_unfinished = 0
        self._caller: Caller | None = Caller(self, callers.inbox, self._mail.put, whole=whole)

    def open(self, requests: list[Sequence]) -> list[str]:
        """Queue requests that the engine has prepared; returns their names."""
        assert self._caller is not None
        self._num_unfinished = len(requests)
        self._callers.open(self._caller, requests)
        return list(self._caller.requests)

    def __iter__(self) -> Iterator[StepOutput]:
        """The steps of its requests as they come, or their last ones.

        Raises:
            Exception: whatever ended a request without an output.
        """
        caller = self._caller
        while self._num_unfinished and caller is not None:
            if not self._unread:
                self._callers.check()
                self._unread.extend(item for _, item in self._mail.get())
            item = self._unread.popleft()
            if isinstance(item, Exception):
                raise item
            if item.output is not None:
                self._num_unfinished -= 1
            self._callers.read(caller, item)
            yield item

    def close(self) -> None:
        """Cancel what is unfinished; it waits for nothing."""
        if self._caller is not None:
            self._callers.close(self._caller)
            self._caller = None  # Python need not say that this is gone any more
