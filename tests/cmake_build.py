"""Builds of the compiled modules for tests, brought up to date on first use."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "eecore"


@contextmanager
def alone(name: str) -> Iterator[Path]:
    """Hold the folder build/<name>; other processes wait for it."""
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


def build_package(name: str, *options: str) -> Path:
    """The folder from which ``eecore`` is imported with a module that was built with options.

    In build/<name>/package it is that of the sources, but for the module.

    Raises:
        RuntimeError: with the compiler's words.
    """
    with alone(name) as folder:
        _build(folder, "_C", options)
        package = folder / "package" / "eecore"
        package.mkdir(parents=True, exist_ok=True)
        sources = [path for path in PACKAGE.iterdir() if path.suffix != ".so"]
        wanted = {path.name: path for path in (*sources, *folder.glob("_C*.so"))}
        for link in package.iterdir():
            if link.name not in wanted:
                link.unlink()
        for link_name, path in wanted.items():
            if not (package / link_name).is_symlink():
                (package / link_name).symlink_to(path)
    return package.parent


def _build(folder: Path, target: str, options: Sequence[str]) -> None:
    configure = [
        *("cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "-DEECORE_CUDA=OFF"),
        *(f"-DPython_EXECUTABLE={sys.executable}", *options),
    ]
    # The cmake and ninja of this interpreter's environment, activated or not.
    tools = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    # What changes in the sources, ninja sees; CMake's own look at torch takes seconds.
    made_with = "\n".join([*configure, metadata.version("torch")])
    record = folder / "configured"
    if not record.exists() or record.read_text() != made_with:
        run(*configure, PATH=tools)
        record.write_text(made_with)
    run("cmake", "--build", str(folder), "--target", target, PATH=tools)


def run(*command: str, cwd: Path | None = None, **environment: str) -> str:
    """The output of a command, in this process's environment and the given variables.

    Raises:
        RuntimeError: it failed, with its words.
    """
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env={**os.environ, **environment}
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-8000:]}{done.stderr[-4000:]}")
    return done.stdout
