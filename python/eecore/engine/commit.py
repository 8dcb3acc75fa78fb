"""The outcomes of an iteration are committed to the requests.

Steps that a request can make fail, such as decoding its text, run before any state changes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as Ordered
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from eecore.engine.faults import described
from eecore.engine.text import Decoded, Piece, TextStream
from eecore.output import Output, PromptLogprob, RequestStats, StepOutput
from eecore.planning.draft_state import route_of
from eecore.planning.row import Outcome
from eecore.scheduling.scheduler import Scheduler
from eecore.scheduling.sequence import Sequence, TokenRecord

TIMED = 0.5
"""Share of a request's tokens, without the first, that timed rounds must have given for the output
to say what full depth would have taken.
"""


@dataclass(slots=True)
class Taken:
    """The part of an outcome that counts: its tokens, up to one that ends the request."""

    records: Ordered[TokenRecord]
    token_ids: list[int] = field(default_factory=list)
    reason: str | None = None
    """Why the request ends; None: it goes on."""
    decoded: Decoded | None = None
    """The text, as far as it had to be decoded."""
    shown: int | None = None
    """Characters of the text that the caller has after this step."""
    piece: Callable[[], str] | None = None
    """Returns the new text."""
    approximate: Iterable[int] = ()
    """Pages with positions for which not every layer ran."""


class Commits:
    """Commits outcomes to the requests, their pages and the queues.

    Args:
        exit_layers: the model's exit layers, the last one full depth.
        keyed: whether pages also have keys of a draft head's own layers.
    """

    def __init__(self, exit_layers: range, scheduler: Scheduler, *, keyed: bool = False) -> None:
        self._exit_layers, self._num_layers = exit_layers, exit_layers[-1]
        self._scheduler, self._keyed = scheduler, keyed

    def taken(self, outcome: Outcome) -> Taken:
        """The part that counts of an outcome without an error. No state changes, whatever the text
        or the guide raises.
        """
        sequence, records = outcome.sequence, outcome.records
        taken = Taken(records)
        if records:
            self._take_tokens(taken, sequence)
        elif not sequence.tokens_left and outcome.num_computed >= sequence.num_prompt_tokens:
            taken.reason = "length"
            self._end_text(taken, sequence, None, len(sequence.output_ids))
        lacks_keys = self._keyed and not route_of(sequence, self._exit_layers).fills_head
        if not records or lacks_keys or min(outcome.kv_exit_layers, default=0) < self._num_layers:
            taken.approximate = self._approximate(outcome, lacks_keys)
        return taken

    def put(
        self, outcome: Outcome, taken: Taken, now: float, going_on: Container[Sequence]
    ) -> StepOutput | None:
        """Commit an outcome to its request; returns the step for the caller, if there is one. A
        request that ends with it has yet to be finished in the scheduler.

        Args:
            now: the time, in seconds of ``time.perf_counter``.
            going_on: requests whose next iteration is in flight and needs their pages.
        """
        sequence, pages = outcome.sequence, self._scheduler.pages
        is_first = not sequence.output_ids
        sequence.num_computed = outcome.num_computed
        sequence.is_encoded = sequence.input_ids is not None
        sequence.counters.add(outcome.counters)
        if outcome.draft_stop is not None:
            sequence.draft.stop = outcome.draft_stop
        sequence.kv_exit_layers += outcome.kv_exit_layers
        sequence.prompt_logprobs += outcome.prompt_logprobs
        sequence.output_ids += taken.token_ids
        sequence.records += taken.records
        times = sequence.times
        if outcome.seconds:
            times.timed_tokens += len(taken.records)
            times.timed_s += outcome.seconds
            times.full_depth_s += len(taken.records) * outcome.full_depth_s
        publishes = not taken.records
        if not publishes and times.first_token is None:
            times.first_token, publishes = now, True
        if taken.decoded is not None:
            _keep_text(sequence.text, taken)
        if taken.approximate:
            pages.mark_approximate(taken.approximate)
        output = None
        if taken.reason is not None:
            output, publishes = self._output(sequence, taken.reason, taken.decoded, now), True
        if publishes:
            pages.publish(sequence)
        if not taken.records and output is None:
            return None
        if output is None and sequence.max_drafts > 0 and sequence not in going_on:
            self._scheduler.crop(sequence)
        exit_layers: list[int] = []
        confidences: list[float] = []
        for record in taken.records:
            exit_layers.append(record.exit_layer)
            confidences.append(record.confidence)
        logprobs = top_logprobs = None
        if sequence.sampling.logprobs is not None:
            logprobs, top_logprobs = _logprobs(sequence, taken.records)
        return StepOutput(
            sequence.request_id,
            taken.token_ids,
            exit_layers,
            confidences,
            output,
            logprobs,
            top_logprobs,
            _prompt_logprobs(sequence) if is_first else None,
            taken.piece,
        )

    def end(self, sequence: Sequence, now: float, error: Exception | None = None) -> StepOutput:
        """The last step of a request that is cancelled, or ends by an error of its own. The
        request has yet to be finished in the scheduler.
        """
        pages = self._scheduler.pages
        step = self.last_step(sequence, now, None if error is None else described(error))
        if error is None:
            pages.publish(sequence)
        else:
            pages.forget(sequence.pages)
        return step

    def last_step(self, sequence: Sequence, now: float, error: str | None) -> StepOutput:
        """The last step of a request that ends in its present state; its pages do not change."""
        text: TextStream | None = sequence.text
        taken = Taken((), decoded=None if text is None else text.decoded)
        with suppress(Exception):  # the text decoded so far is used then
            self._end_text(taken, sequence, None, len(sequence.output_ids))
        _keep_text(text, taken)
        reason = "cancelled" if error is None else "error"
        output = self._output(sequence, reason, taken.decoded, now, error)
        scores = None if sequence.output_ids else _prompt_logprobs(sequence)
        return StepOutput(
            sequence.request_id, [], [], [], output, prompt_logprobs=scores, piece=taken.piece
        )

    def _approximate(self, outcome: Outcome, lacks_keys: bool) -> set[int]:
        """Pages of newly computed positions for which not every layer ran.

        Args:
            outcome: the outcome that computed the positions.
            lacks_keys: whether a draft head's own layers lack keys of the generated tokens.
        """
        sequence, num_layers = outcome.sequence, self._num_layers
        first, prompt = sequence.num_computed, len(sequence.prompt_ids)
        before, fresh = sequence.kv_exit_layers, outcome.kv_exit_layers
        is_deep = route_of(sequence, self._exit_layers).depth == num_layers
        split, page_size = prompt + len(before), self._scheduler.pages.page_size
        pages = set()
        for position in range(max(first, prompt) if is_deep else first, outcome.num_computed):
            if is_deep:  # a position before the split is replayed
                is_old = position < split
                layer = before[position - prompt] if is_old else fresh[position - split]
                if layer == num_layers and not lacks_keys:
                    continue
            pages.add(sequence.pages[position // page_size])
        return pages

    def _take_tokens(self, taken: Taken, sequence: Sequence) -> None:
        """Take the new tokens, up to the end of the request."""
        text: TextStream | None = sequence.text
        decoded = text.decoded if text is not None and text.watches else None
        guided = None if sequence.draft is None else sequence.draft.guided
        left, reason, token_ids = sequence.tokens_left, None, taken.token_ids
        num_text = len(sequence.output_ids)
        for added, record in enumerate(taken.records, 1):
            token = record.token_id
            token_ids.append(token)
            if token in sequence.stop_set:
                reason = "stop"
            else:
                num_text += 1
                if decoded is not None:
                    assert text is not None
                    decoded = text.after(decoded, (token,))
                    reason = "stop" if decoded.stops else None
            if reason is None and guided is not None:
                reason = "stop" if guided.is_over([*sequence.output_ids, *token_ids]) else None
            if reason is None and added == left:
                reason = "length"
            if reason is not None:
                taken.records = taken.records[:added]
                break
        taken.reason = reason
        if reason is not None:
            self._end_text(taken, sequence, decoded, num_text)
        elif decoded is not None:
            assert text is not None
            _show(taken, text, decoded)
        elif text is not None:
            taken.piece = Piece(text, num_text, final=False)

    def _end_text(
        self, taken: Taken, sequence: Sequence, decoded: Decoded | None, num_tokens: int
    ) -> None:
        """Take the whole text of a request that ends: the text of its first ``num_tokens``."""
        text: TextStream | None = sequence.text
        if text is None:
            return
        if decoded is None:
            decoded = text.decoded
            tokens = [*sequence.output_ids, *taken.token_ids]
            decoded = text.after(decoded, tokens[decoded.num_tokens : num_tokens])
        taken.decoded = text.whole(decoded)
        if text.watches:
            _show(taken, text, taken.decoded, final=True)
        else:
            taken.piece = Piece(text, num_tokens, final=True)

    def _output(
        self,
        sequence: Sequence,
        reason: str,
        decoded: Decoded | None,
        now: float,
        error: str | None = None,
    ) -> Output:
        """The whole output of a request that ends."""
        records, times = sequence.records, sequence.times
        count, first = len(records), times.first_token
        exit_layers = [record.exit_layer for record in records]
        logprobs, top_logprobs = _logprobs(sequence, records)
        total = now - times.arrived
        is_timed = 0 < times.timed_tokens >= TIMED * (count - 1)
        stats = RequestStats(
            contract=sequence.contract,
            num_layers=self._num_layers,
            prompt_tokens=len(sequence.given_ids),
            generated_tokens=count,
            time_to_first_token_s=(now if first is None else first) - times.arrived,
            total_s=total,
            mean_exit_layer=sum(exit_layers) / count if count else 0.0,
            cached_tokens=sequence.cached_tokens,
            full_depth_s=total + times.full_depth_s - times.timed_s if is_timed else None,
            **asdict(sequence.counters),
        )
        return Output(
            request_id=sequence.request_id,
            prompt_token_ids=sequence.given_ids,
            token_ids=[record.token_id for record in records],
            text=None if decoded is None else decoded.text,
            finish_reason=reason,
            exit_layers=exit_layers,
            confidences=[record.confidence for record in records],
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            stats=stats,
            prompt_logprobs=_prompt_logprobs(sequence),
            error=error,
        )


def _keep_text(text: TextStream | None, taken: Taken) -> None:
    if text is not None and taken.decoded is not None:
        text.keep(taken.decoded)
        if taken.shown is not None:
            text.mark_shown(taken.shown)


def _show(taken: Taken, text: TextStream, decoded: Decoded, *, final: bool = False) -> None:
    """Take the new text of a request with stop strings, which is decoded at once."""
    piece, taken.shown = text.shows(decoded, final=final)
    taken.decoded, taken.piece = decoded, lambda: piece


def _logprobs(
    sequence: Sequence, records: Iterable[TokenRecord]
) -> tuple[list[float] | None, list[dict[int, float]] | None]:
    """Log-probabilities of tokens, and of the most probable ones, where they were asked for."""
    asked = sequence.sampling.logprobs
    if asked is None:
        return None, None
    logprobs = [record.logprob or 0.0 for record in records]
    return logprobs, [record.top_logprobs or {} for record in records] if asked else None


def _prompt_logprobs(sequence: Sequence) -> list[PromptLogprob | None] | None:
    """The scores of the prompt's tokens so far, where they were asked for. A request's first step
    and its output have them.
    """
    if sequence.sampling.prompt_logprobs is None:
        return None
    return [None, *sequence.prompt_logprobs]
