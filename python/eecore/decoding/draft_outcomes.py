"""The outcomes of rounds: accepted tokens and their scores, from the results of a program."""

from __future__ import annotations

from math import isnan

from eecore.decoding.draft_kind import DraftKind
from eecore.decoding.head_drafts import add_drafts
from eecore.decoding.memory import Cells
from eecore.decoding.sampling import NO_TOKEN, add_logprobs, needs_logits
from eecore.errors import NotFiniteError
from eecore.planning.row import Outcome, Row
from eecore.scheduling.sequence import Counters, Sequence


class DraftOutcomes:
    """Makes the outcomes of one program's rounds."""

    def __init__(self, kind: DraftKind, num_layers: int) -> None:
        self._path, self._num_layers = kind.path, num_layers
        self._draft_layers = kind.path.layers_run - kind.path.shared_layers
        self._drafts_ahead = kind.drafts_ahead
        self._counters: dict[tuple[int, int], Counters] = {}  # by drafted and accepted drafts

    def of(self, rows: list[tuple[int, Row]], got: Cells) -> list[Outcome]:
        """The accepted parts of some rows' rounds; no token follows an accepted end of a text."""
        path, num_layers, is_given = self._path, self._num_layers, self._path.is_given
        all_tokens, outcomes, heads = got["tokens"].tolist(), [], list[tuple[int, Outcome]]()
        drafts_confidences = None if is_given else got["draft_confidences"].tolist()
        for i, row in rows:
            sequence, tokens = row.work.sequence, all_tokens[i]
            drafted, accepted = got["num_drafted"][i], got["num_accepted"][i]
            start, following = got["query_start_loc"][i], got["next_token"][i]
            assert sequence.draft is not None
            forced = sequence.draft.forced
            if forced:
                made, accepted = got["token"][start : start + drafted + 1].tolist(), forced
                while accepted < drafted and tokens[accepted + 1] == made[accepted]:
                    accepted += 1
                following = made[accepted]
            emitted = tokens[1 : accepted + 1]
            if not 0 < drafted == accepted or tokens[drafted] not in sequence.stop_set:
                emitted.append(following)
            stop = start + len(emitted)
            confidences, logprobs = got["gap"][start:stop].tolist(), got["logprob"][start:stop]
            if drafts_confidences is not None:
                confidences[:accepted] = drafts_confidences[i][:accepted]
            good = 0  # tokens up to the first whose logits or confidence are NaN
            for token, confidence, logprob in zip(emitted, confidences, logprobs, strict=True):
                is_made = not is_given and good < accepted
                if token < 0 or isnan(logprob) or (is_made and isnan(confidence)):
                    break
                good += 1
            if good <= forced:
                error = NotFiniteError(NO_TOKEN)
                outcomes.append(Outcome(sequence, sequence.num_computed, error=error))
                continue
            is_cut = good < len(emitted)
            if is_cut:
                accepted = min(accepted, good)
                del emitted[good:], confidences[good:]
            counters = self._counters.get((drafted, accepted))
            if counters is None:
                # Drafted positions run through the layers that they share with the draft once.
                runs = drafted * self._draft_layers + (drafted + 1) * num_layers
                counters = Counters(layers_run=runs, drafted=drafted, accepted=accepted)
                self._counters[drafted, accepted] = counters
            outcome = Outcome(
                sequence,
                sequence.num_computed + good,
                emitted,
                [path.num_layers] * accepted + [num_layers] * (good - accepted),
                confidences,
                [num_layers] * good,
                counters,
                is_cut=is_cut,
            )
            if sequence.sampling.logprobs is not None:
                for at in range(start, start + good):
                    add_logprobs(outcome, got, at)
            if forced:
                outcome.of_parent = self._of_parent(sequence, got, start)
            if row.ahead and not is_cut:
                heads.append((i, outcome))
            if row.route.adaptive:
                draft = sequence.draft
                assert draft is not None
                assert draft.stop is not None
                outcome.draft_stop = draft.stop.after(drafted, accepted, sequence.max_drafts)
            outcomes.append(outcome)
        if heads and self._drafts_ahead:
            add_drafts(heads, got)
        return outcomes

    def _of_parent(self, probe: Sequence, got: Cells, start: int) -> Outcome | None:
        """The next token of the request that a probe belongs to, from the row of its last token;
        None where the request chooses it in another way than probes do.
        """
        parent, depth = probe.parent, self._num_layers
        assert parent is not None
        assert parent.draft is not None
        if parent.draft.route.points or needs_logits(parent):
            return None
        token, confidence = got["token"][start], got["gap"][start]
        outcome = Outcome(parent, parent.num_computed + 1, [token], [depth], [confidence], [depth])
        if parent.sampling.logprobs is not None:
            add_logprobs(outcome, got, start)
        return outcome
