"""One thread that steps an engine for callers on any thread.

A caller that is interrupted or lost ends its own requests only: an interrupt reaches the caller's
thread, never the thread that steps.
"""

from __future__ import annotations

import atexit
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch

from eecore.engine.callers import READ_AHEAD, Caller, News, Request
from eecore.engine.engine import Engine
from eecore.engine.faults import LOGGER, described
from eecore.errors import EngineClosedError, RequestError
from eecore.output import StepOutput
from eecore.scheduling.sequence import Sequence

# Seconds that the thread stays without a request.
LINGER_S = 5.0
# Seconds between searches for callers that are gone without having closed.
LOOK_S = 1.0


class Worker:
    """An engine with a thread of its own that steps it and that runs while there are requests.

    Args:
        engine: the engine, which nothing else steps.

    Attributes:
        inbox: what the thread has to do: lists of new requests, requests to cancel, requests with
            the number of steps that were read, callers that are gone, and None.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._names: dict[str, Request] = {}
        """The requests of callers that are not closed, by their names."""
        self._served: dict[str, Request] = {}
        """The requests in the engine, by their names."""
        self._refused: list[News] = []
        """Requests that the engine has not taken, for the next delivery."""
        self._resets = False
        """Whether the prefix cache is to be reset."""
        self._process = os.getpid()
        self._threads: dict[str, threading.Thread] = {}
        """The thread that steps, if there is one: the first to register in :meth:`begin`."""
        self._num_threads = torch.get_num_threads()
        """Threads of a kernel, as the newest caller has set: torch keeps the number per thread."""
        self._lingers = True
        self._is_stopped = False
        self._idle_since = self._looked_at = time.monotonic()
        _WORKERS.add(self)

    # For callers, on any thread

    def open(self, caller: Caller, requests: Iterable[Sequence], name: str | None = None) -> None:
        """Queue the requests of a caller; ``name`` is the id of a single request.

        Raises:
            RequestError: the name is in use.
            ModelError: the model that the weights are shared with has changed.
            RuntimeError: in another process than the engine's.
        """
        self.engine.check_held()
        self._num_threads = torch.get_num_threads()
        self.check()
        added = [self._claimed(caller, sequence, name) for sequence in requests]
        if caller.is_closed:  # closed by another thread, which may have missed a name
            self.close(caller)
            return
        self.inbox.put(added)  # in one message: no step has only some of them
        # Only now that they are queued: a thread about to end checks for them.
        if not (self._threads or self._is_stopped):
            self._lingers = True
            arguments = ref(self, self.inbox.put), self.inbox
            threading.Thread(target=_work, args=arguments, name="eecore", daemon=True).start()

    def close(self, caller: Caller) -> None:
        """Cancel unfinished requests, without waiting; from any thread, any number of times."""
        caller.is_closed = True
        for name in list(caller.names):
            request = self._names.get(name)
            if request is None or request.caller is not caller:
                continue
            if not request.is_over:
                self.inbox.put(request)  # first, since an interrupted call is repeated
            self._names.pop(name, None)

    def read(self, caller: Caller, step: StepOutput) -> None:
        """Count a step that a caller has read of one of its requests."""
        if caller.whole or step.output is not None:
            return
        request = self._names.get(step.request_id)
        if request is None or request.caller is not caller:  # closed by another thread
            return
        request.num_read += 1
        if request.num_read >= READ_AHEAD // 2:
            self.inbox.put((request, request.num_read))
            request.num_read = 0

    def reset_prefix_cache(self) -> None:
        """Forget the contents of pages that no unfinished request holds: now, or when the step that
        is running is done.
        """
        self._resets = True
        self.inbox.put(None)

    def group(self, group: object) -> list[Caller]:
        """The callers of a group that are not closed."""
        callers = dict.fromkeys(request.caller for request in list(self._names.values()))
        return [caller for caller in callers if caller.group is group]

    @property
    def num_unfinished(self) -> int:
        """Requests that callers still wait for."""
        return sum(not request.is_over for request in list(self._names.values()))

    def _claimed(self, caller: Caller, sequence: Sequence, name: str | None) -> Request:
        """A request under a name that belongs to its caller until the caller is closed."""
        if name is not None and not isinstance(name, str):
            raise RequestError(f"request_id: expected a string, got {name!r}")
        while True:
            claimed = f"request-{next(self._numbers)}" if name is None else str.__str__(name)
            request = Request(caller, sequence, claimed)
            caller.names.append(claimed)  # first, so that closing always finds it
            other = self._names.setdefault(claimed, request)
            if other is request:
                break
            caller.names.remove(claimed)
            if other.caller() is None:  # gone, and the engine has not handled that yet
                self.close(other.caller)
            elif name is not None:
                raise RequestError(f"request_id: {name!r} is in use")
        sequence.request_id = claimed
        return request

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
            while item is not None or self._resets:
                self._do(item)
                item = self._next()
            now = time.monotonic()
            if now > self._looked_at + LOOK_S:
                self._looked_at = now
                for request in list(self._names.values()):
                    if request.caller.is_gone():  # without having closed
                        self.close(request.caller)
            if self._refused or self.engine.has_runnable:
                if torch.get_num_threads() != self._num_threads:
                    torch.set_num_threads(self._num_threads)
                self._deliver(self._stepped())
                self._idle_since = now
            elif self.inbox.empty():
                break
            item = self._next()
        if self._served and not self._is_stopped:
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
        self._served, self._refused = {}, []
        self._deliver([(request, failure) for request in list(self._names.values())])
        for name in self.engine.requests:
            self.engine.cancel(name)
        return 0.0

    def _next(self) -> Any:
        return None if self.inbox.empty() else self.inbox.get()

    def _do(self, item: Any) -> None:
        """Carry out an item from the inbox."""
        try:
            if self._resets:
                self._resets = False
                self.engine.reset_prefix_cache()
            if isinstance(item, Caller):
                self.close(item)
            elif isinstance(item, Request):
                if self._served.get(item.name) is item:
                    del self._served[item.name]
                    self.engine.cancel(item.name)
            elif isinstance(item, list):
                for request in item:
                    if not (request.is_over or request.caller.is_closed):
                        self._add(request)
            elif item is not None:
                self._take_read(*item)
        except Exception:  # it has ended all requests, as the next step reports
            LOGGER.exception("a call of the engine failed")

    def _add(self, request: Request) -> None:
        try:
            self.engine.enqueue(request.sequence, request.name)
        except Exception as error:
            self._refused.append((request, error))
            return
        self._served[request.name] = request

    def _take_read(self, request: Request, num_steps: int) -> None:
        if self._served.get(request.name) is not request:
            return
        is_held = request.num_unread >= READ_AHEAD
        request.num_unread -= num_steps
        if is_held and request.num_unread < READ_AHEAD:
            self.engine.resume(request.name)

    def _stepped(self) -> list[News]:
        """The results of one step of all requests."""
        news, self._refused = self._refused, []
        try:
            steps = self.engine.step()
        except BaseException:  # it has ended all requests, as the next step reports
            LOGGER.exception("a step was interrupted")
            steps = []
        for step in steps:
            request = self._served.get(step.request_id)
            if request is None:
                continue
            if step.output is not None:
                del self._served[request.name]
            elif request.caller.whole:
                continue
            else:
                request.num_unread += 1
                if request.num_unread == READ_AHEAD:
                    self.engine.hold(request.name)
            news.append((request, step))
        return news

    def _deliver(self, news: Iterable[News]) -> None:
        """Give callers the results of their requests."""
        batches: dict[Callable[[list[News]], object], list[News]] = {}
        for request, item in news:
            if request.is_over or request.caller.is_closed:
                continue
            request.is_over = isinstance(item, Exception) or item.output is not None
            batches.setdefault(request.caller.sink, []).append((request, item))
        for sink, batch in batches.items():
            try:
                sink(batch)
            except RuntimeError:  # its event loop is closed
                for request, _ in batch:
                    self.close(request.caller)


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
