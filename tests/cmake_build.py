"""Builds of the compiled modules for tests, brought up to date on first use."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build(name: str, target: str, *options: str) -> Path:
    """Compile what has changed of a target without CUDA; the folder build/<name>.

    Raises:
        RuntimeError: with the compiler's words.
    """
    folder = ROOT / "build" / name
    configure = [
        *("cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "-DEECORE_CUDA=OFF"),
        *(f"-DPython_EXECUTABLE={sys.executable}", *options),
    ]
    make = ["cmake", "--build", str(folder), "--target", target]
    # The cmake and ninja of this interpreter's environment, activated or not.
    tools = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    for command in (configure, make):
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PATH": tools}
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-8000:]}{done.stderr[-4000:]}")
    return folder
