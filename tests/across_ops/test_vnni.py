"""AVX-VNNI, or the model of it: every op has the results of AVX2, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch
from torch import Tensor

import cases
import op_calls
from eecore import _C, ops

NUM_CALLS = 60
HERE = [name for name in cases.cpu_capabilities() if name.startswith("avx_vnni")]


@pytest.fixture(autouse=True)
def capability_as_before() -> Iterator[None]:
    before = _C.cpu_capability()
    yield
    _C.set_cpu_capability(before)


def results(op: str, seed: int, capability: str) -> list[Tensor]:
    """What a random call writes."""
    _C.set_cpu_capability(capability)
    call = op_calls.random_call(op, Random(seed))
    call.run()
    return [call.tensors[name].double() for name in op_calls.written(op) if name in call.tensors]


@pytest.mark.skipif(not HERE, reason="this CPU has neither AVX-VNNI nor AVX-512")
@pytest.mark.parametrize("op", ops.OP_NAMES)
def test_random_calls_have_the_results_of_avx2(op: str) -> None:
    for seed in range(NUM_CALLS):
        expected = results(op, seed, "avx2")
        for name in HERE:
            got = results(op, seed, name)
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif("avx_vnni" in HERE, reason="this CPU has AVX-VNNI")
def test_it_is_refused_where_the_cpu_lacks_it() -> None:
    with pytest.raises(ValueError, match=r"expected portable.* CPU runs\), got avx_vnni"):
        _C.set_cpu_capability("avx_vnni")
