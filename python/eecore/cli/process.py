"""The process around a command line: its signals, its streams and its exit code.

It imports little: until :func:`run_process` runs, Python itself handles signals and errors.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

OUTPUT_LOST, INTERRUPTED, NO_READER, TERMINATED = 1, 130, 141, 143
LOADING_SECONDS = 0.05
"""Seconds after which a signal that came while torch was loading is tried again."""


def run_process() -> int:
    """Run the command line of this process; returns the exit code."""
    prepare_streams()
    listen()
    try:
        with kept():
            from eecore.cli.app import run

        code = run(sys.argv[1:])
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it would come too late to change anything
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        say("interrupted")
        code = INTERRUPTED
    gc.freeze()  # the interpreter's exit then searches no modules for cycles
    return code


@contextmanager
def kept() -> Iterator[None]:
    """Objects imported in this context are kept out of later garbage collections.

    torch alone makes so many objects that collections take a fifth of its import.
    """
    was_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
        if was_enabled:
            gc.enable()


def listen() -> None:
    """Turn Ctrl-C and SIGTERM into KeyboardInterrupt and SystemExit, so that files and processes
    are closed.
    """
    # A shell that starts a command in the background has it ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _stop)


def _stop(number: int, _frame: FrameType | None) -> None:
    """Raise the exception of a signal, but not into the import of torch: its C++ code would end the
    process.
    """
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if getattr(spec, "_initializing", False):
        main = threading.main_thread().ident or 0
        again = threading.Timer(LOADING_SECONDS, signal.pthread_kill, (main, number))
        again.daemon = True
        again.start()
        return
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(TERMINATED)


def prepare_streams() -> None:
    """Put the null device in place of closed streams, whose numbers the next files would get, and
    let stdout write every letter.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)  # for processes that this one starts
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def say(line: str) -> None:
    """Print a line on stderr, if it can be written there."""
    with suppress(OSError, ValueError):
        print(line.encode(errors="backslashreplace").decode(), file=sys.stderr, flush=True)


def says_all(stream: Any) -> bool:
    """Whether a stream can encode every letter."""
    return (getattr(stream, "encoding", None) or "").lower().startswith("utf")


def lost_output() -> OSError | None:
    """Flush stdout. The error where that fails: what is buffered is dropped then, which Python
    would report at its end.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return error
    return None
