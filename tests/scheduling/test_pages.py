"""The page allocator: nothing is handed out twice, nothing is freed twice."""

from __future__ import annotations

import pytest

from eecore.scheduling.pages import PageAllocator


def test_pages_are_handed_out_once() -> None:
    pages = PageAllocator(5, 4)
    got = pages.allocate(2) + pages.allocate(3)
    assert sorted(got) == [0, 1, 2, 3, 4]
    assert pages.num_free == 0
    pages.free(got[:2])
    assert sorted(pages.allocate(2)) == sorted(got[:2])


def test_too_many_takes_nothing() -> None:
    pages = PageAllocator(3, 4)
    pages.allocate(1)
    with pytest.raises(MemoryError, match="expected 3 free pages, got 2"):
        pages.allocate(3)
    assert pages.num_free == 2
    assert pages.allocate(0) == []


def test_double_free_is_an_error() -> None:
    pages = PageAllocator(3, 4)
    (page,) = pages.allocate(1)
    pages.free([page])
    with pytest.raises(ValueError, match=f"page {page} is not allocated"):
        pages.free([page])
    with pytest.raises(ValueError, match="page 7 is not allocated"):
        pages.free([7])
    assert pages.num_free == 3


def test_a_bad_free_frees_nothing() -> None:
    pages = PageAllocator(3, 4)
    got = pages.allocate(2)
    with pytest.raises(ValueError, match="is not allocated"):
        pages.free([got[0], got[1], got[0]])
    assert pages.num_free == 1
    pages.free(got)
    assert pages.num_free == 3


@pytest.mark.parametrize(("num_tokens", "count"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pages_for(num_tokens: int, count: int) -> None:
    assert PageAllocator(3, 4).pages_for(num_tokens) == count


def test_exactness_belongs_to_the_owner_of_a_page() -> None:
    pages = PageAllocator(2, 4)
    one, other = pages.allocate(2)
    pages.mark_approximate([one])
    assert (pages.is_exact(one), pages.is_exact(other)) == (False, True)
    pages.free([one])
    assert pages.allocate(1) == [one]
    assert pages.is_exact(one)
