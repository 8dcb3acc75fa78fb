"""Ctrl-C that stops between two steps rather than within one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from eecore.lab.training.processes import is_launched


class StopRequest:
    """Whether a run has been asked to stop; call it to know."""

    def __init__(self) -> None:
        self.requested = False
        self.interrupts = 0

    def __call__(self) -> bool:
        return self.requested


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """In this context, Ctrl-C and SIGTERM ask for a stop; a second Ctrl-C interrupts at once.

    Under torchrun the third one does: torchrun passes on the Ctrl-C of a terminal, which each of
    its processes has already got from there. Outside the main thread, which alone receives signals,
    the context has no effect.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, _frame: FrameType | None) -> None:
        stop.interrupts += number == signal.SIGINT
        if stop.requested and number == signal.SIGINT and stop.interrupts > passed_on:
            raise KeyboardInterrupt
        stop.requested = True

    passed_on = 2 if is_launched() else 0
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
