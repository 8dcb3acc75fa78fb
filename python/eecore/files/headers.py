"""The directory of eecore's C++ headers."""

from __future__ import annotations

from pathlib import Path

from eecore.errors import ModelError


def get_include() -> str:
    """The include directory of ``eecore/cpu.h`` and of the CUDA kernels' ``eecore/*.cuh``.

    The headers need neither torch nor Python. ``libeecore_cpu.a``, the CPU kernels, is in
    ``../lib``; ``examples/cpp`` is a program that uses them.

    Raises:
        ModelError: this build has no headers.
    """
    directory = Path(__file__).resolve().parents[1] / "include"
    if not (directory / "eecore" / "cpu.h").is_file():
        raise ModelError(f"{directory}: expected eecore's headers, got nothing: build it again")
    return str(directory)
