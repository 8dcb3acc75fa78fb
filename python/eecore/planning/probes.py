"""Probes of a thought: sequences that run over its pages and leave nothing.

A probe closes the thought, writes the beginning of an answer and decodes some tokens, greedily. It
runs in the place of its request, over the same pages, and the request goes on from where it was, so
that a probe takes no pages of its own; a request that loses its pages begins its probe anew. Most
probes are one round: its first drafts are what the probe writes, the others are a guess at the
answer. (Dynasor, Fu et al. 2024; DEER, Yang et al. 2025.)
"""

from __future__ import annotations

import math

from eecore.config import SamplingParams
from eecore.models import Tokenizer
from eecore.planning.draft_state import DraftState
from eecore.planning.proposal import Ahead
from eecore.planning.route import GIVEN, Route
from eecore.planning.row import Outcome
from eecore.planning.thoughts import GuidedThought
from eecore.scheduling.sequence import Sequence, SequenceStatus
from eecore.thought_stop import NUMBER, SENTENCE_END, Probe, ThoughtStop, normalised

RECENT = 64
"""Last tokens of a thought whose last number is a guess at the answer."""


class ThoughtProbes:
    """The probes of one request.

    Args:
        guided: the request's progress through its thought.
        budget: of the request.
        num_layers: the model's.

    Attributes:
        contract: the promise of the rule.
        found: the probes so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        guided: GuidedThought,
        stop: ThoughtStop,
        budget: int | None,
        num_layers: int,
    ) -> None:
        self._tokenizer, self._guided, self._stop = tokenizer, guided, stop
        self.contract = stop.contract
        self._budget, self._num_layers = budget, num_layers
        self._stem = tokenizer.encode(stop.stem, add_special_tokens=False)
        self._sampling = SamplingParams(max_tokens=1 + guided.max_probe, logprobs=0)
        self._last: list[int] | None = None
        """The tokens of the last answer, but for its end; the next probe guesses the same."""
        self.found: list[Probe] = []

    def is_due(self, token_ids: list[int]) -> bool:
        """Whether a probe comes after these tokens."""
        return self._guided.at(token_ids).is_due

    def begin(self, sequence: Sequence) -> Sequence:
        """A probe after the tokens that a request has."""
        assert sequence.draft is not None
        text = [*sequence.prompt_ids, *sequence.output_ids]
        closing = self._guided.closing(self._guided.at(sequence.output_ids))
        forced = [*closing, *self._stem]
        depth = sequence.draft.route.depth
        verifies = depth == self._num_layers  # else a chunk of a prompt reads what is forced
        probe = Sequence(
            request_id=sequence.request_id,
            prompt_ids=text[:-1] if verifies else text + forced,
            sampling=self._sampling,
            exit=sequence.exit,
            arrival=sequence.arrival,
            eos_token_ids=sequence.eos_token_ids,
            status=SequenceStatus.RUNNING,
            output_ids=text[-1:] if verifies else [],
            num_computed=sequence.num_computed,
            pages=sequence.pages,
            state=sequence.state,
            parent=sequence,
        )
        probe.draft, probe.max_drafts = DraftState(Route(sequence.exit, depth)), 0
        if verifies:
            guess = self._guess(sequence) if self._last is None else self._last
            drafts = [*forced, *guess[: self._stop.max_answer - 1]]
            ahead = Ahead(len(text), text[-1], drafts, [1.0] * len(drafts))
            route = Route(sequence.exit, depth, path=GIVEN)
            probe.draft = DraftState(route, ahead=ahead, forced=len(forced))
            probe.max_drafts = self._guided.max_probe - 1
        return probe

    def _guess(self, sequence: Sequence) -> list[int]:
        """The tokens of the thought's last number as an answer; none without a number."""
        numbers = NUMBER.findall(self._tokenizer.decode(sequence.output_ids[-RECENT:]))
        if not numbers:
            return []
        answer = f"{self._stop.stem} {numbers[-1].rstrip('.')}."
        return self._tokenizer.encode(answer, add_special_tokens=False)[len(self._stem) :]

    def learn(self, outcome: Outcome) -> None:
        """Add what an iteration did for the request's probe, and end the thought where it may."""
        probe, counters = outcome.sequence, outcome.counters
        sequence, done = probe.parent, 0
        assert sequence is not None
        if outcome.error is None:
            rows = outcome.num_computed - probe.num_computed
            if rows:  # else this was a loop of a token that is not made yet
                sequence.counters.probe_rows += max(rows, 1 + counters.drafted)
            sequence.counters.layers_run += counters.layers_run + counters.prompt_layers_run
            probe.num_computed = outcome.num_computed
            if probe.max_drafts:  # all before the answer has been read
                assert probe.draft is not None
                forced = probe.draft.forced
                probe.prompt_ids += probe.output_ids + outcome.token_ids[:forced]
                probe.output_ids, outcome.token_ids = [], outcome.token_ids[forced:]
                outcome.logprobs = outcome.logprobs[forced:]
                probe.draft = DraftState(Route(sequence.exit, self._num_layers))
                probe.max_drafts = 0
            probe.output_ids += outcome.token_ids
            probe.logprobs += outcome.logprobs
            done = self._num_whole(probe)
            if not done:
                return
        sequence.probe = None
        self._last = probe.output_ids[: done - 1] if done else None
        place = self._guided.at(sequence.output_ids)
        self.found.append(self._read(probe, done, place.num_thought))
        verdict = self._stop.verdict(self.found, self._budget)
        if verdict is not None:
            self._guided.end(place.num_tokens, verdict)

    def _num_whole(self, probe: Sequence) -> int:
        """The number of tokens with which the answer is whole; 0 where it is not yet."""
        for count, token in enumerate(probe.output_ids, 1):
            text = self._text(probe.output_ids[:count])
            is_whole = token in probe.stop_set or count == self._stop.max_answer
            if is_whole or "\n" in text.lstrip() or SENTENCE_END.search(text):
                return count
        return 0

    def _read(self, probe: Sequence, count: int, num_thought: int) -> Probe:
        """The answer of the first ``count`` tokens; the last one ends it where it has room."""
        answer = normalised(self._text(probe.output_ids[:count]))
        used = probe.logprobs[: count if count == self._stop.max_answer else max(count - 1, 1)]
        mean = math.exp(sum(used) / len(used)) if used else 0.0
        return Probe(num_thought, answer, mean if answer else 0.0)

    def _text(self, token_ids: list[int]) -> str:
        """The text of an answer's tokens after the stem."""
        decode, stem = self._tokenizer.decode, self._stem
        return decode([*stem, *token_ids])[len(decode(stem)) :]
