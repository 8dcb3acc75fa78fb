"""Random caches in pages, whose unused slots hold NaN and unused pages' numbers garbage."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from random_calls import Arguments, Maker


def starts(counts: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)


def random_pages(m: Maker, lengths: list[int], page_size: int) -> tuple[int, Tensor]:
    """How many pages there are, and a page table with garbage after the pages in use."""
    counts = [-(-length // page_size) for length in lengths]
    total, widest = sum(counts) + 2, max(counts, default=0) + m.size(3, 1)
    table = torch.full((len(lengths), widest), 2**31 - 1, dtype=torch.int32)
    free = iter(m.shuffled(total).tolist())
    for row, count in zip(table, counts, strict=True):
        row[:count] = torch.tensor([next(free) for _ in range(count)], dtype=torch.int32)
    return total, table


def places_of_keys(lengths: list[int], table: Tensor, page_size: int) -> Iterator[tuple[int, int]]:
    """Page and offset of every key."""
    for row, length in zip(table.tolist(), lengths, strict=True):
        for key in range(length):
            yield row[key // page_size], key % page_size


def fill_keys(m: Maker, cache: Tensor, keys: list[tuple[int, int]]) -> None:
    """Random keys [..., num_pages, page_size, num_kv_heads, head_dim] at pages and offsets."""
    if keys:
        pages, offsets = (torch.tensor(each) for each in zip(*keys, strict=True))
        layers = cache.shape[:-4]
        values = m.normal(*layers, len(keys), *cache.shape[-2:]).to(cache.dtype)
        cache[(..., pages, offsets, slice(None), slice(None))] = values


def random_caches(
    m: Maker, lengths: list[int], page_size: int, shape: tuple[int, int], dtype: torch.dtype
) -> Arguments:
    """Caches whose unused slots hold NaN, and their page table."""
    total, table = random_pages(m, lengths, page_size)
    caches = m.caches(total, page_size, *shape, dtype=dtype)
    for cache in caches:
        fill_keys(m, cache, list(places_of_keys(lengths, table, page_size)))
    return {"k_cache": caches[0], "v_cache": caches[1], "page_table": m.placed(table, 1)}
