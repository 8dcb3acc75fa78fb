"""One engine, and one KV cache, for callers on any thread.

A caller that is alone steps the engine itself. As soon as there are several, a worker thread steps
for all of them and hands each its steps: whoever leaves then, in whatever way, takes nobody along.

What a caller wants it notes in its :class:`Client`, which it then puts into the inbox. Everything
else is changed by the thread whose turn it is alone, between two steps: it looks at each client of
the inbox, does what is still to be done for it, and only then takes it out; done twice it is done
once. Nobody waits for a turn, so that a caller can leave at any moment: by an interrupt, from a
finaliser, from a signal handler. Whoever has had the turn looks into the inbox once more.
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

from eecore.engine.client import Client
from eecore.engine.engine import Engine
from eecore.errors import RequestError
from eecore.output import StepOutput

__all__ = ["SharedEngine"]

# How long the worker thread stays when there is nobody to step for.
LINGER_S = 5.0
# How often those who wait look whether they still have to.
LOOK_S = 1.0


class Turn:
    """The right to touch the engine, of the thread that made it."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.is_had = False


class SharedEngine:
    """Serves callers on any thread with one engine.

    A caller makes a :class:`Client`, opens it, reads its steps, and closes it, whatever happens.
    Requests whose steps lie unread are put on hold after :data:`READ_AHEAD` of them each; the
    others go on.

    Args:
        engine: whom nobody else steps.
    """

    is_up = True
    num_restarts = 0
    failure = None

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._process = os.getpid()
        self._numbers = itertools.count()
        self._names: dict[str, Client] = {}  # of requests whose clients have not been closed
        self._inbox: deque[Client] = deque()
        self._resets_cache = False
        self._turn: dict[str, Turn] = {}
        # Of the thread whose turn it is; callers add themselves to the first, before anything else.
        self._busy: dict[Client, None] = {}  # those with unfinished requests
        self._followers: dict[Client, None] = {}  # of these, those that the worker steps for
        self._readers: dict[str, Client] = {}  # by the names of their requests
        self._workers: dict[threading.Thread, None] = {}  # one, now and then more: no harm
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lingers = True
        self._is_stopping = False
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
            ModelError: the model that the weights are shared with has changed.
            RuntimeError: in another process than the engine's.
        """
        self._check_process()
        self.engine.check_held()
        for request in client.requests:
            request.request_id = self._claim(client, name)
        if client.closed:  # meanwhile, by another thread: it may have missed a name
            self._forget(client)
        if not client.requests:
            return
        is_alone = not self._busy and client.rings is None
        client.unfinished = dict.fromkeys(client.names)
        self._busy[client] = None
        if is_alone:
            self._ask(client)
        else:
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
            if client.follows:
                step = self._wait(client)
                if step is not None:
                    return step
            elif not self._step_alone(client):
                self._follow(client)

    def take(self, client: Client) -> StepOutput | None:
        """What :meth:`read` would return at once; None if that is nothing."""
        try:
            item = client.mail.get_nowait()
        except queue.Empty:
            return None
        return self._taken(client, item)

    def close(self, client: Client) -> None:
        """Cancel what is unfinished: now, or when the step that is running is done.

        Waits for nothing; from any thread, at any moment, any number of times. Where it was
        interrupted, it has to be called again.
        """
        client.closed = True
        if client in self._busy or any(self._names.get(n) is client for n in list(client.names)):
            self._inbox.append(client)
        self._forget(client)  # behind the above: who gets its names next enters when it has left
        self._settle()

    def reset_prefix_cache(self) -> None:
        """Forget what pages hold that no unfinished request has: now, or when the step that is
        running is done. From any thread.
        """
        self._resets_cache = True
        self._settle()

    def _claim(self, client: Client, name: str | None) -> str:
        """A name that is the client's until it is closed."""
        while True:
            claimed = f"request-{next(self._numbers)}" if name is None else name
            if not isinstance(claimed, str):
                raise RequestError(f"request_id: expected a string, got {name!r}")
            client.names.append(claimed)  # first, so that it can be found again
            if self._names.setdefault(claimed, client) is client:
                return claimed
            client.names.pop()
            if name is not None:
                raise RequestError(f"request_id: {name!r} is in use")

    def _forget(self, client: Client) -> None:
        """Its names are free again."""
        for name in list(client.names):
            if self._names.get(name) is client:
                self._names.pop(name, None)

    def _taken(self, client: Client, item: StepOutput | Exception) -> StepOutput:
        if client.held and client.is_low:
            self._ask(client)
        if isinstance(item, Exception):
            raise item
        return item

    def _ask(self, client: Client) -> None:
        """Have somebody look at a client: this thread, or the one whose turn it is."""
        self._inbox.append(client)
        self._settle()

    def _follow(self, client: Client) -> None:
        """Have the worker step for a client."""
        client.follows = True
        self._ask(client)
        self._ensure_worker()

    def _step_alone(self, client: Client) -> bool:
        """Step until there is something to read; False if that is the worker's from now on."""

        def step() -> None:
            self._attend(client)
            while True:
                if self._inbox or self._resets_cache:
                    self._attend_all()
                if len(self._busy) > 1 or not client.unfinished or not client.mail.empty():
                    return
                self._step()

        return self._in_turn(step) and not (client.unfinished and client.mail.empty())

    def _wait(self, client: Client) -> StepOutput | None:
        """The next step, if it comes soon."""
        self._check_process()
        turn = self._turn.get("")
        if turn is not None and turn.thread == threading.get_ident():
            raise RuntimeError(
                "engine: expected a call between its steps, got one from inside of a step: from a "
                "signal handler or a finaliser"
            )
        try:
            item = client.mail.get(timeout=LOOK_S)
        except queue.Empty:
            self._follow(client)  # nothing was to be lost, and yet
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
            try:  # an interrupt at a return would be outside of both
                if self._turn.setdefault("", turn) is turn:
                    act()
            finally:
                self._give_back(turn)
        finally:
            self._give_back(turn)  # an interrupt may have hit the first
        return turn.is_had

    def _give_back(self, turn: Turn) -> None:
        if self._turn.get("") is turn:
            turn.is_had = True
            self._turn.pop("", None)
        if turn.is_had:  # others rely on it to look into the inbox
            self._settle()

    def _settle(self) -> None:
        """See to the inbox, unless whoever has the turn does."""
        while (self._inbox or self._resets_cache) and self._in_turn(self._attend_all):
            pass
        self._wake()

    # By the thread whose turn it is. Each may be done once more after it was interrupted.

    def _attend_all(self) -> None:
        if self._resets_cache:
            self.engine.reset_prefix_cache()
            self._resets_cache = False
        while self._inbox:
            self._attend(self._inbox[0])
            self._inbox.popleft()

    def _attend(self, client: Client) -> None:
        """Do what a client wants and has not got."""
        if client.closed:
            if client in self._busy:
                self._leave(client)
            self._forget(client)
            return
        if client.unfinished and not client.entered:
            self._enter(client)
        if client.held and client.is_low:
            self._resume(client)
        if not client.unfinished:
            self._retire(client)
            self._ring(client)
        elif client.follows:
            self._followers[client] = None

    def _enter(self, client: Client) -> None:
        known = self.engine.requests
        try:
            for request in client.requests:
                if known.get(request.request_id) is not request:
                    self.engine.enqueue(request, request.request_id)
                self._readers[request.request_id] = client
        except Exception as error:
            self._end(client, error)
        client.entered = True

    def _resume(self, client: Client) -> None:
        for name in list(client.unfinished):
            self.engine.resume(name)
        client.held = False

    def _hold(self, client: Client) -> None:
        client.held = True
        for name in client.unfinished:
            self.engine.hold(name)
        if client.is_low:  # it was read meanwhile, and the reader may not have seen the hold
            self._resume(client)

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
        client.closed = True
        self._forget(client)
        self._leave(client)

    def _retire(self, client: Client) -> None:
        """Nothing of it is unfinished any more."""
        client.held = False
        for name in list(client.names):
            if self._readers.get(name) is client:
                del self._readers[name]
        self._followers.pop(client, None)
        self._busy.pop(client, None)

    def _end(self, client: Client, error: Exception) -> None:
        """End all that a client has unfinished with an error."""
        client.mail.put(error)
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
        if not client.unfinished:  # a caller that does not answer is let go
            client.rings = client.is_gone = None

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
            reader = self._readers.get(step.request_id)
            if reader is not None:
                self._deliver(step, reader)

    def _deliver(self, step: StepOutput, client: Client) -> None:
        finished = step.finished
        if client.whole and not finished:
            return
        client.mail.put(step)
        if finished:
            client.unfinished.pop(step.request_id, None)
            if not client.unfinished:
                self._retire(client)
        elif not client.held and client.is_full:
            self._hold(client)
        self._ring(client)

    # The worker

    def _is_needed(self) -> bool:
        """Whether there is somebody for the worker to look after."""
        return bool(self._followers or self._inbox) and not self._is_stopping

    @property
    def _can_step(self) -> bool:
        """Whether the worker would get anywhere."""
        followers = list(self._followers)
        return bool(self._inbox) or any(not c.held and c.unfinished for c in followers)

    def _wake(self) -> None:
        if self._workers and self._bell.empty() and self._can_step:
            self._bell.put(None)

    def _ensure_worker(self) -> None:
        """A worker that lives, and wakes."""
        for worker in list(self._workers):
            if not worker.is_alive():
                self._workers.pop(worker, None)
        if not self._workers and not self._is_stopping:
            self._lingers = True
            arguments = ref(self), self._bell
            worker = threading.Thread(target=_work, args=arguments, name="eecore", daemon=True)
            self._workers[worker] = None
            worker.start()
        self._wake()

    def _serve(self) -> None:
        """Step until nobody who follows has anything that can run."""
        try:
            while not self._is_stopping:
                self._attend_all()
                followers = list(self._followers)
                for client in followers:
                    if client.is_gone is not None and client.is_gone():
                        self._lose(client)
                if all(client.held or not client.unfinished for client in followers):
                    return
                self._step()
        except BaseException as error:  # nobody is to wait for a thread that has given up
            failure = RuntimeError(f"engine: {type(error).__name__}: {error}")
            failure.__cause__ = error
            for client in list(self._busy):
                with suppress(BaseException):
                    self._end(client, failure)

    def serve(self) -> None:
        """What the worker thread does when there may be something to do."""
        self._workers[threading.current_thread()] = None
        if self._followers or self._inbox:
            with suppress(Exception):  # it stays in the inbox, and is looked at again
                self._in_turn(self._serve)

    def ends_worker(self, idle_s: float) -> bool:
        """Whether the worker thread, after so long without anybody to step for, is to end."""
        if self._is_needed() or (self._lingers and idle_s < LINGER_S):
            return False
        worker = threading.current_thread()
        self._workers.pop(worker, None)
        if self._is_needed():  # by somebody who has still seen it
            self._workers[worker] = None
            return False
        if self._workers:  # the bell may have been rung for all of them
            self._bell.put(None)
        return True

    def let_go(self) -> None:
        """The worker thread need not wait for callers that may come."""
        self._lingers = False
        if self._workers:
            self._bell.put(None)

    def stop(self) -> None:
        """Cancel what the worker steps for, and wait for its step and its end."""
        self._is_stopping = True  # whoever comes meanwhile
        try:
            workers = list(self._workers)
            for client in list(self._followers):
                self.close(client)
            self.let_go()
            for worker in workers:
                with suppress(RuntimeError):  # it has not been started, or is the one that asks
                    worker.join()
        finally:
            self._is_stopping = False


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
