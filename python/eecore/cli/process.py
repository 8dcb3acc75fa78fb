"""The process around a command line: its signals, its streams and its exit.

It imports little: until :func:`run_process` runs, Python itself handles signals and errors.
"""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

from eecore.cli.imports import kept
from eecore.cli.signals import INTERRUPTED, SIGNALS
from eecore.cli.streams import finish_output, prepare_streams, say


def run_process() -> int:
    """Run the command line of this process; returns the exit code."""
    try:
        code = _run()
        SIGNALS.ignore()
    except KeyboardInterrupt:
        SIGNALS.ignore()
        code = _interrupted()
    code = finish_output(code)
    gc.freeze()  # the interpreter's exit then searches no modules for cycles
    return code


def _run() -> int:
    prepare_streams()
    threading.excepthook = _of_thread
    SIGNALS.listen()
    try:
        with kept():
            from eecore.cli.app import run

        return run(sys.argv[1:])
    except SystemExit as left:
        SIGNALS.arrived()
        return left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except Exception as error:
        if SIGNALS.waiting:  # a library replaced the interrupt by another exception
            return _interrupted()
        say(f"error: {type(error).__name__}: {error}")
        return 1


def _interrupted() -> int:
    say("interrupted")
    return INTERRUPTED


def _of_thread(failed: Any) -> None:
    if failed.exc_type is not SystemExit:
        say(f"error: {failed.exc_type.__name__}: {failed.exc_value}")
