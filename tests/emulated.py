"""The CUDA kernels without a GPU: builds them for the emulator and routes the ops to them.

``tests/emulator`` says what the emulator is. The build lies in build/emulator and is brought up to
date on first use.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cases
import cmake_build
from eecore import ops

_is_routed = False


def build(sanitize: bool = False) -> Path:
    """Compile what has changed; the library of the emulated ops, with AddressSanitizer or without.

    Raises:
        RuntimeError: with the compiler's words.
    """
    folder = cmake_build.build(
        "emulator-sanitized" if sanitize else "emulator",
        "eecore_emulated",
        "-DEECORE_EMULATOR=ON",
        f"-DEECORE_SANITIZE={'ON' if sanitize else 'OFF'}",
    )
    return folder / "libeecore_emulated.so"


@cache
def library() -> ctypes.CDLL:
    """The emulated ops, loaded: torch.ops.eecore_emulated.*

    With EECORE_EMULATED_SANITIZED set they are those with AddressSanitizer, whose runtime must be
    in the process already.
    """
    path = build(sanitize="EECORE_EMULATED_SANITIZED" in os.environ)
    torch.ops.load_library(str(path))
    return ctypes.CDLL(str(path))


def set_seed(seed: int) -> None:
    """Choose the orders in which threads and blocks are visited from here on."""
    library().eecore_emulator_set_seed(ctypes.c_uint64(seed))


def begin_again() -> None:
    """Go back to the first order of EECORE_EMULATOR_SEED if the ops are loaded."""
    if library.cache_info().currsize:
        set_seed(int(os.environ.get("EECORE_EMULATOR_SEED", "0")))


def kernels_of(run: Callable[[], object]) -> list[str]:
    """The names, without template arguments, of the kernels that emulated ops launch in a call."""
    kept_names = library().eecore_emulator_kept_names
    kept_names.restype = ctypes.c_char_p
    library().eecore_emulator_keep_names()
    run()
    return [name.partition("<")[0] for name in kept_names().decode().splitlines()]


def route(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let eecore.ops call the emulated kernels, on CPU tensors, until monkeypatch undoes it."""
    library()
    for name in cases.CUDA_OPS:
        home = sys.modules[getattr(ops, name).__module__]
        monkeypatch.setattr(home, f"_{name}", getattr(torch.ops.eecore_emulated, name).default)
    monkeypatch.setattr(sys.modules[__name__], "_is_routed", True)


@dataclass(frozen=True)
class CountedLaunch:
    """What one launch reads of watched memory.

    Args:
        kernel: its name, template arguments included.
        grid: blocks in x and y.
        watched: bytes read of each watched tensor, and how many of them are different. Reads of
            single elements are not seen.
    """

    kernel: str
    grid: tuple[int, int]
    watched: dict[str, tuple[int, int]]

    @property
    def name(self) -> str:
        """The kernel's, without template arguments."""
        return self.kernel.partition("<")[0]


@contextmanager
def counting(**watched: torch.Tensor) -> Iterator[list[CountedLaunch]]:
    """The launches of the block, in a list that is filled at its end; slower than without."""
    counted: list[CountedLaunch] = []
    counts = library()
    counts.eecore_emulator_count_accesses(1)
    for name, tensor in watched.items():
        # From its first element to its last, whatever lies between.
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        size = ctypes.c_uint64((last + 1) * tensor.element_size())
        counts.eecore_emulator_watch(name.encode(), ctypes.c_void_p(tensor.data_ptr()), size)
    try:
        yield counted
        counts.eecore_emulator_counted_launches.restype = ctypes.c_uint64
        needed = counts.eecore_emulator_counted_launches(None, ctypes.c_uint64(0))
        text = ctypes.create_string_buffer(needed + 1)
        counts.eecore_emulator_counted_launches(text, ctypes.c_uint64(len(text)))
        for each in json.loads(text.value):
            seen = {name: (total, distinct) for name, (total, distinct) in each["watched"].items()}
            counted.append(CountedLaunch(each["kernel"], tuple(each["grid"]), seen))
    finally:
        counts.eecore_emulator_count_accesses(0)


class _ForeignKernels(TorchDispatchMode):
    """Reports torch's kernels between its own to the emulator."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "eecore_emulated" and not func.is_view and "empty" not in str(func):
            library().eecore_emulator_launch_foreign()
        return result


@contextmanager
def checking_races() -> Iterator[Callable[[], int]]:
    """Kernels in the block fail if nothing orders their accesses to global memory; slower.

    Those of its threads, of its blocks, and of kernels ahead in the stream which need not have
    ended. A call of torch is a kernel, too, which starts when those ahead have ended.

    Yields:
        How many accesses have been checked, when called.
    """
    library().eecore_emulator_num_checked.restype = ctypes.c_uint64
    library().eecore_emulator_check_races(1)
    try:
        with _ForeignKernels():
            yield lambda: int(library().eecore_emulator_num_checked())
    finally:
        library().eecore_emulator_check_races(0)


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the backend under test has kernels of a dtype: float16 is for CUDA."""
    return dtype != torch.float16 or device.type == "cuda" or _is_routed


def is_cuda_kernel(device: torch.device) -> bool:
    """Whether the backend under test is a CUDA kernel, on a GPU or emulated."""
    return device.type == "cuda" or _is_routed


if __name__ == "__main__":  # before the tests, so that none of them waits for the compiler
    build()
