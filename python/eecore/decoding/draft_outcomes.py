"""The outcomes of rounds: accepted tokens and their records, from the results of a program."""

from __future__ import annotations

from math import isnan

from eecore.decoding.draft_kind import DraftKind
from eecore.decoding.head_drafts import drafted_ahead
from eecore.decoding.heads import Logits
from eecore.decoding.memory import Cells, numbers_of
from eecore.decoding.sampling import NO_TOKEN, top_logprobs
from eecore.errors import NotFiniteError
from eecore.planning.row import Outcome, Row
from eecore.scheduling.sequence import Counters, Sequence, TokenRecord


class DraftOutcomes:
    """Makes the outcomes of one program's rounds."""

    logits: Logits | None = None
    """Logits of the verified tokens of the last run, if some rows need them."""

    def __init__(self, kind: DraftKind, num_layers: int) -> None:
        self._path, self._num_layers = kind.path, num_layers
        self._draft_layers = kind.path.layers_run - kind.path.shared_layers
        self._drafts_ahead = kind.drafts_ahead

    def of(self, row: Row, i: int, got: Cells) -> Outcome:
        """The accepted part of a round; no token follows an accepted end of the text."""
        sequence, num_layers = row.work.sequence, self._num_layers
        drafted, accepted, tokens = got["num_drafted"][i], got["num_accepted"][i], got["tokens"]
        emitted = [tokens[i, k] for k in range(1, accepted + 1)]
        if not 0 < drafted == accepted or not sequence.stops_at(tokens[i, drafted]):
            emitted.append(got["next_token"][i])
        records = self._records(sequence, emitted, accepted, i, got)
        good = len(records)
        if not good:
            return Outcome(sequence, sequence.num_computed, error=NotFiniteError(NO_TOKEN))
        is_cut = good < len(emitted)
        emitted, accepted = emitted[:good], min(accepted, good)
        # Drafted positions run through the layers that they share with the draft once.
        runs = drafted * self._draft_layers + (drafted + 1) * num_layers
        outcome = Outcome(
            sequence,
            sequence.num_computed + good,
            records,
            [num_layers] * good,
            Counters(layers_run=runs, drafted=drafted, accepted=accepted),
            is_cut=is_cut,
        )
        if self._drafts_ahead and not is_cut:
            outcome.ahead = drafted_ahead(row, i, emitted, got)
        if row.route.adaptive:
            outcome.draft_stop = sequence.draft.stop.after(drafted, accepted, sequence.max_drafts)
        return outcome

    def _records(
        self, sequence: Sequence, emitted: list[int], accepted: int, i: int, got: Cells
    ) -> list[TokenRecord]:
        """Records of the tokens up to the first whose logits or confidence are NaN."""
        path, num_layers = self._path, self._num_layers
        start, gaps, logprobs = got["query_start_loc"][i], got["gap"], got["logprob"]
        is_asked = sequence.sampling.logprobs is not None
        records: list[TokenRecord] = []
        for k, token in enumerate(emitted):
            at, is_draft = start + k, k < accepted
            if token < 0 or isnan(logprobs[at]):
                break
            confidence = gaps[at]
            if is_draft and not path.is_given:
                confidence = got["draft_confidences"][i, k]
                if isnan(confidence):
                    break
            logprob, best = self._logprobs(sequence, token, at, got) if is_asked else (None, None)
            layer = path.num_layers if is_draft else num_layers
            records.append(TokenRecord(token, layer, confidence, logprob, best))
        return records

    def _logprobs(
        self, sequence: Sequence, token: int, at: int, got: Cells
    ) -> tuple[float | None, dict[int, float] | None]:
        """Log-probabilities of an emitted token, as far as the request asked for them."""
        logprob = got["logprob"][at]
        if token != got["token"][at]:  # a sampled draft, or drawn after a rejection
            assert self.logits is not None
            logprob = self.logits.of(at, token) - got["logsumexp"][at]
        ids, values = numbers_of(got, "top_ids", at), numbers_of(got, "top_logprobs", at)
        return top_logprobs(sequence.sampling.logprobs, logprob, ids, values)
