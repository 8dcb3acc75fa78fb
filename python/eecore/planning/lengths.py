"""How long texts get, learnt as they end: how likely one that has got so far goes on.

A life table (Kaplan & Meier 1958): of each span of positions, the tokens that were written there
and the texts that ended there. Short answers end in the midst of a round of drafts, and what would
stand behind their end is worth nothing.
"""

from __future__ import annotations

__all__ = ["TextLengths"]

# Tokens that each span is taken to have had, and no end among them, before any text is known. What
# texts before count beside a new one in the same span.
PRIOR_TOKENS, OLDER_TEXTS = 16.0, 0.98
# Texts at most of which nobody has asked, and expectations that are kept.
MOST_NEW, MOST_KEPT = 128, 256


class TextLengths:
    """Of the requests of one model; texts of late count more."""

    def __init__(self) -> None:
        self._new: list[tuple[int, bool]] = []  # texts that nobody has asked about yet
        self._known: dict[int, list[float]] = {}  # tokens and ends, by span
        self._kept: dict[tuple[int, int], list[float]] = {}

    def add(self, tokens: int, *, ends: bool) -> None:
        """One more text.

        Args:
            tokens: that it has, with the one that ended it.
            ends: whether it came to its end; it was cut otherwise.
        """
        if len(self._new) >= MOST_NEW:
            del self._new[0]
        self._new.append((tokens, ends))

    def _count(self, tokens: int, ends: bool) -> None:
        first = 1
        while first <= tokens:
            span = span_of(first)
            behind = _behind(span)
            known = self._known.setdefault(span, [0.0, 0.0])
            is_last = behind > tokens
            known[0] = OLDER_TEXTS * known[0] + min(behind, tokens + 1) - first
            known[1] = OLDER_TEXTS * known[1] + (ends and is_last)
            first = behind

    def go_on(self, written: int, most: int) -> list[float]:
        """How likely a text of ``written`` tokens that has not ended has one more, two more, ...,
        ``most`` more; it has one.
        """
        if self._new:
            for tokens, ends in self._new:
                self._count(tokens, ends)
            self._new.clear()
            self._kept.clear()
        key = written, most
        found = self._kept.get(key)
        if found is None:
            chance, found = 1.0, []
            for position in range(written + 1, written + most + 1):
                found.append(chance)
                known = self._known.get(span_of(position))
                if known is not None:
                    chance *= 1.0 - known[1] / (known[0] + PRIOR_TOKENS)
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[key] = found
        return found


def span_of(position: int) -> int:
    """Positions from 1 on: 1, 2, 3, 4 and 5, 6 and 7, 8 to 11, 12 to 15, ..."""
    bits = position.bit_length()
    return 2 * bits + (position >> (bits - 2) & 1 if bits > 1 else 0)


def _behind(span: int) -> int:
    """The first position behind it."""
    bits, half = divmod(span, 2)
    return 2 if bits == 1 else (3 + half) << (bits - 2)
