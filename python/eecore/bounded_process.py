"""Processes for work of unbounded cost, such as compiling a client's grammar or rendering a model's
template.

Each kind of work has a process that prepares it and then forks others. The kernel ends a forked
process when an answer takes too much time, and refuses it memory beyond a limit.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any
from weakref import finalize

from eecore.channel import Channel, Message

MAX_SHOWN = 300
"""Characters of an error that are shown."""
# Import packages from where this process does.
PROGRAM = (
    "import sys; end, module = int(sys.argv[1]), sys.argv[2]; sys.path[:] = sys.argv[3:]; "
    "from eecore.bounded_process import serve; serve(end, module)"
)


class NotPrepared(Exception):
    """The forking process could not be prepared; the text says why."""


class Fork:
    """Forks processes for one kind of work; the forking process starts at the first request for
    one.

    Args:
        module: its ``prepared`` is called in the process that forks, and returns the function that
            a forked process calls with its channel.
        start: plain values that ``prepared`` is called with; it raises a ValueError when they are
            wrong.
    """

    def __init__(self, module: str, *start: Any) -> None:
        self._module, self._start = module, start
        self._lock = threading.Lock()
        self._server: tuple[int, subprocess.Popen[bytes], socket.socket] | None = None
        """The forking process, after the id of the process that started it."""

    def connected(self) -> socket.socket:
        """A socket to a new process.

        Raises:
            NotPrepared: the forking process could not be prepared.
        """
        with self._lock:
            server = self._server
            if server is None or server[0] != os.getpid() or server[1].poll() is not None:
                server = self._server = (os.getpid(), *self._started())
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(server[2], [b"+"], [theirs.fileno()])
        return ours

    def _started(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            server = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno()), self._module, *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C does not reach it, not even while it starts
            )
        channel = Channel(ours)
        with suppress(OSError):
            channel.send(self._start)
        message = channel.receive()
        if message is None or message[0]:
            _end(server, ours)
            raise NotPrepared(
                message[0] if message else f"its process ended, with exit code {server.wait()}"
            )
        finalize(self, _end, server, ours)
        return server, ours


def _end(server: subprocess.Popen[bytes], end: socket.socket) -> None:
    """End a process, which exits once its socket is closed."""
    end.close()
    server.wait()


class BoundedProcess:
    """A process that answers one question at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._channel = Channel(end)
        self._lock = threading.RLock()  # an interrupted thread may still hold it
        self._is_open, self._owner = True, os.getpid()
        self.asked_at = time.monotonic()

    @property
    def is_closed(self) -> bool:
        """Whether the process can answer no more questions."""
        return not self._is_open or self._owner != os.getpid()

    def ask(self, message: Message) -> Message | None:
        """The answer; None: the kernel has ended the process."""
        with self._lock:
            self.asked_at = time.monotonic()
            try:
                with suppress(OSError):
                    self._channel.send(message)
                return self._channel.receive()
            except BaseException:  # an interrupt: half of an answer may have been read
                self.close()
                raise

    def close(self) -> None:
        """End the process."""
        if not self.is_closed:
            self._is_open = False
            self._channel.close()

    def __del__(self) -> None:
        self.close()


# The code that runs in those processes


def serve(end: int, module: str) -> None:
    """Fork a process for each socket that arrives, until the other end has gone.

    Args:
        end: a file descriptor, of a socket to the asking process.
    """
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    with suppress(ConnectionError):  # the other end may go at any moment
        _serve(socket.socket(fileno=end), module)


def _serve(server: socket.socket, module: str) -> None:
    channel = Channel(server)
    message = channel.receive()
    if message is None:
        return
    try:
        run = import_module(module).prepared(*message)
    except ValueError as error:
        channel.send((str(error)[:MAX_SHOWN],))
        return
    channel.send(("",))
    gc.freeze()  # forked processes share it
    while True:
        try:
            said, ends, _, _ = socket.recv_fds(server, 1, 1)
        except ConnectionError:  # it went without having read all
            return
        if not said:
            return
        if os.fork() == 0:
            try:
                server.close()
                signal.signal(signal.SIGPROF, signal.SIG_DFL)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries print how they failed
                run(Channel(socket.socket(fileno=ends[0])))
            finally:
                os._exit(0)
        os.close(ends[0])


@contextmanager
def bounded_seconds(seconds: float) -> Iterator[None]:
    """End this process when the work in this context takes more CPU time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def used_memory() -> int:
    """The bytes of address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def limit_memory(size: int) -> None:
    """Make allocations beyond ``size`` bytes of address space fail."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
