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

# A copy that its readers do not know of, or into what a thread may still have to read.
UNDER_WAY = r"(a copy of mbarrier \d+ (is under way|wrote|is filling)|copy into .* read with no)"
FAULTS = {
    "missing_barrier": r"missing_barrier<true>: block \(0, 0, 0\): thread \(\d+, 0, 0\) reads byte",
    "missing_barrier_of_atomics": r"(reads|changes) byte \d+ of static .* with no barrier between",
    "missing_syncwarp": r"missing_syncwarp<true>.* reads byte \d+ of static shared memory",
    "missing_second_barrier": r"byte \d+ .*, which thread \d+ (wrote|read) with no barrier between",
    "missing_wait_group": r"reads byte \d+ of dynamic .*cp\.async of thread \d+ is under way",
    "shared_out_of_bounds": r"thread \(63, 0, 0\) is out of bounds: byte 256 of .* 256 bytes",
    "read_before_written": r"reads byte 20 of static shared memory, which .* has written",
    "divergent_barrier": r"thread \d+ waits in __syncthreads at .*, and thread 32 has ended",
    "missing_named_barrier": r"reads byte \d+ .*, which (.* has written|thread \d+)",
    "miscounted_named_barrier": r"divergent barrier: .*(as one of \d+|waits in named)",
    "divergent_shuffle": r"thread \d+ waits in __shfl_xor_sync at .* has ended",
    "unaligned_access": r"16-byte access to global memory at .* not a multiple of 16",
    "bulk_copy_without_arrival": r"waits in mbarrier_wait .* lacks 1 of 1 arrivals and -256 bytes",
    "bulk_copy_of_more_bytes": rf"{UNDER_WAY}|lacks \d of 1 arrivals and -\d+ bytes",
    "bulk_copy_of_fewer_bytes": r"waits in mbarrier_wait .* lacks 0 of 1 arrivals and 16 bytes",
    "bulk_copy_of_other_phase": UNDER_WAY,
    "bulk_copy_without_wait": UNDER_WAY,
    "bulk_copy_without_release": rf"{UNDER_WAY}|arrives at the mbarrier .* more often than",
    "bulk_copy_released_twice": rf"{UNDER_WAY}|thread \d+ waits in mbarrier_wait",
    "bulk_copy_without_init_fence": r"after whose initialisation no fence_mbarrier_init came",
    "bulk_copy_without_init_barrier": r"(as an mbarrier, which no thread|with no barrier between)",
    "bulk_copy_without_proxy_fence": r"starts a copy into .* wrote with no fence_proxy_async ahead",
    "bulk_copy_whose_mbarrier_is_read": r"reads byte 0 of static .*, which is an mbarrier",
    "bulk_copy_that_is_not_awaited": r"ends while a copy is under way: no thread has waited",
    "bulk_copy_of_unaligned_bytes": r"access to global memory at an address that is not a multiple",
    "bulk_copy_released_by_one_lane": r"starts a copy into .*, which .* read with no barrier",
    "tensor_copy_without_wait": rf"{UNDER_WAY}|a wgmma that reads .* which no thread has written",
    "tensor_copy_that_one_lane_awaits": r"a wgmma that reads .* a copy of mbarrier \d+ wrote with",
    "tensor_copy_released_before_the_product": r"copy into .* (under way reads|read with no)",
    "tensor_copy_released_by_one_warp": r"copy into .* (under way reads|read with no)",
    "tensor_copy_whose_release_lacks_an_arrival": r"mbarrier_wait .* lacks 1 of 9 arrivals and 0 b",
    "tensor_copy_without_proxy_fence": r"starts a copy into .* wrote with no fence_proxy_async",
    "tensor_copy_to_no_multiple_of_1024": r"byte 128 of dynamic .* expected a multiple of 1024",
    "tensor_copy_at_too_many_coordinates": r"copies at 3 coordinates by a map of 2 dimensions",
    "registers_that_are_not_given": r"waits in take_registers",
    "registers_that_one_warp_takes": r"divergent warpgroup: .*take_registers",
    "elected_by_half_a_warp": r"waits in elect_lane at .* has ended",
    "wgmma_without_proxy_fence": r"a wgmma that reads byte \d+ .* with no fence_proxy_async ahead",
    "wgmma_proxy_fence_too_late": r"byte \d+ .*, which thread \d+ wrote with no fence_proxy_async",
    "wgmma_without_fence": r"starts a wgmma with sums that it has touched since its last wgmma_",
    "wgmma_without_second_fence": r"starts a wgmma with a part of A that it has touched since",
    "wgmma_without_commit": r"writes a part of A of a wgmma that is under way: no wait for its",
    "wgmma_with_group_pending": r"writes a part of A of a wgmma that is under way: no wait for its",
    "wgmma_sums_read": r"thread \(\d+, 0, 0\) reads sums of a wgmma that is under way: no wait for",
    "wgmma_part_written": r"writes a part of A of a wgmma that is under way: no wait for its group",
    "wgmma_matrix_written": r"byte 10 .*(a wgmma that is under way reads|wrote with no barrier)",
    "wgmma_matrix_written_by_others": r"writes byte .*(under way reads|(read|wrote) with no)",
    "wgmma_of_pending_copy": r"reads byte \d+ .*cp\.async of thread 0 is under way: no wait",
    "wgmma_part_given_up": r"gives up registers of a wgmma that is under way: no wait",
    "wgmma_without_a_warp": r"divergent warpgroup: .*wgmma",
    "wgmma_of_other_matrix": r"divergent warpgroup: it .* wgmma .* with another matrix",
    "wgmma_of_reserved_bits": r"descriptor whose reserved bits are not 0",
    "cluster_not_begun": r"block [01] of its cluster, which may not have begun: no cluster_sync",
    "cluster_not_written": r"reads byte .* of its cluster, which .* (has written|wrote)",
    "cluster_ends_early": r"(ends after another block of its cluster|of its cluster, which has)",
    "cluster_without_a_warp": r"(ends after another block of its cluster|of its cluster, which)",
    "cluster_of_no_such_block": r"touches shared memory of block 2 of a cluster of 2",
    "cluster_of_odd_grid": r"expected clusters .* that divide the blocks in x, got 2 of 3 blocks",
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


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_its_sound_twin_is_not(name: str, seed: int) -> None:
    emulated.set_seed(seed)
    message, _ = run_fault(name, faulty=False)
    assert message == ""
    message, _ = run_fault(name, faulty=True)
    assert re.search(FAULTS[name], message), message


def run_product(
    dtype: torch.dtype, swizzle: int, columns: int, shift: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A product of 64 x 64 numbers by wgmma, and what it has to be."""
    generator = torch.Generator().manual_seed(columns + shift)
    a, b = (torch.randint(-8, 9, (rows, 64), generator=generator).float() for rows in (64, columns))
    out, message = torch.full((64, columns), torch.nan), ctypes.create_string_buffer(2000)
    failed = emulated.library().eecore_emulator_run_product(
        int(dtype == torch.float16),
        *(swizzle, columns, shift),
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (a, b, out)),
        *(message, len(message)),
    )
    assert not failed, message.value.decode()
    return out, a @ b.T


@pytest.mark.parametrize("columns", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])  # as descriptors number them
def test_a_warpgroup_multiplies_what_descriptors_say(swizzle: int, columns: int) -> None:
    """Whatever the swizzle, and wherever it begins: base offsets are not 0 then."""
    for shift in (0, 3, 12):
        for dtype in (torch.bfloat16, torch.float16):
            out, expected = run_product(dtype, swizzle, columns, shift)
            torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.parametrize("columns", [64, 128, 40])
@pytest.mark.parametrize("from_shared", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_warpgroups_multiply_what_tensor_copies_bring(
    transposed: bool, from_shared: bool, columns: int
) -> None:
    """Also where boxes end out of bounds, and with more boxes than the ring has stages."""
    generator = torch.Generator().manual_seed(columns)
    for dtype, depth in ((torch.bfloat16, 64), (torch.float16, 328)):
        emulated.set_seed(depth)
        a, b = (
            torch.randint(-8, 9, (rows, depth), generator=generator).to(dtype)
            for rows in (128, columns)
        )
        given = b.T.contiguous() if transposed else b
        padded = -(-columns // 64) * 64
        out, message = torch.full((128, padded), torch.nan), ctypes.create_string_buffer(2000)
        failed = emulated.library().eecore_emulator_run_copied_product(
            *(int(dtype == torch.float16), int(transposed), int(from_shared)),
            *(padded // 8, depth, columns),
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (a, given, out)),
            *(message, len(message)),
        )
        assert not failed, message.value.decode()
        assert torch.equal(out[:, :columns], a.float() @ b.float().T)
        assert torch.equal(out[:, columns:], torch.zeros(128, padded - columns))


def copied_box(
    tensor: torch.Tensor, box: tuple[int, ...], start: tuple[int, ...]
) -> tuple[torch.Tensor, str]:
    """The box of a tensor from coordinates on, by a tensor copy; or the message of a failure."""
    rank = tensor.dim()
    out, message = tensor.new_zeros(box), ctypes.create_string_buffer(2000)
    emulated.library().eecore_emulator_copy_box(
        *(rank, tensor.element_size()),
        (ctypes.c_uint64 * rank)(*reversed(tensor.shape)),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_int * rank)(*reversed(start)),
        *(ctypes.c_void_p(each.data_ptr()) for each in (tensor, out)),
        *(message, len(message)),
    )
    return out, message.value.decode()


@pytest.mark.parametrize(
    ("shape", "box", "dtype"),
    [
        ((5, 72), (3, 64), torch.int16),
        ((6, 3, 128), (5, 2, 64), torch.int16),
        ((4, 16, 2, 80), (1, 16, 1, 64), torch.int16),
        ((4, 16, 3, 144), (2, 8, 1, 128), torch.uint8),
    ],
)
def test_a_tensor_copy_brings_a_box_and_zeros_out_of_bounds(
    shape: tuple[int, ...], box: tuple[int, ...], dtype: torch.dtype
) -> None:
    numbers = torch.randint(1, 100, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    generator = torch.Generator().manual_seed(2)
    for _ in range(12):
        start = tuple(
            int(torch.randint(-size // 2, size, (1,), generator=generator)) for size in shape
        )
        got, message = copied_box(numbers, box, start)
        assert message == ""
        expected = torch.zeros(box, dtype=dtype)
        places = [
            torch.arange(first, first + count) for first, count in zip(start, box, strict=True)
        ]
        inside = [(at >= 0) & (at < size) for at, size in zip(places, shape, strict=True)]
        kept = torch.meshgrid(*(where.nonzero().flatten() for where in inside), indexing="ij")
        taken = torch.meshgrid(
            *(at[where] for at, where in zip(places, inside, strict=True)), indexing="ij"
        )
        expected[kept] = numbers[taken]
        assert torch.equal(got, expected), start


def test_a_map_that_no_gpu_takes_is_refused() -> None:
    """A row of 20 bytes, an address that 16 does not divide, a box of over 128 bytes of a row."""
    numbers = torch.arange(640, dtype=torch.int16)
    for tensor, box in (
        (numbers.view(64, 10), (2, 8)),
        (numbers[1:257].view(4, 64), (2, 64)),
        (numbers.view(5, 128), (2, 72)),
    ):
        _, message = copied_box(tensor, box, (0, 0))
        assert message == "cuTensorMapEncodeTiled: error 1"


@pytest.mark.parametrize("seed", range(3))
def test_blocks_of_a_cluster_read_each_others_shared_memory(seed: int) -> None:
    emulated.set_seed(seed)
    message, out = run_fault("cluster_not_begun", faulty=False)
    assert message == ""
    fours = torch.arange(128.0).view(32, 4).sum(1)
    for block in range(4):
        other = block ^ 1
        assert torch.equal(out[32 * block : 32 * (block + 1)], fours + 4 * other)


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
