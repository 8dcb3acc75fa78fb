"""Probes of a thought: sequences that run over its pages and leave nothing.

A probe closes the thought, writes the beginning of an answer and decodes some tokens, greedily. It
runs in the place of its request, over the same pages, and the request goes on from where it was, so
that a probe takes no pages of its own; a request that loses its pages begins its probe anew.
(Dynasor, Fu et al. 2024; DEER, Yang et al. 2025.)
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
from eecore.scheduling.sequence import Sequence
from eecore.thought_stop import SENTENCE_END, Probe, ThoughtStop, normalised


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
        self._sampling = SamplingParams(max_tokens=stop.max_answer, logprobs=0)
        self._last: list[int] = []
        """The tokens of the last answer, which the next probe verifies as drafts."""
        self.found: list[Probe] = []

    @property
    def most_tokens(self) -> int:
        """Tokens of a probe at most, after those that close the thought, with its drafts."""
        return len(self._stem) + 2 * self._stop.max_answer

    def is_due(self, token_ids: list[int]) -> bool:
        """Whether a probe comes after these tokens."""
        return self._guided.at(token_ids).is_due

    def begin(self, sequence: Sequence) -> Sequence:
        """A probe after the tokens that a request has."""
        assert sequence.draft is not None
        closing = self._guided.closing(self._guided.at(sequence.output_ids))
        prompt_ids = [*sequence.prompt_ids, *sequence.output_ids, *closing, *self._stem]
        probe = Sequence(
            request_id=sequence.request_id,
            prompt_ids=prompt_ids,
            sampling=self._sampling,
            exit=sequence.exit,
            arrival=sequence.arrival,
            eos_token_ids=sequence.eos_token_ids,
            parent=sequence,
        )
        depth, last = sequence.draft.route.depth, self._last
        verifies = len(last) > 1 and depth == self._num_layers
        path = GIVEN if verifies else None
        probe.draft = DraftState(Route(sequence.exit, depth, path=path))
        probe.max_drafts = len(last) - 1 if verifies else 0
        if verifies:
            ones = [1.0] * probe.max_drafts
            probe.draft.ahead = Ahead(len(prompt_ids) + 1, last[0], last[1:], ones)
        return probe

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
            probe.output_ids += outcome.token_ids
            probe.logprobs += outcome.logprobs
            done = self._num_whole(probe)
            if not done:
                return
        sequence.probe, self._last = None, probe.output_ids[:done]
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
