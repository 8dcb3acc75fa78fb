"""Weights, and a cache but for its beginning, lie in pages of 2 MiB where the system has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import eecore
from eecore import ops
from eecore.models import KVCache
from eecore.models.weights import NewWeights

SMAPS = Path("/proc/self/smaps")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_at(address: int) -> list[str]:
    """The flags of the mapping that holds an address, as Linux names them."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is not None:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@pytest.mark.skipif(not (SMAPS.exists() and HUGE_PAGES.exists()), reason="no pages of 2 MiB here")
def test_large_weights_ask_for_huge_pages() -> None:
    made = NewWeights("cpu", torch.float32).tensor(4, 1024, 1024)
    assert "hg" in flags_at(made.data_ptr() + made.nbytes // 2)


def test_small_and_absent_memory_is_left_as_it_is() -> None:
    for size in (0, 1, 1000):
        memory = torch.full((size,), 3.0)
        assert ops.in_huge_pages(memory) is memory
        assert torch.equal(memory, torch.full((size,), 3.0))
    assert NewWeights("meta", torch.float32).tensor(4096, 4096).device.type == "meta"


@pytest.mark.skipif(not (SMAPS.exists() and HUGE_PAGES.exists()), reason="no pages of 2 MiB here")
def test_the_first_pages_of_each_layer_of_a_cache_are_small(tiny_directory: Path) -> None:
    config = eecore.load(tiny_directory, device="cpu").config
    num_pages = (1 << 24) // (16 * config.kv_size * 4)
    kv = KVCache.allocate(config, num_pages, 16, device=torch.device("cpu"), dtype=torch.float32)
    for cache in (kv.k, kv.v):
        for layer in cache:
            assert "hg" not in flags_at(layer.data_ptr())
            assert "hg" in flags_at(layer.data_ptr() + layer.nbytes // 2)
