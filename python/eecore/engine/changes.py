"""What a step makes of a request: worked out beforehand, then put in place, twice if need be.

Whatever can fail does so while nothing has changed yet. What is left to do are assignments of
values that do not depend on what they replace, so that a change which was interrupted is simply
made again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as Ordered
from contextlib import suppress
from dataclasses import asdict, dataclass

from eecore.engine.faults import described
from eecore.engine.text import Decoded, TextStream
from eecore.output import Output, PromptLogprob, RequestStats, StepOutput
from eecore.planning.draft_state import route_of
from eecore.planning.guided import Guided
from eecore.planning.row import Outcome
from eecore.scheduling.sequence import Counters, Sequence, SequenceStatus, TokenRecord

__all__ = ["Change", "Changes"]

Piece = Callable[[], str]


@dataclass(slots=True)
class Change:
    """The next state of one request."""

    sequence: Sequence
    num_computed: int
    is_encoded: bool
    counters: Counters
    first_token: float | None
    """When it came."""
    num_before: int
    """Tokens before the new ones."""
    num_kv_before: int
    """Exit layers before those of newly computed positions."""
    draft_stop: object
    kv_exit_layers: Ordered[int] = ()
    """Of newly computed positions."""
    records: Ordered[TokenRecord] = ()
    """Of the new tokens."""
    token_ids: Ordered[int] = ()
    num_prompt_logprobs_before: int = 0
    prompt_logprobs: Ordered[PromptLogprob] = ()
    """Of tokens of the prompt, new ones."""
    decoded: Decoded | None = None
    """As far as the text had to be, or None."""
    shown: int | None = None
    approximate: Iterable[int] = ()
    """Pages with positions that lack a layer's own work."""
    publishes: bool | None = None
    """True: others may have its full pages, of a chunk of a prompt or a replay, or at the end;
    False: nobody may, since it fails."""
    crops: bool = False
    """Pages behind the computed positions go back."""
    step: StepOutput | None = None
    """What the caller gets to see of it."""
    output: Output | None = None
    """Of the request, which ends."""

    def put_in_place(self) -> None:
        """Make it the request's state; once more changes nothing."""
        sequence, before = self.sequence, self.num_before
        sequence.num_computed = self.num_computed
        sequence.is_encoded = self.is_encoded
        sequence.counters = self.counters
        if self.draft_stop is not None:
            sequence.draft.stop = self.draft_stop
        sequence.times.first_token = self.first_token
        sequence.kv_exit_layers[self.num_kv_before :] = self.kv_exit_layers
        sequence.output_ids[before:] = self.token_ids
        sequence.records[before:] = self.records
        if self.prompt_logprobs:
            sequence.prompt_logprobs[self.num_prompt_logprobs_before :] = self.prompt_logprobs
        if self.decoded is not None:
            sequence.text.keep(self.decoded)
        if self.shown is not None:
            sequence.text.mark_shown(self.shown)
        if self.output is not None:
            sequence.status = SequenceStatus.FINISHED


