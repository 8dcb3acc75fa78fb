"""One engine, and one KV cache, for callers on any thread.

A caller that is alone steps the engine itself. As soon as there are several, a worker thread steps
for all of them and hands each its steps: whoever leaves then, in whatever way, takes nobody along.
The engine changes between two steps only, by the thread whose turn it is. Nobody waits for a turn,
so that a caller can leave at any moment: by an interrupt, from a finaliser, from a signal handler.
"""

from __future__ import annotations

import atexit
import itertools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from weakref import ReferenceType, WeakSet, ref

from eecore.engine.engine import Engine
from eecore.errors import RequestError
from eecore.output import StepOutput
from eecore.scheduling.sequence import Sequence

__all__ = ["READ_AHEAD", "Client", "SharedEngine"]

# Steps of a request that nobody has read, after which it is put on hold.
READ_AHEAD = 16
# How long the worker thread stays when there is nobody to step for.
LINGER_S = 5.0
# How often those who wait look whether they still have to.
LOOK_S = 1.0


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
        self.unfinished: dict[str, None] = {}
        self.mail: queue.SimpleQueue[StepOutput | Exception] = queue.SimpleQueue()
        self.entered = False
        """The engine has its requests."""
        self.follows = False
        """The worker steps for it."""
        self.held = False
        """Its requests are on hold."""
        self.closed = False

    @property
    def is_full(self) -> bool:
        return not self.whole and self.mail.qsize() >= READ_AHEAD * len(self.unfinished)

    @property
    def is_low(self) -> bool:
        return self.mail.qsize() <= READ_AHEAD * len(self.unfinished) // 2

    def put(self, item: StepOutput | Exception) -> None:
        self.mail.put(item)


