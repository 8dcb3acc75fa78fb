"""The emulator finds planted faults, names them, and passes their sound twins."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import emulated
from sanitized import runtimes

NUM_THREADS = 64

FAULTS = {
    "missing_barrier": r"missing_barrier<true>: block \(0, 0, 0\): thread \(\d+, 0, 0\) reads byte",
    "missing_barrier_of_atomics": r"(reads|changes) byte \d+ of static .* with no barrier between",
    "missing_syncwarp": r"missing_syncwarp<true>.* reads byte \d+ of static shared memory",
    "missing_second_barrier": r"byte \d+ .*, which thread \d+ (wrote|read) with no barrier between",
    "missing_wait_group": r"reads byte \d+ of dynamic .*cp\.async of thread \d+ is under way",
    "shared_out_of_bounds": r"thread \(63, 0, 0\) is out of bounds: byte 256 of .* 256 bytes",
    "read_before_written": r"reads byte 20 of static shared memory, which .* has written",
    "divergent_barrier": r"thread \d+ waits in __syncthreads at .*, and thread 32 has ended",
    "divergent_shuffle": r"thread \d+ waits in __shfl_xor_sync at .* has ended",
    "unaligned_access": r"16-byte access to global memory at .* not a multiple of 16",
    "never_waits": r"launched to start early, but no block waits",
    "lowered_shared_limit": r"lowered_shared_limit<true> may have 57344 bytes .*, after 65536",
    "loaded_in_capture": r"kernel .*loaded_in_capture<true> would be loaded during a capture",
    "early_behind_condition": r"early_behind_condition<true> may start early .* is not a kernel",
}


def run_fault(name: str, faulty: bool) -> tuple[str, torch.Tensor]:
    """The emulator's message about a kernel, and the kernel's output."""
    data = torch.arange(4.0 * NUM_THREADS)
    out = torch.zeros(3 * NUM_THREADS)
    message = ctypes.create_string_buffer(2000)
    emulated.library().eecore_emulator_run_fault(
        name.encode(),
        int(faulty),
        ctypes.c_void_p(data.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        message,
        len(message),
    )
    return message.value.decode(), out


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_its_sound_twin_is_not(name: str, seed: int) -> None:
    emulated.set_seed(seed)
    message, _ = run_fault(name, faulty=False)
    assert message == ""
    message, _ = run_fault(name, faulty=True)
    assert re.search(FAULTS[name], message), message


def test_order_dependence_shows_between_seeds_and_the_same_seed_repeats() -> None:
    winners, sound = [], []
    for seed in (*range(8), 3):
        emulated.set_seed(seed)
        winners.append(run_fault("order_dependent", faulty=True)[1][0].item())
        sound.append(run_fault("order_dependent", faulty=False)[1])
    assert len(set(winners)) > 1
    assert winners[-1] == winners[3]
    assert all(torch.equal(out, sound[0]) for out in sound)


def test_a_fault_in_an_op_is_a_python_exception_and_the_next_call_works() -> None:
    message, _ = run_fault("missing_barrier", faulty=True)
    assert message
    message, out = run_fault("missing_barrier", faulty=False)
    assert message == ""
    assert out[:NUM_THREADS].sort().values.tolist() == list(range(NUM_THREADS))


SANITIZED = """
import ctypes, sys, torch
torch.ops.load_library(sys.argv[1])
library = ctypes.CDLL(sys.argv[1])
data, out = torch.arange(256.0), torch.zeros(int(sys.argv[2]))
message = ctypes.create_string_buffer(2000)
failed = library.eecore_emulator_run_fault(
    b"global_out_of_bounds", int(sys.argv[3]), ctypes.c_void_p(data.data_ptr()),
    ctypes.c_void_p(out.data_ptr()), message, len(message))
print("ran", failed)
"""


@pytest.fixture(scope="module")
def sanitizer() -> dict[str, str]:
    """The environment in which the sanitized library can be loaded into Python."""
    libraries = runtimes()
    if not libraries:
        pytest.skip("no AddressSanitizer for this compiler")
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(map(str, libraries)),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "EECORE_EMULATED_SANITIZED": "1",
    }


@pytest.mark.long
@pytest.mark.parametrize("faulty", [False, True])
def test_the_sanitizer_finds_a_write_past_a_tensor(sanitizer: dict[str, str], faulty: bool) -> None:
    library = emulated.build(sanitize=True)
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED, str(library), str(NUM_THREADS), str(int(faulty))],
        env=sanitizer,
        capture_output=True,
        text=True,
    )
    if faulty:
        assert done.returncode != 0
        assert "heap-buffer-overflow" in done.stderr
        assert "global_out_of_bounds" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "ran 0" in done.stdout


@pytest.mark.long
def test_the_ops_are_clean_under_the_sanitizer(sanitizer: dict[str, str]) -> None:
    """A sample of the op tests on the sanitized kernels: no access outside any tensor."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/ops", "-k", "emulated", "-p", "no:cacheprovider"],
        cwd=root,
        env={
            **sanitizer,
            "EECORE_ONE_CASE_IN": "10",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "passed" in done.stdout
    assert "failed" not in done.stdout
