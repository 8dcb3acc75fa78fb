"""The page allocator of the KV cache: a free list, counts of owners, and which pages are exact."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Set
from itertools import takewhile

from eecore.scheduling.prefix_cache import PrefixCache
from eecore.scheduling.sequence import Sequence
from eecore.scheduling.states import MAX_UNCERTAIN, StatePool


class PageAllocator:
    """Hands out page numbers 0..num_pages-1.

    A page that holds KV filled from an exit state is approximate: it must never be shared between
    requests. Freshly allocated pages count as exact until :meth:`mark_approximate`.

    With a prefix cache a page may have several owners, and keeps its contents when the last owner
    gives it back. It is then free nevertheless: an allocation takes empty pages first, then the
    least recently used ones.

    Args:
        cache: the contents of pages; None: pages are not shared.
        states: the states of texts beside their pages; None: there are none.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        cache: PrefixCache | None = None,
        states: StatePool | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.states = states
        self._cache = cache
        self._free = list(range(num_pages - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Free pages with contents, the most recently used at the end."""
        self._owners: dict[int, int] = {}
        """The number of owners of each page that has any."""
        self._approximate: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages without an owner, whatever they hold."""
        return self.num_pages - len(self._owners)

    @property
    def num_cached(self) -> int:
        """Pages that the next request may share, with an owner or without."""
        return 0 if self._cache is None else len(self._cache)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold ``num_tokens`` positions."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """``count`` pages; MemoryError, and nothing taken, when fewer are free."""
        if count > self.num_pages - len(self._owners):
            raise MemoryError(f"expected {count} free pages, got {self.num_free}")
        pages: list[int] = []
        for _ in range(count):
            pages.append(self._free.pop() if self._free else self._emptied())
        self._owners.update(dict.fromkeys(pages, 1))
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back, once for each owner; ValueError, and nothing freed, for a page that
        is not allocated.
        """
        owners, counts = self._owners, dict[int, int]()
        for page in pages:
            counts[page] = count = counts.get(page, 0) + 1
            if count > owners.get(page, 0):
                raise ValueError(f"page {page} is not allocated")
        kept: list[int] = []
        contents: Set[int] = set() if self._cache is None else self._cache.contents
        for page, count in counts.items():
            if owners[page] > count:
                owners[page] -= count
                continue
            del owners[page]
            self._approximate.discard(page)
            (kept if page in contents else self._free).append(page)
        # A page is of use only with all pages before it: the last one is reused first.
        self._kept.update(dict.fromkeys(reversed(kept)))

    def num_freed_by(self, pages: Iterable[int]) -> int:
        """How many pages become free when these are given back."""
        return sum(count == self._owners[page] for page, count in Counter(pages).items())

    def mark_approximate(self, pages: Iterable[int]) -> None:
        """Remember that these pages hold KV filled from exit states."""
        self._approximate.update(pages)

    def is_exact(self, page: int) -> bool:
        """Whether every layer of every position in the page ran."""
        return page not in self._approximate

    # The contents of pages

    def share(self, sequence: Sequence) -> list[int]:
        """Cached pages of the first positions that a sequence has to compute; it owns them, too."""
        found = [] if self._cache is None else self._cache.find(sequence)
        if found and self.states is not None:
            known, keys = len(found), sequence.page_keys
            while found and keys[len(found) - 1] not in self.states:
                found.pop()
            sequence.keep_at = known * self.page_size if len(found) < known else 0
        for page in found:
            self._owners[page] = self._owners.get(page, 0) + 1
            self._kept.pop(page, None)
        return found

    def publish(self, sequence: Sequence, *, after_chunk: bool = False) -> None:
        """Let other sequences share what a sequence has computed, as far as it is exact.

        Args:
            sequence: a sequence.
            after_chunk: whether the last positions were a chunk of its prompt.
        """
        if self._cache is None:
            return
        exact = list(takewhile(self.is_exact, sequence.pages))
        self._cache.publish(sequence, exact)
        at = sequence.num_computed
        count, rest = divmod(at, self.page_size)
        is_end = at in (sequence.keep_at, sequence.prefill_target, sequence.num_prompt_tokens)
        is_there = after_chunk and is_end and rest <= MAX_UNCERTAIN
        if self.states is not None and is_there and 0 < count <= len(exact):
            self.states.keep(sequence.page_keys[count - 1], sequence.state)

    def begin_state(self, sequence: Sequence, num_cached: int) -> None:
        """Give a sequence a state, that of its cached pages if there are any."""
        if self.states is not None:
            beginning = sequence.page_keys[num_cached - 1] if num_cached else None
            sequence.state = self.states.take(beginning)

    def release(self, sequence: Sequence) -> None:
        """Take all pages from a sequence."""
        self.free([*sequence.pages, *sequence.input_pages])
        if self.states is not None and sequence.state:
            self.states.give_back(sequence.state)
            sequence.state = 0
        if self._cache is not None:
            # Pages of other sequences with the same contents count as used as well.
            for page in reversed(self._cache.of(sequence)):
                if page in self._kept:
                    self._kept.move_to_end(page)

    def forget(self, pages: Iterable[int]) -> None:
        """Let no further sequence share the contents of these pages."""
        for page in pages:
            if self._cache is not None:
                self._cache.forget(page)
            if page in self._kept:
                del self._kept[page]
                self._free.append(page)

    def reset(self) -> None:
        """Forget the contents of pages without an owner, and the states of beginnings."""
        self.forget(list(self._kept))
        if self.states is not None:
            self.states.forget()

    def _emptied(self) -> int:
        """The least recently used free page, whose contents are forgotten."""
        page = next(iter(self._kept))
        assert self._cache is not None
        self._cache.forget(page)
        del self._kept[page]
        return page
