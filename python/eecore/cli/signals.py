"""Ctrl-C and SIGTERM as exceptions, so that what is open is put away.

A library may swallow such an exception, in an import, say. Until somebody says that it has arrived
it is raised again.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from types import FrameType
from typing import Any

__all__ = ["INTERRUPTED", "SIGNALS", "TERMINATED"]

INTERRUPTED, TERMINATED = 130, 143
AGAIN_SECONDS = 1.0
"""After which an exception that has not arrived comes again."""


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

    def _interrupt(self, number: int, _frame: FrameType | None) -> None:
        self._remind(number)
        raise KeyboardInterrupt

    def _terminate(self, number: int, _frame: FrameType | None) -> None:
        self._remind(number)
        raise SystemExit(TERMINATED)

    def _remind(self, number: int) -> None:
        self._waiting += 1
        reminder = threading.Timer(AGAIN_SECONDS, self._again, (number, self._waiting))
        reminder.daemon = True
        reminder.start()

    def _again(self, number: int, count: int) -> None:
        if self._waiting == count:
            _thread.interrupt_main(signal.Signals(number))


def _quietly(_lost: Any) -> None:
    """An exception in a finalizer concerns nobody, or comes again."""


SIGNALS = _Signals()
