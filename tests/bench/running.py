"""Runs of benchmarks from the checkout's root."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from bench.harness.places import ROOT

RunsBench = Callable[..., "subprocess.CompletedProcess[str]"]


def run(*words: object) -> subprocess.CompletedProcess[str]:
    """Run ``python -m bench`` with these arguments."""
    return subprocess.run(
        [sys.executable, "-m", "bench", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        timeout=600,
    )
