"""The states of texts beside their pages: one for each text that runs, and some of beginnings.

A gated delta rule keeps a state of fixed size for each text, in which the positions so far are
summed up: pages alone are not enough to share a beginning. So the states at some ends of pages are
kept, by the key of the last page in the prefix cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

# Positions, at most, of a chunk or a probe that are not certain at once: a layer keeps the rows of
# some more.
MAX_UNCERTAIN = 64


class StatePool:
    """Hands out the numbers 1..count of states.

    States of beginnings count as free: where a text needs a state, the least recently used one is
    given up.

    Args:
        copy: copies a state, by the numbers of source and target.
    """

    def __init__(self, count: int, copy: Callable[[int, int], None]) -> None:
        self._free = list(range(count, 0, -1))
        self._copy = copy
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        """States of beginnings, by the key of their last page; the last used one at the end."""

    @property
    def num_free(self) -> int:
        """States that no text has."""
        return len(self._free) + len(self._kept)

    def take(self, beginning: bytes | None = None) -> int:
        """A free state, with the contents of a kept one if there is a key; MemoryError, and nothing
        taken, where none is free."""
        if not self.num_free:
            raise MemoryError("expected a free state, got none")
        if beginning is None:
            return self._empty()
        self._kept.move_to_end(beginning)
        source, number = self._kept[beginning], self._empty()
        if number != source:
            self._copy(source, number)
        return number

    def give_back(self, number: int) -> None:
        self._free.append(number)

    def __contains__(self, beginning: bytes) -> bool:
        return beginning in self._kept

    def keep(self, beginning: bytes, number: int) -> None:
        """Keep a copy of a text's state, from which a text with this beginning can go on, unless
        texts have all states."""
        if beginning in self._kept:
            self._kept.move_to_end(beginning)
        elif self.num_free:
            kept = self._empty()
            self._copy(number, kept)
            self._kept[beginning] = kept

    def forget(self) -> None:
        """Give up all beginnings."""
        self._free += self._kept.values()
        self._kept.clear()

    def _empty(self) -> int:
        return self._free.pop() if self._free else self._kept.popitem(last=False)[1]
