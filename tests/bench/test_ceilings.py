"""The peaks of the machine, which shares in tables are of."""

from __future__ import annotations

import pytest

import cases
from bench.harness.ceilings import describe_ceilings
from eecore import _C


@pytest.mark.parametrize("numbers", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("capability", cases.cpu_capabilities())
def test_every_capability_has_a_peak(capability: str, numbers: str) -> None:
    before = _C.cpu_capability()
    _C.set_cpu_capability(capability)
    try:
        assert _C.multiply_rate(numbers, 10) > 0
    finally:
        _C.set_cpu_capability(before)


def test_other_numbers_have_no_peak() -> None:
    with pytest.raises(ValueError, match="numbers: expected float32, bfloat16 or int8, got int4"):
        _C.multiply_rate("int4", 10)


def test_peaks_are_given_for_a_thread() -> None:
    measured = {"dram_read": 2e9, "l3_read": 4e9, "int8_multiply": 6e9}
    assert "2.0 GB/s, L3 read 4.0 GB/s" in describe_ceilings(measured, 2)
    assert describe_ceilings(measured, 2).endswith("3 in int8")
