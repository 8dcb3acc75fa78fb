"""One thread that steps an engine for callers on any thread.

A caller that is interrupted or lost ends its own requests only: an interrupt reaches the caller's
thread, never the thread that steps.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch

from eecore.engine.callers import READ_AHEAD, Add, Caller, Callers, Cancel, Message, News, Read
from eecore.engine.engine import Engine
from eecore.engine.faults import LOGGER, described
from eecore.errors import EngineClosedError
from eecore.scheduling.sequence import Sequence

# Seconds that the thread stays without a request.
LINGER_S = 5.0
# Seconds between searches for callers that are gone without having closed.
LOOK_S = 1.0


class _Served:
    """A request in the engine, with the number of its unread steps."""

    __slots__ = ("key", "unread", "whole")

    def __init__(self, key: int, whole: bool) -> None:
        self.key, self.whole, self.unread = key, whole, 0


class Stepper:
    """Carries out messages and steps the engine, in one thread.

    Args:
        engine: the engine, which nothing else steps.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._names: dict[int, str] = {}
        """The names of the engine's requests by their keys."""
        self._served: dict[str, _Served] = {}
        self._news: list[News] = []

    @property
    def has_requests(self) -> bool:
        return bool(self._names)

    @property
    def can_step(self) -> bool:
        """Whether a step would return anything or advance a request."""
        return bool(self._news) or self.engine.has_runnable

    def do(self, message: Message) -> None:
        """Carry out a message; the next step returns its results."""
        try:
            if isinstance(message, Add):
                self._add(*message)
            elif isinstance(message, Cancel):
                name = self._names.pop(message.key, None)
                if name is not None:
                    del self._served[name]
                    self.engine.cancel(name)
            elif isinstance(message, Read):
                self._take_read(*message)
            else:
                self.engine.reset_prefix_cache()
        except Exception:  # it has ended all requests, as the next step reports
            LOGGER.exception("%s failed", type(message).__name__)

    def step(self) -> list[News]:
        """One step of all requests; returns the results for their callers."""
        news, self._news = self._news, []
        try:
            steps = self.engine.step()
        except BaseException:  # it has ended all requests, as the next step reports
            LOGGER.exception("a step was interrupted")
            steps = []
        for step in steps:
            name = step.request_id
            served = self._served.get(name)
            if served is None:
                continue
            if step.output is not None:
                del self._served[name], self._names[served.key]
            elif served.whole:
                continue
            else:
                served.unread += 1
                if served.unread == READ_AHEAD:
                    self.engine.hold(name)
            news.append((served.key, step))
        return news

    def _add(self, key: int, sequence: Sequence, whole: bool) -> None:
        try:
            name = self.engine.enqueue(sequence, sequence.request_id)
        except Exception as error:
            self._news.append((key, error))
            return
        self._names[key], self._served[name] = name, _Served(key, whole)

    def _take_read(self, key: int, count: int) -> None:
        name = self._names.get(key)
        if name is not None:
            served = self._served[name]
            is_held = served.unread >= READ_AHEAD
            served.unread -= count
            if is_held and served.unread < READ_AHEAD:
                self.engine.resume(name)


