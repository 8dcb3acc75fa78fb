"""The build as pip sees it: setuptools' own, after a look at what the machine must have.

pyproject.toml asks for no package before this is imported, so that a machine without a compiler
gets one sentence before anything is fetched. A torch that is installed is built against, and none
is fetched. Run as a command, it makes the same checks.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

BUILD_TOOLS = ["setuptools>=77", "wheel", "cmake>=3.25", "ninja", "pybind11>=2.13"]
MIN_TORCH = (2, 10)
MIN_PYTHON = (3, 10)


def complaint() -> str | None:
    """A sentence about the first thing that this machine lacks, or None."""
    python = f"Python {sys.version.split()[0]} ({sys.executable})"
    if sys.version_info < MIN_PYTHON:
        return f"expected Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer, got {python}"
    compilers = [os.environ.get("CXX") or "c++", "g++", "clang++"]
    if not any(map(shutil.which, compilers)):
        return (
            f"expected a C++ compiler, got none of {', '.join(compilers)}: Debian/Ubuntu: apt "
            "install build-essential; Fedora: dnf install gcc-c++; or name one with CXX=..."
        )
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return (
            f"expected the C headers of {python}, got none: Debian/Ubuntu: apt install "
            "python3-dev; Fedora: dnf install python3-devel"
        )
    return None


def check_machine() -> None:
    """Exit with a sentence if this machine cannot compile eecore."""
    if said := complaint():
        sys.exit(f"eecore: {said}")


def site_packages() -> str:
    """The packages of this interpreter, which pip hides from an isolated build."""
    return sysconfig.get_path("purelib")


def has_torch() -> bool:
    """Whether a torch to build against is installed."""
    for found in metadata.distributions(name="torch", path=[site_packages()]):
        version = tuple(int(part) for part in found.version.split(".")[:2])
        return version >= MIN_TORCH
    return False


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:  # noqa: ARG001
    return BUILD_TOOLS[:1]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:  # noqa: ARG001
    check_machine()
    return BUILD_TOOLS + ([] if has_torch() else [f"torch>={MIN_TORCH[0]}.{MIN_TORCH[1]}"])


get_requires_for_build_editable = get_requires_for_build_wheel


def __getattr__(name: str) -> Any:
    """The other hooks are setuptools' own: it is not there yet when the ones above are called."""
    from setuptools import build_meta

    return getattr(build_meta, name)


if __name__ == "__main__":
    check_machine()
