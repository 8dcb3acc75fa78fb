"""Worker processes for work of unbounded cost, such as compiling a client's grammar or rendering a
model's template.

A worker answers one question at a time. The kernel ends it when an answer takes too much time, and
refuses it memory beyond a limit; another worker then takes its place.
"""

from __future__ import annotations

import marshal
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any, BinaryIO
from weakref import finalize

MAX_SHOWN = 300
"""Characters of an error that are shown."""
MAX_IDLE = 4
"""Workers of one kind that wait for a question."""
SIZE_BYTES = 8
# Times the CPU time of an answer that it may last, since the machine may have other work to do.
MAX_SLOWER = 100
# Import packages from where this process does.
PROGRAM = (
    "import sys; module = sys.argv[1]; sys.path[:] = sys.argv[2:]; "
    "from eecore.bounded_process import serve; serve(module)"
)


class NotPrepared(Exception):
    """A worker could not be prepared; the text says why."""


class Workers:
    """Workers for one kind of work: as many as there are questions at once.

    Args:
        module: its ``prepared`` is called once in each worker, and returns the function that
            answers questions.
        start: plain values that ``prepared`` is called with; it raises a ValueError when they are
            wrong.
    """

    def __init__(self, module: str, *start: Any) -> None:
        self._module, self._start = module, start
        self._idle: list[_Worker] = []

    def ask(self, question: tuple[Any, ...], seconds: float, memory: int) -> Any:
        """The answer of a worker; None: the question took too much time or memory.

        Args:
            question: plain values: numbers, texts and containers of them.
            seconds: CPU time of the answer.
            memory: bytes of the answer, beyond those of a worker without work.

        Raises:
            NotPrepared: there is no worker, since one could not be prepared.
        """
        worker = self._taken() or _Worker(self._module, self._start)
        answer, goes_on = worker.ask((question, seconds, memory)) or (None, False)
        if goes_on and len(self._idle) < MAX_IDLE:
            self._idle.append(worker)
        return answer

    def _taken(self) -> _Worker | None:
        """A worker that has nothing to do, if there is one."""
        with suppress(IndexError):
            while True:
                worker = self._idle.pop()
                if worker.is_alive:
                    return worker
        return None


class _Worker:
    """A process that answers questions."""

    def __init__(self, module: str, start: tuple[Any, ...]) -> None:
        self._owner = os.getpid()
        self._process = process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, module, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C does not reach it
        )
        self._end = finalize(self, _end, process, self._owner)
        error = self.ask(start)
        if error != "":
            raise NotPrepared(error or "its process ended")

    @property
    def is_alive(self) -> bool:
        """Whether this process has the worker, and the worker has not ended."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, question: tuple[Any, ...]) -> Any:
        """The answer; None: the worker has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        data = marshal.dumps(question)
        answer = None
        try:
            with suppress(OSError):
                _write(self._process.stdin, data)
                answer = _read(self._process.stdout)
        finally:  # half of an answer may be left, after an interrupt
            if answer is None:
                self._end()
        return None if answer is None else answer[0]


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if owner == os.getpid():
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):  # it has text for a process that has ended
                pipe.close()


def _write(pipe: BinaryIO | Any, data: bytes) -> None:
    pipe.write(len(data).to_bytes(SIZE_BYTES, "little") + data)
    pipe.flush()


def _read(pipe: BinaryIO | Any) -> Any:
    """The next message; None when the other end has gone."""
    size = int.from_bytes(pipe.read(SIZE_BYTES), "little")
    data = pipe.read(size)
    return marshal.loads(data) if size and len(data) == size else None


# The code that runs in a worker


def serve(module: str) -> None:
    """Answer questions until the asking process has gone.

    Args:
        module: has ``prepared``.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with the asking process
    questions, answers = (
        os.fdopen(os.dup(number), mode) for number, mode in ((0, "rb"), (1, "wb"))
    )
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):  # libraries may print
        os.dup2(null, number)
    with suppress(BrokenPipeError):
        _serve(module, questions, answers)
    os._exit(0)


def _serve(module: str, questions: Any, answers: Any) -> None:
    start = _read(questions)
    if start is None:
        return
    memory_of_this = os.open("/proc/self/statm", os.O_RDONLY)  # later no file may be opened

    def used() -> int:
        """The bytes of address space of this process."""
        return int(os.pread(memory_of_this, 64, 0).split()[0]) * resource.getpagesize()

    try:
        answer_to = import_module(module).prepared(*start)
    except ValueError as error:
        _write(answers, marshal.dumps((str(error)[:MAX_SHOWN] or "an error",)))
        return
    _write(answers, marshal.dumps(("",)))
    own = used()
    while (message := _read(questions)) is not None:
        question, seconds, memory = message
        _limit_memory(own + memory)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, MAX_SLOWER * seconds)
        answer = answer_to(*question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        goes_on = used() < own + memory // 2  # the next question has room, too
        _write(answers, marshal.dumps(((answer, goes_on),)))
        if not goes_on:
            return


def _limit_memory(size: int) -> None:
    """Make allocations beyond ``size`` bytes of address space fail."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