class Worker(Callers):
    """An engine with a thread of its own that steps it and that runs while there are requests.

    Args:
        engine: the engine, which nothing else steps.
    """

    engine: Engine

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self._stepper = Stepper(engine)
        self._process = os.getpid()
        self._threads: dict[str, threading.Thread] = {}
        """The thread that steps, if there is one: the first to register in :meth:`begin`."""
        self._num_threads = torch.get_num_threads()
        """Threads of a kernel, as the newest caller has set: torch keeps the number per thread."""
        self._lingers = True
        self._is_stopped = False
        self._idle_since = self._looked_at = time.monotonic()
        _WORKERS.add(self)

    def open(self, caller: Caller, requests: Iterable[Sequence], name: str | None = None) -> None:
        """Queue the requests of a caller; ``name`` is the id of a single request.

        Raises:
            RequestError: the name is in use.
            ModelError: the model that the weights are shared with has changed.
            RuntimeError: in another process than the engine's.
        """
        self.engine.check_held()
        self._num_threads = torch.get_num_threads()
        super().open(caller, requests, name)
        # Only now that the messages are queued: a thread about to end checks for them.
        if not (self._threads or self._is_stopped):
            self._lingers = True
            arguments = ref(self, self.inbox.put), self.inbox
            threading.Thread(target=_work, args=arguments, name="eecore", daemon=True).start()

    def check(self) -> None:
        """Check that the calling thread may wait for the engine.

        Raises:
            RuntimeError: the thread is in another process, or is the one that steps.
            EngineClosedError: the interpreter is exiting.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"engine: expected the process that made it, {self._process}, got its child "
                f"{os.getpid()}; a child process must make its own engine"
            )
        if self._threads.get("") is threading.current_thread():
            raise RuntimeError("engine: expected a call between its steps, got one from inside")
        if self._is_stopped and threading.current_thread() is threading.main_thread():
            raise EngineClosedError("engine: expected a running interpreter, got an exiting one")

    def let_go(self) -> None:
        """Let the thread end without waiting for further callers."""
        self._lingers = False
        if self._threads:
            self.inbox.put(None)

    def stop(self) -> None:
        """End the thread for good when its step is done. Daemon threads that wait end with the
        interpreter.
        """
        self._is_stopped = True
        self.let_go()
        for thread in list(self._threads.values()):
            thread.join()

    # The thread

    def begin(self) -> bool:
        """Register this thread as the one that steps; False if another one is registered."""
        mine = threading.current_thread()
        self._idle_since = time.monotonic()
        return self._threads.setdefault("", mine) is mine

    def go_on(self, item: Any) -> float | None:
        """Carry out an item from the inbox, and step until no request can run.

        Returns:
            The seconds to wait for the next item; None: the thread ends.
        """
        while not self._is_stopped:
            while item is not None:
                for message in self.messages(item):
                    self._stepper.do(message)
                item = self._next()
            now = time.monotonic()
            if now > self._looked_at + LOOK_S:
                self._looked_at = now
                self.look_for_gone()
            if self._stepper.can_step:
                if torch.get_num_threads() != self._num_threads:
                    torch.set_num_threads(self._num_threads)
                self.deliver(self._stepper.step())
                self._idle_since = now
            elif self.inbox.empty():
                break
            item = self._next()
        if self._stepper.has_requests and not self._is_stopped:
            return LOOK_S
        if self._lingers and time.monotonic() < self._idle_since + LINGER_S:
            return LINGER_S
        del self._threads[""]
        if self.inbox.empty() or self._is_stopped or not self.begin():
            return None
        return 0.0

    def fail(self, error: BaseException) -> float:
        """End all requests, after an error in the thread itself."""
        LOGGER.error("the thread of an engine failed", exc_info=error)
        failure = RuntimeError(f"engine: {described(error)}")
        self.deliver([(key, failure) for key in list(self._requests)])
        self._stepper = Stepper(self.engine)
        for name in self.engine.requests:
            self.engine.cancel(name)
        return 0.0

    def _next(self) -> Any:
        return None if self.inbox.empty() else self.inbox.get()


def _work(reference: ReferenceType[Worker], inbox: queue.SimpleQueue[Any]) -> None:
    """The thread of a worker. While it waits, it does not keep the engine alive."""
    worker = reference()
    if worker is None or not worker.begin():
        return
    del worker
    wait: float | None = LINGER_S
    while wait is not None:
        item = None
        with suppress(queue.Empty):
            item = inbox.get(timeout=wait)
        worker = reference()
        if worker is None:
            return
        try:
            wait = worker.go_on(item)
        except BaseException as error:  # no caller may be left waiting for a failed thread
            wait = worker.fail(error)
        del worker, item


_WORKERS: WeakSet[Worker] = WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop all workers: a thread inside a kernel must not outlive the interpreter."""
    for worker in list(_WORKERS):
        if worker._process == os.getpid():
            worker.stop()
