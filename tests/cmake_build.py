"""Builds of the compiled modules for tests, brought up to date on first use."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def alone(name: str) -> Iterator[Path]:
    """The folder build/<name>, which other processes wait for meanwhile."""
    folder = ROOT / "build" / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def build(name: str, target: str, *options: str) -> Path:
    """Compile what has changed of a target without CUDA; the folder build/<name>.

    Raises:
        RuntimeError: with the compiler's words.
    """
    with alone(name) as folder:
        _build(folder, target, options)
    return folder


def _build(folder: Path, target: str, options: tuple[str, ...]) -> None:
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