class Changes:
    """Works changes out.

    Args:
        num_layers: of the model.
        page_size: of its cache.
    """

    def __init__(self, num_layers: int, page_size: int) -> None:
        self._num_layers, self._page_size = num_layers, page_size

    def of(self, outcome: Outcome, now: float, going_on: Container[Sequence]) -> Change:
        """What an iteration did for a request.

        Args:
            outcome: without an error.
            now: the time, in seconds of ``time.perf_counter``.
            going_on: requests whose next iteration is under way, and needs its pages.
        """
        sequence, records = outcome.sequence, outcome.records
        change = Change(
            sequence,
            outcome.num_computed,
            sequence.input_ids is not None,
            sequence.counters.plus(outcome.counters),
            sequence.times.first_token,
            len(sequence.output_ids),
            len(sequence.kv_exit_layers),
            outcome.draft_stop,
            outcome.kv_exit_layers,
        )
        if outcome.prompt_logprobs:
            change.num_prompt_logprobs_before = len(sequence.prompt_logprobs)
            change.prompt_logprobs = outcome.prompt_logprobs
        if not records or min(outcome.kv_exit_layers, default=0) < self._num_layers:
            change.approximate = self._approximate(outcome)
        if records:
            if change.first_token is None:
                change.first_token, change.publishes = now, True
            self._take_tokens(change, records, now)
            change.crops = sequence.max_drafts > 0 and sequence not in going_on
        elif sequence.tokens_left or outcome.num_computed < sequence.num_prompt_tokens:
            change.publishes = True
        else:
            self._end_without_tokens(change, "length", now)
        return change

    def ending(self, sequence: Sequence, now: float, error: Exception | None = None) -> Change:
        """A request that ends as it is: cancelled, or by an error."""
        change = Change(
            sequence,
            sequence.num_computed,
            sequence.is_encoded,
            sequence.counters,
            sequence.times.first_token,
            len(sequence.output_ids),
            len(sequence.kv_exit_layers),
            None,
        )
        reason = "cancelled" if error is None else "error"
        self._end_without_tokens(change, reason, now, None if error is None else described(error))
        return change

    def _end_without_tokens(
        self, change: Change, reason: str, now: float, error: str | None = None
    ) -> None:
        """The end of a request that gets no new tokens."""
        sequence = change.sequence
        text: TextStream | None = sequence.text
        piece: Piece | None = None
        if text is not None:
            change.decoded = text.decoded  # has to do if there is no more to be had of it
            for _ in range(2):
                with suppress(Exception):
                    piece = self._end_text(change, text, None, len(sequence.output_ids))
                    break
        self._end(change, reason, now, error)
        change.step = StepOutput(
            sequence.request_id,
            [],
            [],
            [],
            change.output,
            prompt_logprobs=None if change.num_before else _prompt_logprobs(change),
            piece=piece,
        )

    def _approximate(self, outcome: Outcome) -> set[int]:
        """Pages of newly computed positions that lack a layer's own work."""
        sequence, num_layers = outcome.sequence, self._num_layers
        first, stop = sequence.num_computed, outcome.num_computed
        if route_of(sequence, num_layers).depth == num_layers:
            prompt = sequence.num_prompt_tokens
            before, fresh = sequence.kv_exit_layers, outcome.kv_exit_layers
            split = prompt + len(before)
            replayed = range(max(prompt, first), min(split, stop))
            positions: Iterable[int] = [
                *(p for p in replayed if before[p - prompt] < num_layers),
                *(p for p in range(max(split, first), stop) if fresh[p - split] < num_layers),
            ]
        else:
            positions = range(first, stop)
        return {sequence.pages[position // self._page_size] for position in positions}

    def _take_tokens(self, change: Change, records: list[TokenRecord], now: float) -> None:
        """As many of the new tokens as stand, and the end of the request if it is there."""
        sequence = change.sequence
        text: TextStream | None = sequence.text
        decoded = text.decoded if text is not None and text.watches else None
        num_text = change.num_before
        left, reason = sequence.tokens_left, None
        guided: Guided | None = sequence.draft.guided
        tokens = [] if guided is None else sequence.output_ids[: change.num_before]
        for added, record in enumerate(records, 1):
            token = record.token_id
            tokens.append(token)
            if token in sequence.stop_set:
                reason = "stop"
            else:
                num_text += 1
                if decoded is not None:
                    assert text is not None
                    decoded = text.after(decoded, (token,))
                    reason = "stop" if decoded.stops else None
            if reason is None and guided is not None and guided.is_over(tokens):
                reason = "stop"
            if reason is None and added == left:
                reason = "length"
            if reason is not None:
                records = records[:added]
                break
        token_ids, exit_layers, confidences = list[int](), list[int](), list[float]()
        for record in records:
            token_ids.append(record.token_id)
            exit_layers.append(record.exit_layer)
            confidences.append(record.confidence)
        change.records, change.token_ids = records, token_ids
        piece: Piece | None = None
        if text is not None:
            if reason is not None:
                piece = self._end_text(change, text, decoded, num_text)
            elif decoded is not None:
                piece = self._show(change, text, decoded)
            else:
                piece = text.piece(num_text, final=False)
        if reason is not None:
            self._end(change, reason, now)
        change.step = StepOutput(
            sequence.request_id,
            token_ids,
            exit_layers,
            confidences,
            change.output,
            *_logprobs(sequence, records),
            None if change.num_before else _prompt_logprobs(change),
            piece,
        )

    def _end_text(
        self, change: Change, text: TextStream, decoded: Decoded | None, num_tokens: int
    ) -> Piece:
        """The whole text, of the first ``num_tokens``; returns what gives what is new of it."""
        if decoded is None:
            decoded = text.decoded
            tokens = [*change.sequence.output_ids[: change.num_before], *change.token_ids]
            decoded = text.after(decoded, tokens[decoded.num_tokens : num_tokens])
        change.decoded = text.whole(decoded)
        if not text.watches:
            return text.piece(num_tokens, final=True)
        return self._show(change, text, change.decoded, final=True)

    def _show(
        self, change: Change, text: TextStream, decoded: Decoded, *, final: bool = False
    ) -> Piece:
        """Text that is new by now; it is known already."""
        piece, change.shown = text.shows(decoded, final=final)
        change.decoded = decoded
        return lambda: piece

    def _end(self, change: Change, reason: str, now: float, error: str | None = None) -> None:
        """The whole output, of a request that ends."""
        sequence = change.sequence
        change.publishes = error is None
        records = [*sequence.records[: change.num_before], *change.records]
        logprobs, top_logprobs = _logprobs(sequence, records)
        change.output = Output(
            request_id=sequence.request_id,
            prompt_token_ids=sequence.given_ids,
            token_ids=[record.token_id for record in records],
            text=None if change.decoded is None else change.decoded.text,
            finish_reason=reason,
            exit_layers=[record.exit_layer for record in records],
            confidences=[record.confidence for record in records],
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            stats=self._stats(change, records, now),
            prompt_logprobs=_prompt_logprobs(change),
            error=error,
        )

    def _stats(self, change: Change, records: list[TokenRecord], now: float) -> RequestStats:
        sequence, count = change.sequence, len(records)
        arrived = sequence.times.arrived
        first = now if change.first_token is None else change.first_token
        return RequestStats(
            contract=sequence.contract,
            num_layers=self._num_layers,
            prompt_tokens=len(sequence.given_ids),
            generated_tokens=count,
            time_to_first_token_s=first - arrived,
            total_s=now - arrived,
            mean_exit_layer=sum(record.exit_layer for record in records) / count if count else 0.0,
            cached_tokens=sequence.cached_tokens,
            **asdict(change.counters),
        )


def _logprobs(
    sequence: Sequence, records: Iterable[TokenRecord]
) -> tuple[list[float] | None, list[dict[int, float]] | None]:
    """Log-probabilities of tokens, and of others beside them, as far as they were asked for."""
    asked = sequence.sampling.logprobs
    if asked is None:
        return None, None
    logprobs = [record.logprob or 0.0 for record in records]
    return logprobs, [record.top_logprobs or {} for record in records] if asked else None


def _prompt_logprobs(change: Change) -> list[PromptLogprob | None] | None:
    """Of the prompt's tokens, as far as it has come, if they were asked for; a request's output has
    them, and its first step.
    """
    sequence = change.sequence
    if sequence.sampling.prompt_logprobs is None:
        return None
    return [None, *sequence.prompt_logprobs, *change.prompt_logprobs]
