"""Greedy drafts by a model's first layers, for texts that another engine decodes.

The other engine shows only the tokens of each text, so a text is recognised by its tokens, which
determine its keys and values. Texts may come, go, change places in the batch and come back; the
next round overwrites the keys and values of rejected drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eecore.errors import ModelError
from eecore.models import AttentionBatch, KVCache, LlamaModel

PAGE_SIZE = 16
CHUNK = 512
"""Tokens of a prompt that go through the layers at once."""
FEW = 16
"""New tokens of a text, at most, that run in one batch with those of other texts."""
Tokens = NDArray[np.int32]


@dataclass(eq=False)
class _Known:
    """The tokens whose keys and values are in the cache, and their place there."""

    tokens: Tokens
    """[max_length], of which ``count`` are known."""
    count: int = 0
    settled: int = 0
    """The number of tokens that were in the text when it was last seen; drafts come after."""
    pages: list[int] = field(default_factory=list)

    def shared(self, text: Tokens) -> int:
        """The number of tokens in common with a text, from the first on."""
        most = min(self.count, len(text))
        differs = self.tokens[:most] != text[:most]
        return int(differs.argmax()) if differs.any() else most


@dataclass
class _Row:
    """A text that drafts in this round."""

    index: int
    text: Tokens
    known: _Known
    most: int
    """The number of drafts that it may have."""
    drafts: list[int] = field(default_factory=list)


class LayerDrafter:
    """Drafts by the first layers of a model, with a KV cache of their own.

    Args:
        model: its first ``exit_layer`` layers draft; on the CPU.
        exit_layer: the number of layers that draft.
        max_length: tokens of a text, at most, its drafts included.
        max_texts: texts of a round, at most. Keys and values of as many texts that have ended stay,
            as long as there is room.
        kv_cache_tokens: tokens of the KV cache; texts beyond it get no drafts.
        threshold: a text's drafts of a round end after a token whose top-2 probability gap is below
            it; None: never for that reason.

    Raises:
        ModelError: the model has gated delta rules, whose states do not go back to where texts
            part.
    """

    def __init__(
        self,
        model: LlamaModel,
        exit_layer: int,
        *,
        max_length: int,
        max_texts: int,
        kv_cache_tokens: int,
        threshold: float | None = None,
    ) -> None:
        if model.config.delta is not None:
            raise ModelError(
                "model: expected layers whose keys can be left out again, got the gated delta "
                f"rules of {model.config.architecture}"
            )
        self._model, self._exit_layer, self._threshold = model, exit_layer, threshold
        self._max_length = min(max_length, model.config.max_position)
        self._max_known = 2 * max_texts
        num_pages = max(1, kv_cache_tokens // PAGE_SIZE)
        self._kv = KVCache.allocate(
            model.config, num_pages, PAGE_SIZE, device=model.device, dtype=model.dtype
        )
        self._free = list(range(num_pages - 1, -1, -1))
        self._known: list[_Known] = []  # the most recently used at the end
        self._places: dict[int, _Known] = {}

    @torch.inference_mode()
    def draft(self, texts: Sequence[Tokens | None], num_drafts: int) -> list[list[int]]:
        """Greedy continuations.

        Args:
            texts: int32 [length] for each place in the batch: the prompt and the certain part of
                the answer; None for no drafts.
            num_drafts: drafts of a text, at most.

        Returns:
            For each place up to ``num_drafts`` tokens. There are none where none are wanted, where
            there is no room, or where the model does not know a token; fewer after a token that
            ends texts, below the threshold or at ``max_length``.
        """
        found: list[list[int]] = [[] for _ in texts]
        rows = self._rows(texts, num_drafts)
        for row in rows:
            found[row.index] = row.drafts
            self._fill(row)
        if rows:
            self._run(rows)
        return found

    # Matching of texts to the cache

    def _rows(self, texts: Sequence[Tokens | None], num_drafts: int) -> list[_Row]:
        """The texts that there is room for, each with its cached tokens."""
        wanted = {
            index: text
            for index, text in enumerate(texts)
            if text is not None and 0 < len(text) < self._max_length and num_drafts > 0
        }
        taken = self._that_go_on(wanted)
        for index, text in wanted.items():
            if index not in taken:
                taken[index] = self._nearest(text, set(map(id, taken.values())))
        claimed = set(map(id, taken.values()))
        idle = [known for known in self._known if id(known) not in claimed]
        self._known = [*idle, *taken.values()]
        rows = []
        for index, known in taken.items():
            text = wanted[index]
            most = min(num_drafts, self._max_length - len(text))
            known.count = min(known.shared(text), len(text) - 1)
            known.settled = known.count
            new = text[known.count :]
            known_tokens = new.min() >= 0 and new.max() < self._model.config.vocab_size
            if known_tokens and self._make_room(known, len(text) + most - 1, idle):
                rows.append(_Row(index, text, known, most))
        while len(self._known) > self._max_known and idle:
            self._forget(idle.pop(0))
        self._places = {row.index: row.known for row in rows}
        return rows

    def _that_go_on(self, wanted: dict[int, Tokens]) -> dict[int, _Known]:
        """The cached tokens of texts that were in the last round, most of them in the same
        places.
        """
        taken: dict[int, _Known] = {}
        free = {id(known): known for known in self._known if known.settled}
        moved = []
        for index, text in wanted.items():
            known = self._places.get(index)
            if known is not None and id(known) in free and known.shared(text) >= known.settled:
                taken[index] = free.pop(id(known))
            else:
                moved.append(index)
        for index in moved:
            text = wanted[index]
            for known in sorted(free.values(), key=lambda each: -each.settled):
                if known.shared(text) >= known.settled:
                    taken[index] = free.pop(id(known))
                    break
        return taken

    def _nearest(self, text: Tokens, claimed: set[int]) -> _Known:
        """The unused cached tokens that share at least a page with a new text, or an empty
        entry.
        """
        idle = [known for known in self._known if id(known) not in claimed]
        best = max(idle, key=lambda known: known.shared(text), default=None)
        if best is not None and best.shared(text) >= PAGE_SIZE:
            return best
        return _Known(np.empty(self._max_length, np.int32))

    def _make_room(self, known: _Known, count: int, idle: list[_Known]) -> bool:
        """Whether there are pages for ``count`` tokens; entries that have been idle longest are
        dropped for them.
        """
        missing = -(-count // PAGE_SIZE) - len(known.pages)
        while missing > len(self._free) and idle:
            self._forget(idle.pop(0))
        if missing > len(self._free):
            return False
        known.pages += [self._free.pop() for _ in range(missing)]
        return True

    def _forget(self, known: _Known) -> None:
        self._known.remove(known)
        self._free += known.pages

    # The layers

    def _fill(self, row: _Row) -> None:
        """Compute keys and values of a long part of a text, without its last token."""
        known, text = row.known, row.text
        if len(text) - known.count > FEW:
            for begin in range(known.count, len(text) - 1, CHUNK):
                end = min(begin + CHUNK, len(text) - 1)
                self._layers([row], [text[begin:end]], [begin])
            known.count = len(text) - 1
        known.tokens[: len(text)] = text

    def _run(self, rows: list[_Row]) -> None:
        """Run the last tokens of all texts together, then draft by draft."""
        news = [row.text[row.known.count :] for row in rows]
        starts = [row.known.count for row in rows]
        for row in rows:
            row.known.count = row.known.settled = len(row.text)
        ends = self._model.config.eos_token_ids
        while True:
            hidden = self._layers(rows, news, starts)
            last = np.cumsum([len(new) for new in news]) - 1
            if len(last) < len(hidden):
                hidden = hidden[torch.from_numpy(last)]
            said = self._model.confidence(hidden)
            going = []
            for row, token, gap in zip(
                rows, said.token.tolist(), said.confidence.tolist(), strict=True
            ):
                if math.isnan(gap):  # a state that is not finite ends the draft
                    continue
                row.drafts.append(token)
                unsure = self._threshold is not None and gap < self._threshold
                if len(row.drafts) < row.most and token not in ends and not unsure:
                    going.append(row)
            if not going:
                return
            rows = going
            starts = [row.known.count for row in rows]
            news = [np.array(row.drafts[-1:], np.int32) for row in rows]
            for row, new in zip(rows, news, strict=True):
                row.known.tokens[row.known.count] = new[0]
                row.known.count += 1

    def _layers(self, rows: list[_Row], news: list[Tokens], starts: list[int]) -> Tensor:
        """The states [num_tokens, hidden_size] of new tokens, from positions ``starts`` on."""
        lengths = [start + len(new) for start, new in zip(starts, news, strict=True)]
        widest = -(-max(lengths) // PAGE_SIZE)
        table = np.zeros((len(rows), widest), np.int32)
        positions, slots = [], []
        for i, (row, start, end) in enumerate(zip(rows, starts, lengths, strict=True)):
            pages = row.known.pages[: -(-end // PAGE_SIZE)]
            table[i, : len(pages)] = pages
            where = np.arange(start, end, dtype=np.int64)
            positions.append(where)
            slots.append(table[i, where // PAGE_SIZE] * np.int64(PAGE_SIZE) + where % PAGE_SIZE)
        queries = np.zeros(len(rows) + 1, np.int32)
        np.cumsum([len(new) for new in news], out=queries[1:])
        batch = AttentionBatch(
            torch.from_numpy(np.concatenate(positions)),
            torch.from_numpy(np.concatenate(slots)),
            torch.from_numpy(table),
            torch.tensor(lengths, dtype=torch.int32),
            torch.from_numpy(queries),
        )
        hidden = self._model.embed(torch.from_numpy(np.concatenate(news).astype(np.int64)))
        return self._model.layers(0, self._exit_layer, hidden, self._kv, batch)