class Turn:
    """The right to touch the engine, of the thread that made it."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()


class SharedEngine:
    """Serves callers on any thread with one engine.

    A caller makes a :class:`Client`, opens it, reads its steps, and closes it. Requests whose steps
    lie unread are put on hold after :data:`READ_AHEAD` of them each; the others go on.

    Args:
        engine: whom nobody else steps.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._process = os.getpid()
        self._numbers = itertools.count()
        self._turn: dict[str, Turn] = {}
        self._clients: dict[str, Client] = {}  # by the names of their requests
        self._busy: dict[Client, None] = {}  # those with unfinished requests
        self._followers: dict[Client, None] = {}  # of these, those that the worker steps for
        # What is left to the thread whose turn comes; it is taken out only when it is done.
        self._entering: deque[Client] = deque()
        self._resuming: deque[Client] = deque()
        self._leaving: deque[Client] = deque()
        self._worker: threading.Thread | None = None
        self._worker_lock = threading.RLock()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lingers = True
        _ENGINES.add(self)

    # For callers

    @property
    def num_clients(self) -> int:
        """Those with unfinished requests."""
        return len(self._busy)

    @property
    def num_followers(self) -> int:
        """Those of them that the worker thread steps for."""
        return len(self._followers)

    def open(self, client: Client, name: str | None = None) -> None:
        """Queue a client's requests; ``name`` is that of its only one.

        Raises:
            RequestError: the name is in use.
            RuntimeError: in another process than the engine's.
        """
        self._check_process()
        for request in client.requests:
            request.request_id = self._claim(client, name)
            client.names.append(request.request_id)
        if not client.requests:
            return
        client.unfinished = dict.fromkeys(client.names)
        self._busy[client] = None
        is_alone = len(self._busy) == 1 and client.rings is None
        if not (is_alone and self._in_turn(lambda: self._enter(client))):
            self._follow(client)

    def read(self, client: Client) -> StepOutput | None:
        """The next step of any of a client's requests; None when all of them have been read.

        Raises:
            Exception: whatever ended a step for everybody.
        """
        while True:
            is_over = not client.unfinished
            step = self.take(client)
            if step is not None or is_over:
                return step
            if client.follows or not self._step_alone(client):
                step = self._wait(client)
                if step is not None:
                    return step

    def take(self, client: Client) -> StepOutput | None:
        """What :meth:`read` would return at once; None if that is nothing."""
        try:
            item = client.mail.get_nowait()
        except queue.Empty:
            return None
        return self._taken(client, item)

    def close(self, client: Client) -> None:
        """Cancel what is unfinished: now, or when the step that is running is done.

        Waits for nothing; from any thread, at any moment, any number of times.
        """
        if client.closed:
            return
        if client.unfinished:
            self._leaving.append(client)
        self._forget(client)
        client.closed = True
        self._settle()

    def _claim(self, client: Client, name: str | None) -> str:
        """A name that is the client's until it is closed."""
        if name is None:
            names = (f"request-{number}" for number in self._numbers)
            return next(n for n in names if self._clients.setdefault(n, client) is client)
        if not isinstance(name, str):
            raise RequestError(f"request_id: expected a string, got {name!r}")
        if self._clients.setdefault(name, client) is not client:
            raise RequestError(f"request_id: {name!r} is in use")
        return name

    def _forget(self, client: Client) -> None:
        """Its names are free again."""
        for name, owner in list(self._clients.items()):
            if owner is client:
                self._clients.pop(name, None)

    def _taken(self, client: Client, item: StepOutput | Exception) -> StepOutput:
        if client.held and client.is_low:
            self._ask_to_resume(client)
        if isinstance(item, Exception):
            raise item
        return item

    def _ask_to_resume(self, client: Client) -> None:
        self._resuming.append(client)
        self._wake()

    def _follow(self, client: Client) -> None:
        """Have the worker step for a client."""
        self._followers[client] = None
        client.follows = True
        if not client.entered:
            self._entering.append(client)
        with self._worker_lock:
            if self._worker is None:
                self._lingers = True
                self._worker = threading.Thread(
                    target=_work, args=(ref(self), self._bell), name="eecore", daemon=True
                )
                self._worker.start()
        self._wake()

    def _step_alone(self, client: Client) -> bool:
        """Step until there is something to read; False when the client follows from now on."""

        def step() -> None:
            self._let_leave()
            self._resume(client)
            while client.unfinished and client.mail.empty() and not self._followers:
                self._step()

        if self._in_turn(step) and not (client.unfinished and client.mail.empty()):
            return True
        self._follow(client)
        return False

    def _wait(self, client: Client) -> StepOutput | None:
        """The next step, if it comes soon."""
        self._check_process()
        turn = self._turn.get("")
        if turn is not None and turn.thread == threading.get_ident():
            raise RuntimeError(
                "engine: expected a call between its steps, got one from inside of a step: from a "
                "signal handler or a finaliser"
            )
        if client.held:
            self._ask_to_resume(client)
        try:
            item = client.mail.get(timeout=LOOK_S)
        except queue.Empty:
            self._wake()
            return None
        return self._taken(client, item)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"engine: expected the process that made it, {self._process}, got its child "
                f"{os.getpid()}; a child makes an engine of its own"
            )

    # Turns

    def _in_turn(self, act: Callable[[], None]) -> bool:
        """Do something to the engine; False, and nothing has happened, while others do."""
        turn = Turn()
        try:
            if self._turn.setdefault("", turn) is not turn:
                return False
            act()
            return True
        finally:  # an interrupt may hit one of them, too
            try:
                self._give_back(turn)
            finally:
                self._give_back(turn)

    def _give_back(self, turn: Turn) -> None:
        if self._turn.get("") is turn:
            self._turn.pop("", None)
            self._settle()

    def _settle(self) -> None:
        """See to those who have left, unless whoever has the turn does."""
        while self._leaving and self._in_turn(self._let_leave):
            pass
        self._wake()

    # By the thread whose turn it is. Each may be done once more after it was interrupted.

    def _enter(self, client: Client) -> None:
        self._let_leave()  # they may have had the same names
        if client.closed:
            return
        known = self.engine.requests
        try:
            for request in client.requests:
                if known.get(request.request_id) is not request:
                    self.engine.enqueue(request, request.request_id)
        except Exception as error:
            self._end(client, error)
        client.entered = True

    def _resume(self, client: Client) -> None:
        if client.held:
            client.held = False
            for name in list(client.unfinished):
                self.engine.resume(name)

    def _hold(self, client: Client) -> None:
        client.held = True
        for name in client.unfinished:
            self.engine.hold(name)
        if client.is_low:  # it was read meanwhile, and the reader may not have seen the hold
            self._resume(client)

    def _let_leave(self) -> None:
        while self._leaving:
            self._leave(self._leaving[0])
            self._leaving.popleft()
        while self._entering and self._entering[0].closed:
            self._entering.popleft()

    def _leave(self, client: Client) -> None:
        """Cancel what a client has unfinished."""
        known = self.engine.requests
        for request in client.requests:
            if known.get(request.request_id) is request:
                self.engine.cancel(request.request_id)
        client.unfinished = {}
        self._retire(client)

    def _lose(self, client: Client) -> None:
        """A client that will not say that it leaves."""
        self._leave(client)
        self._forget(client)

    def _retire(self, client: Client) -> None:
        """Nothing of it is unfinished any more."""
        self._busy.pop(client, None)
        self._followers.pop(client, None)

    def _end(self, client: Client, error: Exception) -> None:
        """End all that a client has unfinished with an error."""
        client.put(error)
        try:
            self._leave(client)
        finally:
            client.unfinished = {}
            self._retire(client)
            self._ring(client)

    def _ring(self, client: Client) -> None:
        if client.rings is not None:
            try:
                client.rings()
            except RuntimeError:
                self._lose(client)

    def _step(self) -> None:
        """One step for everybody; an error of it ends all requests."""
        try:
            if not self.engine.has_runnable:
                raise RuntimeError("engine: expected requests that can run, got none")
            steps = self.engine.step()
        except Exception as error:
            for client in list(self._busy):
                if client.entered:
                    self._end(client, error)
            return
        for step in steps:
            reader = self._clients.get(step.request_id)
            if reader is not None and reader.entered:
                self._deliver(step, reader)

    def _deliver(self, step: StepOutput, client: Client) -> None:
        if step.finished or not client.whole:
            client.put(step)
        if step.finished:
            client.unfinished.pop(step.request_id, None)
            if not client.unfinished:
                self._retire(client)
        elif not client.whole and not client.held and client.is_full:
            self._hold(client)
        if step.finished or not client.whole:
            self._ring(client)

    # The worker

    @property
    def _has_duties(self) -> bool:
        """Whether there may be something for the worker to do."""
        return bool(self._followers or self._entering or self._resuming or self._leaving)

    def _wake(self) -> None:
        if self._worker is not None and self._bell.empty() and self._has_duties:
            self._bell.put(None)

    def _serve(self) -> None:
        """Step until nobody who follows has anything that can run."""
        while True:
            self._let_leave()
            while self._resuming:
                self._resume(self._resuming[0])
                self._resuming.popleft()
            while self._entering:
                client = self._entering[0]
                self._enter(client)
                if self._entering and self._entering[0] is client:
                    self._entering.popleft()
            followers = list(self._followers)
            for client in followers:
                if client.is_gone is not None and client.is_gone():
                    self._lose(client)
            if all(client.held or not client.unfinished for client in followers):
                return
            self._step()

    def serve(self) -> None:
        """What the worker thread does when there may be something to do."""
        try:
            if self._has_duties:
                self._in_turn(self._serve)
        except BaseException as error:  # nobody is to wait for a thread that has given up
            failure = RuntimeError(f"engine: {type(error).__name__}: {error}")
            failure.__cause__ = error
            for client in list(self._busy):
                with suppress(BaseException):
                    self._end(client, failure)

    def ends_worker(self, idle_s: float) -> bool:
        """Whether the worker thread, after so long without anybody to step for, is to end."""
        with self._worker_lock:
            if self._followers or self._entering or (self._lingers and idle_s < LINGER_S):
                return False
            self._worker = None
            return True

    def let_go(self) -> None:
        """The worker thread need not wait for callers that may come."""
        self._lingers = False
        if self._worker is not None:
            self._bell.put(None)

    def stop(self) -> None:
        """Cancel what the worker steps for, and wait for its step and its end."""
        worker = self._worker
        for client in list(self._followers):
            self.close(client)
        self.let_go()
        if worker is not None and worker is not threading.current_thread():
            worker.join()


def _work(engine: ReferenceType[SharedEngine], bell: queue.SimpleQueue[None]) -> None:
    """The worker thread. While it waits it keeps no engine alive."""
    since = time.monotonic()
    while (shared := engine()) is not None:
        if shared.num_followers:
            since = time.monotonic()
        shared.serve()
        if shared.ends_worker(time.monotonic() - since):
            return
        del shared
        with suppress(queue.Empty):
            bell.get(timeout=LOOK_S)
            while True:
                bell.get_nowait()


_ENGINES: WeakSet[SharedEngine] = WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread that is inside a kernel must not outlive the interpreter."""
    for engine in list(_ENGINES):
        engine.stop()
