"""Ctrl-C that stops between two steps rather than within one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from eecore.lab.training.processes import num_processes


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """In this context, Ctrl-C and SIGTERM ask for a stop, of which the result knows; a second
    Ctrl-C interrupts at once.

    Under torchrun the third one does: torchrun passes on the Ctrl-C of a terminal, which each of
    its processes has already got from there. Outside the main thread, which alone receives signals,
    the context has no effect.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def ask(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and asked and asked.count(number) >= passed_on:
            raise KeyboardInterrupt
        asked.append(number)

    passed_on = 2 if num_processes() > 1 else 0
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
