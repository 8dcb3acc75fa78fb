"""The weights that are in flight before a kernel waits for the one ahead of it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from test_kv_fill import filled
from test_kv_fill import random_call as fill_call
from test_skinny_products import OPS, Product

import emulated
from cases import KvFillCase
from eecore import ops


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.route(monkeypatch)


def early_copies(run: Callable[[], object]) -> int:
    """cp.asyncs that a call starts before its threads wait."""
    ask = emulated.library().eecore_emulator_early_copies
    ask.restype = ctypes.c_uint64
    ask()
    run()
    return int(ask())


@pytest.mark.parametrize("kind", ["floats", "int8", "Q4_1"])
def test_a_weight_that_is_constant_does_not_wait(kind: str) -> None:
    product = Product("skinny_linear", kind)
    call = product.call(3, 128, 64, "plain")  # x is read where it is
    call["residual"] = torch.randn(3, 64)
    results = {}
    copies = {
        constant: early_copies(
            lambda constant=constant: results.update(
                {constant: product.run({**call, "constant_weight": constant})}
            )
        )
        for constant in (False, True)
    }
    assert copies[False] == 0
    assert copies[True] > 0
    assert torch.equal(results[False], results[True])


@pytest.mark.parametrize("op", OPS)
def test_a_constant_weight_does_not_wait_for_rows_that_its_blocks_norm(op: str) -> None:
    product = Product(op)
    call = product.call(3, 128, 64)
    assert early_copies(lambda: product.run(call)) == 0
    assert early_copies(lambda: product.run({**call, "constant_weight": True})) > 0


def test_a_weight_does_not_wait_for_the_kernel_that_norms() -> None:
    call = Product("skinny_linear").call(33, 128, 64)
    launched = emulated.kernels_of(lambda: ops.skinny_linear(**call))
    assert launched == ["rms_norm_kernel", "skinny_linear_kernel"]
    assert early_copies(lambda: ops.skinny_linear(**call)) > 0


def test_a_fill_begins_with_the_last_layer_before_it_knows_the_rows() -> None:
    call = fill_call(KvFillCase(4))
    call["exit_layer"].fill_(0)
    assert early_copies(lambda: filled(ops.kv_fill, call)) > 0
