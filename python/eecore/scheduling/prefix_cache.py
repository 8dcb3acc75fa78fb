"""The prefix cache: which full page holds the keys and values of which tokens, by chained hashes.

The hash of a page covers its tokens and all tokens before them. Equal hashes mean equal keys and
values, since every position of such a page, and every position before it, ran all layers. This
holds where a row's result does not depend on the other rows of its batch: then it changes no bit
how a prompt was cut into chunks, or whether a position belonged to a prompt, a generated token or
an accepted draft. Elsewhere there is no cache.

A decoder with an encoder has no cache either: its keys and values depend on the encoder's input,
and its own prompt is one token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Set
from hashlib import sha256
from itertools import islice, takewhile

from eecore.scheduling.sequence import Sequence


class PrefixCache:
    """Pages by their contents, whichever sequences own them."""

    def __init__(self, page_size: int, num_layers: int) -> None:
        self._page_size, self._num_layers = page_size, num_layers
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    @property
    def contents(self) -> Set[int]:
        """The pages with contents."""
        return self._keys.keys()

    def __len__(self) -> int:
        return len(self._pages)

    def find(self, sequence: Sequence) -> list[int]:
        """The cached pages that a sequence can use for the first positions it has to compute."""
        most = min(sequence.max_cached, self._exact_positions(sequence))
        return self._known(sequence, most // self._page_size)

    def of(self, sequence: Sequence) -> list[int]:
        """The cached pages that hold what a sequence has computed, its own or another's."""
        return self._known(sequence, min(len(sequence.page_keys), len(sequence.pages)))

    def publish(self, sequence: Sequence, exact: Iterable[int]) -> None:
        """Let other sequences share the full pages that a sequence has computed.

        Args:
            sequence: a sequence whose full pages stay as they are from now on.
            exact: its first pages, up to one that is not exact: pages after that one attended to
                it.
        """
        # The text may end before the last computed position.
        count = min(sequence.num_computed, sequence.num_tokens) // self._page_size
        pages = list(islice(exact, count))
        for key, page in zip(self._chain(sequence, len(pages)), pages, strict=True):
            if self._pages.setdefault(key, page) == page:
                self._keys[page] = key

    def forget(self, page: int) -> None:
        """Remove a page: its contents are shared no more."""
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
        """Keys of the first pages of a sequence, each made once."""
        keys, size = sequence.page_keys, self._page_size
        for index in range(len(keys), count):
            tokens = array("q", sequence.tokens(index * size, (index + 1) * size)).tobytes()
            keys.append(sha256((keys[-1] if keys else b"") + tokens).digest())
        return keys[:count]
