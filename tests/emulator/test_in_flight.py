"""The bytes in flight from memory whenever a kernel waits for some of them.

A ring of n stages has n - 1 of them in flight, from the first wait until nothing is left to copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from test_accesses import ATTENTION, CPU, FLOATS
from test_emulator import run_fault
from test_kv_fill import packed
from test_kv_fill import random_call as fill_call
from test_paged_attention import random_call as attention_call

import emulated
from cases import AttentionCase, KvFillCase
from eecore import ops
from eecore.models.int8 import quantise_rows

THREADS = 256  # in a block of a product
MAX_STAGES = 6
NUM_MULTIPROCESSORS = 3  # of the emulator's device
WANTED_BYTES = 96 << 10  # of a weight, in flight to each multiprocessor


@pytest.mark.parametrize(("faulty", "drained"), [(False, 0), (True, 2 * 64 * 16)])
def test_a_ring_that_drains_is_found(faulty: bool, drained: int) -> None:
    with emulated.counting() as counted:
        assert run_fault("draining_ring", faulty)[0] == ""
    (launch,) = counted
    assert (launch.in_flight, launch.drained) == (3 * 64 * 16, drained)


def promised(m_tiles: int, blocks: int) -> int:
    """Bytes in flight to a block by csrc/cuda/skinny_launch.cuh, with room for all stages."""
    stage = 4 * m_tiles * THREADS * 16
    wanted = math.ceil(WANTED_BYTES * NUM_MULTIPROCESSORS / (blocks * stage))
    return min(wanted, MAX_STAGES - 1) * stage


def products(dtype: torch.dtype) -> dict[str, tuple[Callable[[], object], int]]:
    """Calls of every product of a weight that is long enough for its ring, and 16-row tiles of it.

    Tiles are those that a warp multiplies at a time.
    """
    torch.manual_seed(0)
    norm = torch.rand(256).to(dtype)
    made: dict[str, tuple[Callable[[], object], int]] = {}
    for tokens in (1, 9, 20):
        x = torch.randn(tokens, 256).to(dtype)
        weight = torch.randn(2048, 256).to(dtype)
        whole, scale = quantise_rows(weight)
        fill = fill_call(KvFillCase(tokens, hidden_size=512, head_dim=64, rotary_dim=64), dtype)
        fill["exit_layer"].fill_(0)
        made |= {
            f"linear {tokens}": (lambda x=x, w=weight: ops.skinny_linear(x, w), 2),
            f"int8 {tokens}": (
                lambda x=x, w=whole, s=scale: ops.skinny_linear(x, w, weight_scale=s),
                2,
            ),
            f"gated {tokens}": (
                lambda x=x, w=weight: ops.skinny_gated_linear(x, w, norm_weight=norm, eps=1e-5),
                2,
            ),
            f"head {tokens}": (
                lambda x=x, w=weight: ops.exit_confidence_softmax(x, norm, w, 1e-5),
                2,
            ),
            f"fill {tokens}": (
                lambda c=fill: ops.kv_fill(**packed(c)),
                2 if tokens > 16 and dtype != torch.float32 else 1,
            ),
        }
    return made


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_weight_is_on_its_way_as_far_as_its_ring_promises(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also across the ends of tiles, and with rows that are prepared before the first wait."""
    emulated.route(monkeypatch)
    for name, (run, m_tiles) in products(dtype).items():
        with emulated.counting() as counted:
            run()
        (launch,) = (each for each in counted if each.in_flight > 0)
        assert launch.drained == 0, name
        assert launch.in_flight == promised(m_tiles, launch.grid[0]), name


# Several rounds of splits, by teams of one warp, two warps and all four.
ROUNDS = {
    "two bands": AttentionCase((7,), (1024,), 4, 1, 128, 16, fixed_split_size=128),
    "two bands, two warps": AttentionCase((9,), (1024,), 4, 1, 128, 16, fixed_split_size=128),
    "four warps": AttentionCase((9,), (1024,), 4, 1, 136, 16, fixed_split_size=256),
}
# Cases with as many keys as the ring has room for: three stages of 32 KiB.
LONG = ("decode, splits", "one long", "verify", "two bands", "two bands, two warps")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", [*ATTENTION, *ROUNDS])
def test_keys_are_on_their_way_as_far_as_the_ring_has_room(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also across the ends of rounds."""
    emulated.route(monkeypatch)
    call = attention_call({**ATTENTION, **ROUNDS}[name], dtype, CPU)
    with emulated.counting() as counted:
        ops.paged_attention(**call)
    launch = counted[0]
    assert launch.drained == 0
    assert launch.in_flight > 0
    if name in LONG:
        assert launch.in_flight == 2 * (32 << 10)
