"""The command line in tests: its exit codes, the one line of an error, a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

FAILED, USAGE, MODEL, REQUEST = 1, 2, 3, 4
INTERRUPTED, NO_READER, TERMINATED = 130, 141, 143
LONG = 20_000
"""A number of tokens that takes longer than any test waits."""
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}


def start(
    arguments: Sequence[str], *, program: Sequence[str] = ("-m", "eecore"), **options: Any
) -> subprocess.Popen[str]:
    """Start the command in a process of its own, which handles Ctrl-C even if pytest ignores it."""
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=options.pop("stderr", subprocess.PIPE),
        text=True,
        errors="replace",
        env={**os.environ, **QUIET, **options.pop("env", {})},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **options,
    )


def error_of(captured: Any) -> str:
    """The one line on stderr."""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert "Traceback" not in captured.err
    return str(lines[0])
