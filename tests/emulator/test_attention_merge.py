"""Splits that the last block of a tile merges, and the counters that tell which one it is."""

from __future__ import annotations

import pytest
import torch
from test_paged_attention import SHARED_CASES, random_call

import emulated
from cases import AttentionCase
from eecore import ops

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.route(monkeypatch)


@pytest.mark.parametrize("case", SHARED_CASES, ids=str)
def test_there_is_no_second_kernel(case: AttentionCase) -> None:
    given = random_call(case, torch.bfloat16, CPU)
    two = emulated.kernels_of(lambda: ops.paged_attention(**given))
    assert two == ["paged_attention_kernel", "paged_attention_combine_kernel"]
    given["arrivals"] = torch.zeros(100, dtype=torch.int32)
    assert emulated.kernels_of(lambda: ops.paged_attention(**given)) == two[:1]
    given["arrivals"] = torch.zeros(1, dtype=torch.int32)
    assert emulated.kernels_of(lambda: ops.paged_attention(**given)) == two


def test_much_that_is_left_is_merged_by_many_blocks() -> None:
    """71 spans of 64 keys: more than the last block of a launch may read."""
    case = AttentionCase((1,), (4500,), 4, 1, 64, 16, fixed_split_size=16)
    given = random_call(case, torch.bfloat16, CPU)
    given["arrivals"] = torch.zeros(100, dtype=torch.int32)
    with emulated.counting() as counted:
        ops.paged_attention(**given)
    assert [(launch.name, launch.grid) for launch in counted] == [
        ("paged_attention_kernel", (1, 6)),
        ("paged_attention_combine_kernel", (1, 2)),
    ]


def test_calls_take_turns_with_what_they_count_in() -> None:
    """Calls share counters as the layers of a replayed graph do: each run has other lengths.

    What a block leaves is ordered before what the last one reads, whichever that is.
    """
    case = AttentionCase((1, 2), (1500, 900), 8, 1, 64, 16, fixed_split_size=128)
    first = random_call(case, torch.float32, CPU)
    second = {**first, "q": first["q"].flip(0)}
    arrivals = torch.zeros(64, dtype=torch.int32)
    for seed, lengths in enumerate(((1500, 900), (1, 2), (600, 899), (1499, 0), (1500, 900))):
        first["seq_lens"].copy_(torch.tensor(lengths))
        for layer in (first, second):
            emulated.set_seed(seed)
            with emulated.checking_races():
                got = ops.paged_attention(**layer, arrivals=arrivals)
            assert not arrivals.any()
            assert torch.equal(got, ops.paged_attention(**layer))
