"""Which pages hold the keys and values of which tokens: a chain of hashes, one for each full page.

A key stands for the tokens of a page and all before them, so that equal keys mean equal keys and
values: every position ran all layers, behind positions that did. That holds where a row's result
does not depend on what runs beside it; how a prompt was cut into chunks, and whether a position was
a prompt's, a token's or an accepted draft's, then changes no bit. Elsewhere there is no cache.

A decoder with an encoder has none either: what its keys and values are depends on the encoder's
input, and its own prompt is one token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import sha256
from itertools import islice, takewhile

from eecore.scheduling.sequence import Sequence

__all__ = ["PrefixCache"]


class PrefixCache:
    """Pages by what they hold, whoever owns them.

    Args:
        page_size: positions a page.
        num_layers: of the model.
    """

    def __init__(self, page_size: int, num_layers: int) -> None:
        self._page_size, self._num_layers = page_size, num_layers
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def __len__(self) -> int:
        return len(self._pages)

    def find(self, sequence: Sequence) -> list[int]:
        """The first pages of what a sequence still has to compute, as far as they will do."""
        most = min(sequence.most_cached, self._exact_positions(sequence))
        return self._known(sequence, most // self._page_size)

    def of(self, sequence: Sequence) -> list[int]:
        """The pages that hold what a sequence has computed, its own or others."""
        return self._known(sequence, min(len(sequence.page_keys), len(sequence.pages)))

    def publish(self, sequence: Sequence, exact: Iterable[int]) -> None:
        """Let others have the full pages that a sequence has computed.

        Args:
            sequence: whose full pages stay as they are from now on.
            exact: its first pages, up to one that is not exact: those behind it attended to that.
        """
        # The end of a text may have cut short what was computed.
        count = min(sequence.num_computed, sequence.num_tokens) // self._page_size
        pages = list(islice(exact, count))
        for key, page in zip(self._chain(sequence, len(pages)), pages, strict=True):
            if self._pages.setdefault(key, page) == page:
                self._keys[page] = key

    def forget(self, page: int) -> None:
        """A page holds nothing any more that anybody may have."""
        key = self._keys.get(page)
        if key is not None:
            self._pages.pop(key, None)
            self._keys.pop(page, None)

    def _exact_positions(self, sequence: Sequence) -> int:
        """Leading positions at which all layers run, or ran before a replay."""
        depths = takewhile(lambda depth: depth == self._num_layers, sequence.kv_exit_layers)
        return sequence.num_prompt_tokens + sum(1 for _ in depths)

    def _known(self, sequence: Sequence, count: int) -> list[int]:
        pages = (self._pages.get(key, -1) for key in self._chain(sequence, count))
        return list(takewhile(lambda page: page >= 0, pages))

    def _chain(self, sequence: Sequence, count: int) -> list[bytes]:
        """Keys of the first pages of a sequence, made once."""
        keys, size = sequence.page_keys, self._page_size
        for index in range(len(keys), count):
            tokens = array("q", sequence.tokens(index * size, (index + 1) * size)).tobytes()
            keys.append(sha256((keys[-1] if keys else b"") + tokens).digest())
        return keys[:count]
