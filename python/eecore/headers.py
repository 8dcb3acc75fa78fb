"""Where C++ finds eecore."""

from __future__ import annotations

from pathlib import Path

from eecore.errors import ModelError

__all__ = ["get_include"]


def get_include() -> str:
    """The directory to include ``eecore/cpu.h`` from, and the CUDA kernels' ``eecore/*.cuh``.

    They need neither torch nor Python. ``libeecore_cpu.a``, the CPU kernels, is in ``../lib`` of
    it; ``examples/cpp`` is a program on them.

    Raises:
        ModelError: this build has none.
    """
    directory = Path(__file__).parent / "include"
    if not (directory / "eecore" / "cpu.h").is_file():
        raise ModelError(f"{directory}: expected eecore's headers, got nothing: build it again")
    return str(directory)
