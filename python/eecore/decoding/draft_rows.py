"""The rows of rounds in the memory of their program: what the host writes between rounds."""

from __future__ import annotations

from operator import is_not

import numpy as np

from eecore.decoding.draft_kind import DraftKind, given_fields, result_fields
from eecore.decoding.head_drafts import AheadDrafting, HeadKeys
from eecore.decoding.step import Step
from eecore.models import KVCache, Network
from eecore.planning.row import Row
from eecore.scheduling.scheduler import Work
from eecore.scheduling.sequence import Sequence


class DraftRows(Step):
    """Memory for the rounds of up to ``sizes.num_rows`` sequences; the rows after them are padding.

    Attributes:
        kind: the key of the program.
        rows: the rows that were loaded last.
    """

    _keys: HeadKeys | None = None
    """Writes the keys of a draft head that has layers of its own."""
    _ahead: AheadDrafting | None = None
    """Drafts for the next round, where a draft head does."""

    def __init__(self, model: Network, kv: KVCache, kind: DraftKind) -> None:
        self.kind = kind
        super().__init__(model, kv, kind.sizes, given_fields(kind), result_fields(kind))
        self.rows: list[Row] = []
        self._sequences: list[Sequence] = []
        self._adapts = False  # whether some row's threshold follows its acceptance rate
        self._scores = False  # whether some row that draws drafts asks for log-probabilities

    def fits(self, rows: list[Row]) -> bool:
        """Whether these rows are the rows that were loaded last, and need this program again."""
        if rows[0].route.path is not self.kind.path:
            return False
        sequences = [row.work.sequence for row in rows]
        if self._sequences != sequences:
            return False
        num_pages = self.sizes.num_pages
        most = num_pages * self._page_size - self.kind.num_steps
        drafts_ahead, changes = False, self._reads_text
        for row, sequence in zip(rows, sequences, strict=True):
            changes = changes or sequence.is_masked
            drafts_ahead = drafts_ahead or row.ahead > 0
            if row.work.max_drafts > self.kind.num_steps or len(sequence.pages) > num_pages:
                return False
            if len(sequence.prompt_ids) + len(sequence.output_ids) + row.pending > most:
                return False
        if changes and not self._heads_fit(sequences):
            return False
        return drafts_ahead == (self.kind.most_ahead > 0)

    def load(self, rows: list[Row]) -> None:
        """Load the rows of the next round: at most ``sizes.num_rows`` sequences."""
        sequences, places = list[Sequence](), list[int | None]()
        for row in rows:
            sequences.append(row.work.sequence)
            places.append(row.follows)
        changes = self._reads_text
        if self.sizes.follows:
            # Penalties alone depend on the text of a row that continues after a run in flight.
            changes = changes and (None in places or self._counts)
            changes = changes or places != [row.follows for row in self.rows]
        if changes or self._sequences != sequences:
            self._fixed = object()
        self._write(rows, sequences)

    def follow(self, works: list[Work]) -> bool:
        """Load the rows of the run in flight again, each to continue after its tokens there.

        Returns:
            False, without any effect, where the requests are not the same, or no longer fit.
        """
        sequences = [work.sequence for work in works]
        if not self.sizes.follows or self._sequences != sequences:
            return False
        for work in works:
            if len(work.sequence.pages) > self.sizes.num_pages:
                return False
        if self._counts and not self._heads_fit(sequences):
            return False
        rows = self._followers(self.rows)
        if any(map(is_not, [row.work for row in rows], works)):
            rows = [row._replace(work=work) for row, work in zip(rows, works, strict=True)]
        self._write(rows, sequences)
        return True

    def _write(self, rows: list[Row], sequences: list[Sequence]) -> None:
        """Write all fields of a round, and send them."""
        self.rows, self._sequences = [], []  # until all is written
        self._host = host = self._given.host()
        if host.holds is not self._fixed:
            self._write_fixed(rows, sequences)
        elif self._adapts:
            host.write(thresholds=_thresholds(rows))
        self._write_state(rows)
        pages = [sequence.pages for sequence in sequences]
        states = [s.state_at for s in sequences] if self.sizes.has_states else None
        for prefix in ("", "open_"):
            host.write_pages(f"{prefix}page_table", pages, states)
            if self.sizes.num_input_pages:
                self._write_inputs(sequences, prefix)
        self.send()
        self.rows, self._sequences = rows, sequences

    def _write_fixed(self, rows: list[Row], sequences: list[Sequence]) -> None:
        """Write the columns that do not change from round to round of the same rows."""
        self._host.holds = None
        self._adapts = any(row.route.adaptive for row in rows)
        asked = [s.sampling for s in sequences if s.sampling.logprobs is not None]
        self._scores = self.kind.samples and any(s.temperature > 0.0 for s in asked)
        self._write_rows(rows)
        padding = [False] * (self.sizes.num_rows - len(rows))
        self._host.write(
            thresholds=_thresholds(rows),
            sampled=[s.sampling.temperature > 0.0 for s in sequences] + padding,
        )
        stops = self._host.arrays["stop_tokens"]
        stops[:] = -1
        for i, sequence in enumerate(sequences):
            stops[i, : len(sequence.stop_ids)] = sequence.stop_ids
        self._host.holds = self._fixed

    def _write_state(self, rows: list[Row]) -> None:
        """Write the position and the given drafts of each row."""
        cells, states = self._host.cells, []
        for i, row in enumerate(rows):
            work, sequence, drafts = row.work, row.work.sequence, row.drafts
            output, most = sequence.output_ids, sequence.sampling.max_tokens
            where = output[-1], len(sequence.prompt_ids) + len(output) - 1, most - len(output)
            num_ahead = row.ahead if self._keys is None else self._num_ahead(row, self._ahead)
            # A head's drafts after a run in flight are on the device.
            count = -1 if row.ahead and row.follows is not None else len(drafts)
            states.append((*where, work.max_drafts, count, num_ahead))
            for k, token in enumerate(drafts):
                cells["drafts"][i, k] = token
            if self._ahead is not None:
                for k, threshold in enumerate(row.ahead_thresholds):
                    cells["ahead_thresholds"][k, i] = threshold
        states += [(0, 0, 0, -1, 0, -1)] * (self.sizes.num_rows - len(rows))
        tokens, starts, left, max_drafts, num_given, ahead = zip(*states, strict=True)
        columns = {
            "num_active": (len(rows),),
            "token_ids": tokens,
            "start": starts,
            "tokens_left": left,
            "max_drafts": max_drafts,
        }
        if self.kind.path.is_given:
            columns["num_given"] = num_given
        if self._ahead is not None:
            columns |= {"ahead": ahead, "num_ahead": (len(rows),)}
        self._host.write_whole(**columns)

    def _num_ahead(self, row: Row, head: AheadDrafting | None) -> int:
        """Number of drafts that a head with keys of its own may make, by the slots for them."""
        if head is None:
            return 0
        verified = len(row.drafts) if row.follows is None else row.work.max_drafts
        # The key of the first draft is at the last verified position, or before it.
        sequence = row.sequence
        last = min(row.position + verified, sequence.num_tokens + sequence.tokens_left - 2)
        return head.within(row.ahead, len(sequence.pages) * self._page_size - last)


def _thresholds(rows: list[Row]) -> list[float]:
    """For each row the smallest float32 not below its threshold: the same float32 numbers reach
    both; -1 without one.
    """
    found = []
    for row in rows:
        threshold = row.route.draft_threshold
        if row.route.adaptive:
            draft = row.work.sequence.draft
            assert draft is not None
            stop = draft.stop
            assert stop is not None
            threshold = stop.before if row.follows is None else stop.threshold
        found.append(-1.0 if threshold is None else threshold)
    exact = np.array(found)
    rounded = exact.astype(np.float32)
    is_below = rounded < exact
    rounded[is_below] = np.nextafter(rounded[is_below], np.float32(np.inf))
    return rounded.tolist()  # type: ignore[no-any-return]
