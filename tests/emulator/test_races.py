"""Accesses to global memory that nothing orders are found, whichever comes first."""

from __future__ import annotations

import re

import pytest
import torch
from test_accesses import calls
from test_emulator import run_fault

import emulated
from tiers import in_all

OF_KERNELS_AHEAD = {
    "early_read": r"early_read<true>: .* reads global memory .* that .*write_data, 1 kernel ahead, "
    "wrote, which need not have ended",
    "early_write": r"early_write<true>: .* writes .* that .*read_data, 1 kernel ahead, read",
    "early_weight": r"early_weight<true>: .* reads .* that .*write_data, 1 kernel ahead, wrote",
    "overtakes": r"overtakes<true>: .* reads .* that .*write_data, 2 kernels ahead, wrote",
    "waits_by_proxy": r"waits_by_proxy<true>: .* reads .* that .*write_data, 1 kernel ahead, wrote",
}
OF_BLOCKS = {
    "missing_barrier_of_block": r"(reads|writes) .* that thread \d+ (wrote|read) with no barrier",
    "shared_place": r"writes .* that block \d wrote with no order between",
    "merge_without_barrier": r"reads .* that block \d wrote with no order between",
    "merge_without_fence": r"reads .* that block \d wrote with no order between",
    "merge_without_fence_behind": r"reads .* that block \d wrote with no order between",
    "merge_too_early": r"writes .* that block \d read with no order between",
}
FAULTS = OF_KERNELS_AHEAD | OF_BLOCKS


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_race_is_found_and_its_sound_twin_is_not(name: str, seed: int) -> None:
    emulated.set_seed(seed)
    with emulated.checking_races():
        message, _ = run_fault(name, faulty=False)
        assert message == ""
        message, _ = run_fault(name, faulty=True)
    assert re.search(FAULTS[name], message), message


@pytest.mark.parametrize("name", FAULTS)
def test_nothing_is_checked_unasked(name: str) -> None:
    assert run_fault(name, faulty=True)[0] == ""


@pytest.mark.parametrize("seed", [0, *in_all(1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_all(torch.float32)], ids=str)
def test_the_kernels_of_every_op_are_clean(
    dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run one after the other, without a kernel of torch between them."""
    emulated.route(monkeypatch)
    runs = calls(dtype)
    emulated.set_seed(seed)
    with emulated.checking_races() as num_checked:
        for run in runs.values():
            run()
        assert num_checked() > 1e5
