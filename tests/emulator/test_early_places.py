"""Rows' places that kernels read before they wait for the kernel ahead, and the promise for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_early_weights import early_copies
from test_paged_attention import random_call as attention_call

import emulated
from cases import AttentionCase
from eecore import ops

CPU = torch.device("cpu")
CASES = {
    "decode": AttentionCase((1, 1, 1), (300, 40, 1), 8, 2, 64, 16, fixed_split_size=128),
    "splits of the call": AttentionCase((1, 1), (700, 90), 4, 2, 64, 16),
    "verify": AttentionCase((5, 2), (200, 133), 8, 2, 128, 16, fixed_split_size=128),
    "window": AttentionCase((1,), (600,), 4, 2, 64, 16, sliding_window=100, fixed_split_size=128),
    "new alone": AttentionCase((3,), (3,), 4, 2, 64, 16),
}


def appended_call(num_tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of a product whose heads are appended, with two query heads of one of keys."""
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    caches = [torch.full((9, 4, 1, 64), torch.nan, dtype=dtype) for _ in "kv"]
    slots = torch.arange(num_tokens) - int(num_tokens > 1)  # one of them is -1
    angles = torch.rand(40, 32, generator=generator) * 100
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.arange(num_tokens) % 40
    return {
        "x": normal(num_tokens, 128),
        "weight": normal(256, 128),
        "norm_weight": normal(128),
        "constant_weight": True,
        "append": ops.AppendKv(*caches, slots, positions, cos_sin),
    }


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.route(monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_keys_of_earlier_positions_do_not_wait(name: str) -> None:
    call = attention_call(CASES[name], torch.bfloat16, CPU)
    results: dict[bool, torch.Tensor] = {}
    copies = {
        constant: early_copies(
            lambda constant=constant: results.update(
                {constant: ops.paged_attention(**call, constant_places=constant)}
            )
        )
        for constant in (False, True)
    }
    assert copies[False] == 0
    assert (copies[True] > 0) is (name != "new alone")
    assert torch.equal(results[False], results[True])


def attends_after_its_page_table(constant_places: bool, between: bool) -> None:
    """Attention over pages whose table the last kernel has written, or the kernel before it."""
    call = attention_call(AttentionCase((1,), (60,), 4, 2, 64, 16), torch.bfloat16, CPU)
    confidence, thresholds = torch.zeros(4), torch.ones(4)
    status, exit_layer = torch.zeros(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int32)
    x, weight, out = torch.randn(1, 64), torch.randn(64, 64), torch.empty(1, 64)
    attended = torch.empty_like(call["q"])
    with emulated.checking_races():
        pages = ops.accept_mask(confidence, thresholds, 1, status, exit_layer).survivors
        if between:
            ops.skinny_linear(x, weight, out=out, constant_weight=True)
        call |= {"page_table": pages[None], "out": attended}
        ops.paged_attention(**call, constant_places=constant_places)


def test_a_page_table_that_the_kernel_ahead_writes_is_found() -> None:
    """The planted fault: a promise that does not hold."""
    wrote = (
        r"paged_attention_kernel<.*reads global memory .* that accept_mask_kernel, 1 kernel ahead"
    )
    with pytest.raises(RuntimeError, match=wrote):
        attends_after_its_page_table(constant_places=True, between=False)
    attends_after_its_page_table(constant_places=False, between=False)
    attends_after_its_page_table(constant_places=True, between=True)


def appends_after_its_positions(constant_places: bool) -> None:
    call = appended_call(1, torch.bfloat16)
    positions = torch.zeros(1, dtype=torch.int64)
    append = call["append"]._replace(positions=positions, constant_places=constant_places)
    head = ops.SoftmaxConfidence(
        torch.zeros(1), torch.full((1,), 2), torch.zeros(1), torch.zeros(1)
    )
    rows = ops.HeadRows(positions, torch.zeros(1), torch.zeros(1))
    with emulated.checking_races():
        ops.place_head(head, rows)
        ops.skinny_linear(**{**call, "append": append})


def test_positions_that_the_kernel_ahead_writes_are_found() -> None:
    wrote = r"skinny_append_kernel<.*reads global memory .* that place_head_kernel, 1 kernel ahead"
    with pytest.raises(RuntimeError, match=wrote):
        appends_after_its_positions(constant_places=True)
    appends_after_its_positions(constant_places=False)


@pytest.mark.parametrize("num_tokens", [1, 8, 20, 32])
def test_heads_are_appended_alike_however_early(num_tokens: int) -> None:
    results = []
    for constant in (False, True):
        call = appended_call(num_tokens, torch.bfloat16)
        call["append"] = call["append"]._replace(constant_places=constant)
        out = ops.skinny_linear(**call)
        results.append((out, call["append"].k_cache.clone(), call["append"].v_cache.clone()))
    for early, late in zip(*results, strict=True):
        assert torch.equal(early.nan_to_num(), late.nan_to_num())
