"""The page allocator of the KV cache: a free list, owners counted, exactness remembered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

__all__ = ["PageAllocator"]


class PageAllocator:
    """Hands out page numbers 0..num_pages-1.

    A page that holds KV filled from an exit state is approximate: it must never be shared between
    requests. Freshly allocated pages count as exact until :meth:`mark_approximate`.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(
                f"expected num_pages >= 1 and page_size >= 1, got {num_pages} and {page_size}"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._used: set[int] = set()
        self._approximate: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold ``num_tokens`` positions."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """``count`` pages; MemoryError, and nothing taken, when fewer are free."""
        if count > len(self._free):
            raise MemoryError(f"expected {count} free pages, got {len(self._free)}")
        pages = [self._free.pop() for _ in range(count)]
        self._used.update(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back; ValueError, and nothing freed, for one that is not out."""
        given = list(pages)
        for page, count in Counter(given).items():
            if page not in self._used or count > 1:
                raise ValueError(f"page {page} is not allocated")
        self._used.difference_update(given)
        self._approximate.difference_update(given)
        self._free += given

    def hold(self, pages: Iterable[int]) -> None:
        """Count these pages as given out, and no others: what their owners say is the truth."""
        held = set(pages)
        self._free = [page for page in range(self.num_pages - 1, -1, -1) if page not in held]
        self._approximate &= held
        self._used = held

    def mark_approximate(self, pages: Iterable[int]) -> None:
        """Remember that these pages hold KV filled from exit states."""
        self._approximate.update(pages)

    def is_exact(self, page: int) -> bool:
        """Whether every layer of every position in the page ran."""
        return page not in self._approximate
