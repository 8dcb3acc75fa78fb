"""Ctrl-C and SIGTERM as exceptions, so that open files and processes are closed.

A library may swallow such an exception, in an import, say. So it is raised again until
:meth:`arrived` is called. While torch's modules are loading none is raised: their C++ code would
end the process.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

INTERRUPTED, TERMINATED = 130, 143
AGAIN_SECONDS = 1.0
"""Seconds after which an exception that has not arrived is raised again."""
LOADING_SECONDS = 0.05
"""Seconds after which a signal that came while torch was loading is tried again."""


class _Signals:
    """The signals of a process; without :meth:`listen` they do what they always do."""

    def __init__(self) -> None:
        self._waiting = 0  # the number of exceptions raised that have not arrived

    @property
    def waiting(self) -> bool:
        """Whether an exception has been raised that has not arrived."""
        return self._waiting > 0

    def listen(self) -> None:
        """Turn the signals into KeyboardInterrupt and SystemExit from now on."""
        # A shell that starts a command in the background has it ignore Ctrl-C.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupt)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminate)
        sys.unraisablehook = _quietly

    def arrived(self) -> None:
        """Note that the exception has reached the code that handles it."""
        self._waiting = 0

    def ignore(self) -> None:
        """Ignore signals from now on: they would come too late to change anything."""
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
        """Whether an exception may be raised here; the signal is repeated in any case."""
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
            signal.pthread_kill(main, number)  # also ends a wait


def _loads_torch(frame: FrameType | None) -> bool:
    """Whether a module of torch is being imported."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == "<module>" and name.partition(".")[0] == "torch":
            return True
        frame = frame.f_back
    return False


def _quietly(_lost: Any) -> None:
    """Drop an exception in a finalizer: it has no effect, or is raised again."""


SIGNALS = _Signals()
