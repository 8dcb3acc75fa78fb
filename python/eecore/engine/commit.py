"""The outcomes of an iteration are committed to the requests.

Steps that a request can make fail, such as decoding its text, run before any state changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial

from eecore.engine.faults import LOGGER, described
from eecore.engine.repetition import is_due, repeats_itself
from eecore.engine.text import Decoded, Shown, TextStream
from eecore.exits import Exit
from eecore.output import Output, Piece, PromptLogprob, RequestStats, StepOutput
from eecore.planning.draft_state import DraftState
from eecore.planning.row import Outcome
from eecore.planning.thoughts import GuidedThought
from eecore.scheduling.scheduler import Scheduler
from eecore.scheduling.sequence import Sequence

TIMED = 0.5
"""Share of a request's tokens, without the first, that timed rounds must have given for the output
to say what full depth would have taken.
"""


@dataclass(slots=True)
class Taken:
    """The end of a request, or text of it that had to be decoded."""

    reason: str | None = None
    """Why the request ends; None: it goes on."""
    decoded: Decoded | None = None
    """The text, as far as it had to be decoded."""
    shown: Shown | None = None
    """Characters of the text that the caller has after this step."""
    piece: Callable[[], Piece] | None = None
    """Returns the new text."""
    is_probed: bool = False
    """Whether a probe of the thought comes before the next token."""


class Commits:
    """Commits outcomes to the requests, their pages and the queues.

    Args:
        num_layers: the model's layers.
        fingerprint: of a policy, see :meth:`eecore.Engine.fingerprint`.
        keyed: whether pages also have keys of a draft head's own layers.
    """

    def __init__(
        self,
        num_layers: int,
        scheduler: Scheduler,
        fingerprint: Callable[[Exit, str | None], str | None],
        *,
        keyed: bool = False,
    ) -> None:
        self._num_layers, self._fingerprint = num_layers, fingerprint
        self._scheduler, self._keyed = scheduler, keyed

    def taken(self, outcome: Outcome) -> Taken | None:
        """Remove the tokens after the end of the request from an outcome without an error. No
        state of the request changes, whatever its text or guide raises.

        Returns:
            None: a chunk of a prompt, after which the request goes on.
        """
        sequence = outcome.sequence
        left = sequence.sampling.max_tokens - len(sequence.output_ids)
        if outcome.token_ids:
            return self._take_tokens(outcome, left)
        if left or outcome.num_computed < len(sequence.prompt_ids):
            return None
        taken = Taken("length")
        self._end_text(taken, sequence, sequence.output_ids, len(sequence.output_ids))
        return taken

    def put(
        self, outcomes: Iterable[Outcome], steps: list[StepOutput], going_on: Container[Sequence]
    ) -> int:
        """Commit the outcomes of an iteration to their requests; those that end are finished.

        Args:
            steps: the steps for the callers are added here, each once its request has changed.
            going_on: requests whose next iteration is in flight and needs their pages.

        Returns:
            How many outcomes raised an exception, which ended their requests.
        """
        now, pages, num_failed = time.perf_counter(), self._scheduler.pages, 0
        rejected: list[Sequence] = []
        for each in outcomes:
            outcome = each if each.sequence.parent is None else _probed(each, each.sequence.parent)
            if outcome is None:
                continue
            sequence, token_ids = outcome.sequence, outcome.token_ids
            draft, text, times = sequence.draft, sequence.text, sequence.times
            error, taken = outcome.error, None
            if not token_ids and error is None and outcome.num_computed == sequence.num_computed:
                _count_pass(sequence, outcome)  # a loop of a token that is not made yet
                continue
            left = sequence.sampling.max_tokens - len(sequence.output_ids)
            goes_on = error is None and 0 < len(token_ids) < left
            guided = None if draft is None else draft.guided
            if guided is not None and guided.is_quiet(sequence.output_ids, token_ids):
                guided = None
            if goes_on:
                watches = guided is not None or (text is not None and text.watches)
                goes_on = not watches and sequence.stop_set.isdisjoint(token_ids)
                if sequence.sampling.ends_repetition:
                    goes_on = goes_on and not is_due(len(sequence.output_ids), len(token_ids))
            if not goes_on:
                try:
                    taken = self.taken(outcome) if error is None else None
                except Exception as its:
                    error, num_failed = its, num_failed + 1
            if error is not None:
                LOGGER.error("request %r ends by an error", sequence.request_id, exc_info=error)
                steps.append(self.end(sequence, now, error))
                self._scheduler.finish(sequence)
                continue
            assert draft is not None
            lacks_keys = self._keyed and not draft.route.fills_head
            depth = min(outcome.kv_exit_layers, default=0)
            if not token_ids or lacks_keys or depth < self._num_layers:
                pages.mark_approximate(self._approximate(outcome, lacks_keys))
            is_first = not sequence.output_ids
            sequence.num_computed = outcome.num_computed
            sequence.is_encoded = sequence.input_ids is not None
            counters, more = sequence.counters, outcome.counters
            counters.layers_run += more.layers_run
            counters.prompt_layers_run += more.prompt_layers_run
            counters.layers_filled += more.layers_filled
            counters.fill_calls += more.fill_calls
            counters.drafted += more.drafted
            counters.accepted += more.accepted
            if more.passes:
                _count_pass(sequence, outcome)
            if outcome.draft_stop is not None:
                draft.stop = outcome.draft_stop
            sequence.kv_exit_layers += outcome.kv_exit_layers
            sequence.prompt_logprobs += outcome.prompt_logprobs
            sequence.output_ids += token_ids
            if guided is not None:
                _mask(sequence, draft)
            sequence.exit_layers += outcome.exit_layers
            sequence.confidences += outcome.confidences
            sequence.logprobs += outcome.logprobs
            sequence.top_logprobs += outcome.top_logprobs
            if outcome.seconds:
                times.timed_tokens += len(token_ids)
                times.timed_s += outcome.seconds
                times.full_depth_s += len(token_ids) * outcome.full_depth_s
            publishes = not token_ids
            if not publishes and times.first_token is None:
                times.first_token, publishes = now, True
            output, piece = None, None
            if taken is not None:
                piece = taken.piece
                _keep_text(text, taken)
                if taken.is_probed:
                    assert sequence.probes is not None
                    sequence.probe = sequence.probes.begin(sequence)
                if taken.reason is not None:
                    output = self._output(sequence, taken.reason, taken.decoded, now)
                    publishes = True
            elif text is not None:
                piece = partial(text.show_up_to, len(sequence.output_ids))
            if publishes:
                pages.publish(sequence, after_chunk=not token_ids or is_first)
            if not token_ids and output is None:
                continue
            surplus = len(sequence.pages) + -sequence.num_computed // pages.page_size
            if surplus > 0 and output is None and sequence.max_drafts and sequence not in going_on:
                rejected.append(sequence)
            asked = sequence.sampling.logprobs
            step = StepOutput(
                sequence.request_id,
                token_ids,
                outcome.exit_layers,
                outcome.confidences,
                output,
                None if asked is None else outcome.logprobs,
                outcome.top_logprobs if asked else None,
                _prompt_logprobs(sequence) if is_first else None,
                piece,
            )
            steps.append(step)
            if output is not None:
                self._scheduler.finish(sequence)
        if rejected:
            self._scheduler.crop(rejected)
        return num_failed

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
        text = sequence.text
        taken = Taken(decoded=None if text is None else text.decoded)
        with suppress(Exception):  # the text decoded so far is used then
            self._end_text(taken, sequence, sequence.output_ids, len(sequence.output_ids))
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
        assert sequence.draft is not None
        first, prompt = sequence.num_computed, len(sequence.prompt_ids)
        before, fresh = sequence.kv_exit_layers, outcome.kv_exit_layers
        is_deep = sequence.draft.route.depth == num_layers
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

    def _take_tokens(self, outcome: Outcome, left: int) -> Taken:
        """Remove the tokens after the end of the request, of ``left`` that it may still get."""
        sequence, all_ids = outcome.sequence, list(outcome.sequence.output_ids)
        assert sequence.draft is not None
        text = sequence.text
        decoded = text.decoded if text is not None and text.watches else None
        guided, reason, num_text = sequence.draft.guided, None, len(all_ids)
        probes, is_probed = sequence.probes, False
        for added, token in enumerate(outcome.token_ids, 1):
            all_ids.append(token)
            if token in sequence.stop_set:
                reason = "stop"
            else:
                num_text += 1
                if decoded is not None:
                    assert text is not None
                    decoded = text.after(decoded, (token,))
                    reason = "stop" if decoded.stops else None
            if reason is None and guided is not None:
                reason = "stop" if guided.is_over(all_ids) else None
            is_cut = added == left or (
                sequence.sampling.ends_repetition and repeats_itself(all_ids)
            )
            if reason is None and is_cut:
                reason = "length"
            if reason is not None:
                outcome.keep(added)
                break
            if probes is not None and probes.is_due(all_ids):
                is_probed = True
                outcome.cut(added)
                break
        taken = Taken(reason, is_probed=is_probed)
        if reason is not None:
            self._end_text(taken, sequence, all_ids, num_text, decoded)
        elif decoded is not None:
            assert text is not None
            _show(taken, text, decoded)
        elif text is not None:
            taken.piece = partial(text.show_up_to, num_text)
        return taken

    def _end_text(
        self,
        taken: Taken,
        sequence: Sequence,
        token_ids: list[int],
        num_tokens: int,
        decoded: Decoded | None = None,
    ) -> None:
        """Take the whole text of a request that ends: the text of its first ``num_tokens``."""
        text = sequence.text
        if text is None:
            return
        if decoded is None:
            decoded = text.decoded
            decoded = text.after(decoded, token_ids[decoded.num_tokens : num_tokens])
        taken.decoded = text.whole(decoded)
        if text.watches:
            _show(taken, text, taken.decoded, final=True)
        else:
            taken.piece = partial(text.show_up_to, num_tokens, final=True)

    def _output(
        self,
        sequence: Sequence,
        reason: str,
        decoded: Decoded | None,
        now: float,
        error: str | None = None,
    ) -> Output:
        """The whole output of a request that ends."""
        times, asked, text = sequence.times, sequence.sampling.logprobs, sequence.text
        count, first = len(sequence.output_ids), times.first_token
        total = now - times.arrived
        is_timed = 0 < times.timed_tokens >= TIMED * (count - 1)
        num_layers, layers = self._num_layers, sequence.exit_layers
        contract = sequence.exit.contract
        think = None if sequence.probes is None else sequence.probes.contract
        # The token after accepted drafts is of the pass that verified them; a text may end before.
        passes = layers[1:].count(num_layers)
        if is_verified := contract.endswith("lossless"):
            passes += count > 1 and layers[-1] < num_layers
        depth = num_layers * count if is_verified else sum(layers)
        stats = RequestStats(
            contract=contract,
            fingerprint=self._fingerprint(sequence.exit, think),
            num_layers=num_layers,
            prompt_tokens=len(sequence.given_ids),
            generated_tokens=count,
            time_to_first_token_s=(now if first is None else first) - times.arrived,
            total_s=total,
            mean_exit_layer=depth / count if count else 0.0,
            full_passes=passes,
            cached_tokens=sequence.cached_tokens,
            full_depth_s=total + times.full_depth_s - times.timed_s if is_timed else None,
            thought_tokens=0 if text is None or decoded is None else text.num_thought(decoded),
            thought_end=_thought_end(sequence),
            thought_contract=think,
            **asdict(sequence.counters),
        )
        return Output(
            request_id=sequence.request_id,
            prompt_token_ids=sequence.given_ids,
            token_ids=list(sequence.output_ids),
            text=None if decoded is None else decoded.text,
            finish_reason=reason,
            exit_layers=list(sequence.exit_layers),
            confidences=list(sequence.confidences),
            logprobs=None if asked is None else list(sequence.logprobs),
            top_logprobs=list(sequence.top_logprobs) if asked else None,
            stats=stats,
            prompt_logprobs=_prompt_logprobs(sequence),
            error=error,
            thought=None if text is None or decoded is None else text.thought(decoded),
            thought_probes=[] if sequence.probes is None else sequence.probes.found,
        )


def _probed(outcome: Outcome, sequence: Sequence) -> Outcome | None:
    """Count what an iteration did for the probe of a sequence, unless that has ended.

    Returns:
        The outcome of the sequence itself, where the same pass has given one that still holds.
    """
    if outcome.error is not None:
        LOGGER.warning("a probe of %r failed", sequence.request_id, exc_info=outcome.error)
    if outcome.sequence is sequence.probe:
        assert sequence.draft is not None
        assert sequence.probes is not None
        sequence.probes.learn(outcome)
        _mask(sequence, sequence.draft)
    goes_on = sequence.probe is None and not sequence.is_masked
    return outcome.of_parent if goes_on else None


def _mask(sequence: Sequence, draft: DraftState) -> None:
    """Note whether the next tokens may have masks; then layers draft none."""
    guided, path = draft.guided, draft.route.path
    if isinstance(guided, GuidedThought):  # else all of them do
        sequence.is_masked = guided.may_mask(sequence.output_ids, sequence.max_drafts)
        if path is not None and not path.is_given:
            sequence.is_resting = sequence.is_masked


def _thought_end(sequence: Sequence) -> str | None:
    """What has ended the thought of a sequence, where something other than the model can."""
    guided = None if sequence.draft is None else sequence.draft.guided
    return guided.end_of(sequence.output_ids) if isinstance(guided, GuidedThought) else None


def _count_pass(sequence: Sequence, outcome: Outcome) -> None:
    """Count a pass of a looped model; the tokens and the time of the last one are counted apart."""
    sequence.counters.passes += outcome.counters.passes
    sequence.counters.rows_in_passes += outcome.counters.rows_in_passes
    if not outcome.token_ids:
        sequence.times.timed_s += outcome.seconds


def _keep_text(text: TextStream | None, taken: Taken) -> None:
    if text is not None and text.watches and taken.decoded is not None:
        text.keep(taken.decoded)
        if taken.shown is not None:
            text.mark_shown(taken.shown)


def _show(taken: Taken, text: TextStream, decoded: Decoded, *, final: bool = False) -> None:
    """Take the new text of a request with stop strings, which is decoded at once."""
    piece, taken.shown = text.shows(decoded, final=final)
    taken.decoded, taken.piece = decoded, lambda: piece


def _prompt_logprobs(sequence: Sequence) -> list[PromptLogprob | None] | None:
    """The scores of the prompt's tokens so far, where they were asked for. A request's first step
    and its output have them.
    """
    if sequence.sampling.prompt_logprobs is None:
        return None
    return [None, *sequence.prompt_logprobs]
