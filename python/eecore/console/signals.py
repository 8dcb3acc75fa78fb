"""Ctrl-C and SIGTERM as exceptions, so that what is open is put away.

A library may swallow such an exception, in an import, say. Until somebody says that it has arrived
it is raised again. While torch's modules load none is: their C++ would end the process by it.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

__all__ = ["INTERRUPTED", "SIGNALS", "TERMINATED"]

INTERRUPTED, TERMINATED = 130, 143
AGAIN_SECONDS = 1.0
"""After which an exception that has not arrived comes again."""
LOADING_SECONDS = 0.05
"""After which a signal is heard again that came while torch was loading."""


class _Signals:
    """The signals of a process; what it never listens to it never hears."""

    def __init__(self) -> None:
        self._waiting = 0  # how often an exception was raised that has not arrived

    @property
    def waiting(self) -> bool:
        """Whether an exception has been raised that has not arrived."""
        return self._waiting > 0

    def listen(self) -> None:
        """From now on the signals are KeyboardInterrupt and SystemExit."""
        # A shell that starts a command in the background has it ignore Ctrl-C.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupt)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminate)
        sys.unraisablehook = _quietly

    def arrived(self) -> None:
        """The exception is where it is dealt with."""
        self._waiting = 0

    def ignore(self) -> None:
        """What comes now comes too late to change anything."""
        self.arrived()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._may_raise(number, frame):
            raise KeyboardInterrupt

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if self._may_raise(number, frame):
            raise SystemExit(TERMINATED)

    def _may_raise(self, number: int, frame: FrameType | None) -> bool:
        """Whether an exception may be raised here; the signal comes again in any case."""
        self._waiting += 1
        is_loading = _loads_torch(frame)
        seconds = LOADING_SECONDS if is_loading else AGAIN_SECONDS
        reminder = threading.Timer(seconds, self._again, (number, self._waiting))
        reminder.daemon = True
        reminder.start()
        return not is_loading

    def _again(self, number: int, count: int) -> None:
        if self._waiting == count:
            main = threading.main_thread().ident or 0
            signal.pthread_kill(main, number)  # which ends a wait, too


def _loads_torch(frame: FrameType | None) -> bool:
    """Whether a module of torch is being imported."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == "<module>" and name.partition(".")[0] == "torch":
            return True
        frame = frame.f_back
    return False


def _quietly(_lost: Any) -> None:
    """An exception in a finalizer concerns nobody, or comes again."""


SIGNALS = _Signals()
