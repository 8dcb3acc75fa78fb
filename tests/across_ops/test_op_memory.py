"""Calls of ops leak no memory, however many there are."""

from __future__ import annotations

import ctypes
from random import Random

import pytest

import fuzzing  # noqa: F401 (finds the folder of the fuzzers)

# isort: split

import op_calls
from eecore import ops

CALLS = 500
MAX_BYTES = 8 * CALLS


class Mallinfo(ctypes.Structure):
    """glibc's statistics of its heap; uordblks are the bytes in use."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def bytes_in_use() -> int:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("no mallinfo2 in this C library")
    libc.mallinfo2.restype = Mallinfo
    return int(libc.mallinfo2().uordblks)


@pytest.mark.parametrize("op", ops.OP_NAMES)
def test_calls_leak_no_memory(op: str) -> None:
    call = op_calls.random_call(op, Random(5))
    for _ in range(100):
        call.run()
    growths = []
    for _ in range(3):  # something else may take memory at any time, but not always
        before = bytes_in_use()
        for _ in range(CALLS):
            call.run()
        growths.append(bytes_in_use() - before)
    assert min(growths) <= MAX_BYTES
