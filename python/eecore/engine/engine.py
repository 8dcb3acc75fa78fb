"""The engine: requests come in, each step moves all of them, tokens come out.

What a call makes of the requests is worked out while nothing has changed, stored as one plan, and
put in place. A call that is interrupted, wherever it is, has done nothing or will have done all of
it: whatever is called next completes the plan first.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Container, Iterator
from functools import partial
from typing import NamedTuple

from eecore.config import EngineConfig, SamplingParams, T5Config
from eecore.decoding.capture import Capture, RunProgram, run_program_on
from eecore.decoding.iterate import Flight, Iterations
from eecore.engine.changes import Change, Changes
from eecore.engine.faults import LOGGER, isolated
from eecore.engine.intake import Intake
from eecore.errors import RequestError
from eecore.exits import Exit
from eecore.guide import Guide
from eecore.models import KVCache, Network, Tokenizer, cache_dtype
from eecore.output import Output, StepOutput
from eecore.planning.guided import Guides
from eecore.planning.row import Outcome
from eecore.scheduling.pages import PageAllocator
from eecore.scheduling.prefix_cache import PrefixCache
from eecore.scheduling.scheduler import ScheduleError, Scheduler, Work
from eecore.scheduling.sequence import Sequence, SequenceStatus
from eecore.values import shown

__all__ = ["Engine", "RunProgram"]


class Plan(NamedTuple):
    """What a call does to the engine, as values that may be put in place twice."""

    changes: list[Change]
    outbox: list[list[StepOutput]]
    cancelled: dict[str, Output]
    flight: Flight | None


class Engine:
    """Continuous batching over one model, with an exit policy per request.

    It is for one thread at a time.

    Args:
        network: the model.
        tokenizer: its tokenizer; without one prompts are token ids, and there are no texts.
        config: limits.
        run: how decoding programs run; what suits the device when None.
        ahead: whether a program's next run is launched before the outcome of this one is known;
            where the device works on its own when None.

    Attributes:
        num_failed_iterations: iterations, or parts of one, that raised and were done again. From
            any thread.
    """

    def __init__(
        self,
        network: Network,
        tokenizer: Tokenizer | None,
        config: EngineConfig | None = None,
        *,
        run: RunProgram | None = None,
        ahead: bool | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.network = network
        self.tokenizer = tokenizer
        kv = KVCache.allocate(
            network.config,
            self.config.num_pages,
            self.config.page_size,
            device=network.device,
            dtype=cache_dtype(network, self.config.kv_cache_dtype),
        )
        self.iterations = Iterations(
            network, kv, run or run_program_on(network.device), ahead=ahead
        )
        cache = None
        if self.has_prefix_cache:
            cache = PrefixCache(self.config.page_size, network.config.num_layers)
        self.scheduler = Scheduler(
            self.config, PageAllocator(self.config.num_pages, self.config.page_size, cache)
        )
        self._intake = Intake(network, tokenizer, self.config)
        self._changes = Changes(network.config.num_layers, self.config.page_size)
        self.num_failed_iterations = 0
        self._arrivals = 0
        self._flight: Flight | None = None
        self._plan: Plan | None = None
        self._outbox: list[list[StepOutput]] = []
        """What the next step returns, if anything: taking it is one operation."""
        self._cancelled: dict[str, Output] = {}
        """Outputs for those who cancel, and may have to ask once more."""

    @property
    def num_layers(self) -> int:
        """Of the model; of its decoder, where it has an encoder."""
        return self.network.config.num_layers

    @property
    def has_unfinished(self) -> bool:
        """Whether :meth:`step` has anything left to do or to give."""
        return bool(self._plan or self._outbox or self.scheduler.requests)

    @property
    def has_runnable(self) -> bool:
        """Whether a step would get anywhere: not with requests alone that are on hold."""
        return bool(self._plan or self._outbox or self.scheduler.has_runnable)

    @property
    def has_prefix_cache(self) -> bool:
        """Whether prompts that begin alike share pages: see :class:`EngineConfig`."""
        network = self.network
        exact = network.linear.is_batch_invariant and not isinstance(network.config, T5Config)
        return self.config.prefix_cache and exact

    @property
    def num_waiting(self) -> int:
        return self._count(SequenceStatus.WAITING)

    @property
    def num_running(self) -> int:
        return self._count(SequenceStatus.RUNNING)

    @property
    def num_held(self) -> int:
        return self._count(SequenceStatus.HELD)

    @property
    def num_used_pages(self) -> int:
        """Of the cache. From any thread, and never quite now."""
        pages = self.scheduler.pages
        return pages.num_pages - pages.num_free

    @property
    def num_cached_pages(self) -> int:
        """Those that a prompt may begin with, used or not. From any thread."""
        return self.scheduler.pages.num_cached

    @property
    def pages(self) -> PageAllocator:
        """Of the cache, as the requests hold them."""
        self._settle()
        return self.scheduler.pages

    @property
    def kv(self) -> KVCache:
        """The cache of all requests."""
        return self.iterations.kv

    @property
    def captures(self) -> list[Capture]:
        """Decoding programs captured so far, with the time and memory that each took."""
        return self.iterations.captures

    @property
    def requests(self) -> dict[str, Sequence]:
        """Those that are unfinished, by id."""
        self._settle()
        return dict(self.scheduler.requests)

    def add_request(
        self,
        prompt: str | list[int],
        *,
        exit: Exit | str | None = None,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request and return its id. If it raises anything, there is no such request.

        Raises:
            RequestError: for a prompt, setting or length that this engine can never serve.
            ExitError: for an exit policy that the model cannot run.
            ModelError: the model that the weights are shared with has changed.
        """
        self.check_held()
        return self.enqueue(self.prepare(prompt, exit=exit, sampling=sampling), request_id)

    def check_held(self) -> None:
        """See to it that weights which are shared with another model are still that model.

        Raises:
            ModelError: they are not; see :func:`eecore.from_transformers`.
        """
        if self.network.check_held is not None:
            self.network.check_held(self.network)

    def prepare(
        self,
        prompt: str | list[int],
        *,
        exit: Exit | str | None = None,
        sampling: SamplingParams | None = None,
    ) -> Sequence:
        """A request for :meth:`enqueue`. Nothing of the engine changes, so that any thread may
        prepare one while another steps.

        Raises:
            RequestError: for a prompt, setting or length that this engine can never serve.
            ExitError: for an exit policy that the model cannot run.
        """
        return self._intake.sequence(prompt, exit, sampling)

    def compile(self, guide: Guide) -> None:
        """Compile a guide before a request that follows it; from any thread.

        Raises:
            GuideError: it cannot be compiled, or nothing can follow it.
        """
        self._intake.guides.follow(guide)

    def is_compiled(self, guide: Guide) -> bool:
        """Whether :meth:`compile` has its answer already."""
        guides = self._intake.guides
        return isinstance(guides, Guides) and guides.knows(guide)

    def enqueue(self, sequence: Sequence, request_id: str | None = None) -> str:
        """Queue what :meth:`prepare` made, once, and return its id.

        Raises:
            RequestError: for an id that is in use, or is no string.
        """
        self._settle()
        request_id = self._own_id(request_id)
        self._cancelled.pop(request_id, None)  # of an earlier one, for which nobody asked again
        sequence.request_id, sequence.arrival = request_id, self._arrivals
        self._arrivals += 1
        return self.scheduler.add(sequence).request_id

    def step(self) -> list[StepOutput]:
        """One iteration for everybody who can run; returns what each request got.

        A request that makes it fail ends with ``finish_reason`` "error", and so does one for whose
        next token the model gives NaN or infinity; the others go on. KeyboardInterrupt and its like
        pass through: nothing is lost, and what the call would have returned the next one returns.

        On a GPU the next iteration may be under way when it returns: requests that turn out to be
        finished have its outcome discarded.
        """
        self._settle()
        if not self._outbox:
            self._advance()
        return self._outbox.pop() if self._outbox else []

    def cancel(self, request_id: str) -> Output | None:
        """End a request now; its pages go back. None when it is not (or no longer) known.

        If it raises anything, it can be called again.
        """
        self._settle()
        sequence = self.scheduler.requests.get(request_id)
        if sequence is not None:
            change = self._changes.ending(sequence, time.perf_counter())
            assert change.output is not None
            self._plan_cancel(request_id, change.output, [change])
        else:
            for step in itertools.chain.from_iterable(self._outbox):
                if step.request_id == request_id and step.output is not None:
                    self._plan_cancel(request_id, step.output, [])
        return self._cancelled.pop(request_id, None)

    def hold(self, request_id: str) -> None:
        """Leave a request out of the next steps until :meth:`resume`, if it is unfinished.

        It keeps its pages as long as nobody else needs them, and stands in nobody's way.
        """
        self._settle()
        sequence = self.scheduler.requests.get(request_id)
        if sequence is not None:
            self.scheduler.hold(sequence)

    def resume(self, request_id: str) -> None:
        """Let a request go on that was on hold; its output is what it would have been anyway."""
        self._settle()
        sequence = self.scheduler.requests.get(request_id)
        if sequence is not None:
            self.scheduler.resume(sequence)

    def reset_prefix_cache(self) -> None:
        """Forget what pages hold that no unfinished request has."""
        self._settle()
        self.scheduler.reset_prefix_cache()

    def run(self) -> Iterator[StepOutput]:
        """Step until nothing is left but requests on hold."""
        while self.has_runnable:
            yield from self.step()

    def _count(self, status: SequenceStatus) -> int:
        return sum(s.status is status for s in list(self.scheduler.requests.values()))

    def _own_id(self, request_id: str | None) -> str:
        """The id that a new request asks for, or one that nobody has."""
        given = {step.request_id for step in itertools.chain.from_iterable(self._outbox)}
        if request_id is None:
            names = (f"request-{number}" for number in itertools.count(self._arrivals))
            return next(n for n in names if n not in self.scheduler.requests and n not in given)
        if not isinstance(request_id, str):
            raise RequestError(f"request_id: expected a string, got {shown(request_id)}")
        request_id = str.__str__(request_id)
        if request_id in self.scheduler.requests or request_id in given:
            raise RequestError(f"request_id: {request_id!r} is in use")
        return request_id

    # A step

    def _advance(self) -> None:
        """An iteration, and in a plan what came of it."""
        flight, self._flight = self._flight, None  # lost, it would only have to be flown again
        behind = None
        if flight is None or flight.is_over:
            works = self._schedule()
            flight = self._launch(works) if works and self.iterations.ahead else None
        else:
            works = flight.works
        outcomes = None
        if flight is not None:
            behind = self._launch_behind(flight)
            outcomes = self._land(flight)
        if outcomes is None:
            if flight is not None:
                works = [w for w in works if w.sequence.status is SequenceStatus.RUNNING]
            behind = None
            run = partial(self.iterations.iterate, others_wait=bool(self.scheduler.waiting))
            outcomes = isolated(run, works, self._failed) if works else []
        self._take_over(outcomes, behind)

    def _schedule(self) -> list[Work]:
        """The next iteration's work, of requests that can be scheduled; the others end."""
        suspect: Sequence | None = None
        while True:
            try:
                return self.scheduler.schedule()
            except ScheduleError as error:
                self.scheduler.reconcile()
                sequence, cause = error.sequence, error.__cause__
                self._failed(str(error))
                if suspect is sequence and isinstance(cause, Exception):
                    self._take_over([Outcome(sequence, sequence.num_computed, error=cause)], None)
                suspect = sequence

    def _launch(self, works: list[Work], after: Flight | None = None) -> Flight | None:
        """An iteration that is under way; None where it has to be waited for, or fails."""
        try:
            return self.iterations.launch(works, after)
        except Exception:
            self._failed("an iteration could not be launched")
            return None

    def _launch_behind(self, flight: Flight) -> Flight | None:
        """The iteration behind one that is under way, if there can be one."""
        try:
            works = self.scheduler.schedule_ahead(flight.works)
        except Exception:
            self._failed("an iteration could not be scheduled ahead")
            return None
        return self._launch(works, flight) if works else None

    def _land(self, flight: Flight) -> list[Outcome] | None:
        """What a flight did; None where that has to be found out request by request."""
        try:
            outcomes = self.iterations.land(flight)
        except Exception:
            self._failed("an iteration that was under way failed")
            return None
        fails = any(outcome.error is not None or outcome.is_cut for outcome in outcomes)
        return None if fails else outcomes

    def _take_over(self, outcomes: list[Outcome], behind: Flight | None) -> None:
        """Make the outcome of an iteration the state of the requests."""
        now = time.perf_counter()
        going_on: Container[Sequence] = () if behind is None else behind.places
        changes: list[Change] = []
        steps = [step for before in self._outbox for step in before]
        for outcome in outcomes:
            change = self._change(outcome, now, going_on)
            changes.append(change)
            if change.step is not None:
                steps.append(change.step)
        self._plan = Plan(changes, [steps], self._cancelled, behind)
        self._complete(self._plan)

    def _change(self, outcome: Outcome, now: float, going_on: Container[Sequence]) -> Change:
        """What an outcome makes of its request; its end where that fails, once more too."""
        sequence, error = outcome.sequence, outcome.error
        for _ in range(2):
            if outcome.error is None:
                try:
                    return self._changes.of(outcome, now, going_on)
                except Exception as its:
                    error = its
                    self._failed(f"what came of request {sequence.request_id!r} was not taken over")
        LOGGER.error("request %r ends by an error", sequence.request_id, exc_info=error)
        return self._changes.ending(sequence, now, error)

    def _failed(self, what: str) -> None:
        """Count and log what has just raised and is done again."""
        self.num_failed_iterations += 1
        LOGGER.warning("%s", what, exc_info=True)

    # Plans

    def _plan_cancel(self, request_id: str, output: Output, changes: list[Change]) -> None:
        """Nothing of a request is left but its output, for whoever cancels it."""
        before = itertools.chain.from_iterable(self._outbox)
        left = [step for step in before if step.request_id != request_id]
        cancelled = {**self._cancelled, request_id: output}
        self._plan = Plan(changes, [left] if left else [], cancelled, self._flight)
        self._complete(self._plan)

    def _settle(self) -> None:
        """Complete what was interrupted, if anything was."""
        if self._plan is not None:
            self.scheduler.is_dirty = True
            self._complete(self._plan)
        elif self.scheduler.is_dirty:
            self.scheduler.reconcile()

    def _complete(self, plan: Plan) -> None:
        """Put a plan in place. Where a change was interrupted, all that follows is found anew."""
        scheduler = self.scheduler
        anew, scheduler.is_dirty = scheduler.is_dirty, True
        for change in plan.changes:
            change.put_in_place()
            if change.approximate:
                scheduler.pages.mark_approximate(change.approximate)
            if change.publishes is False:
                scheduler.pages.forget(change.sequence.pages)
            if anew:
                continue
            if change.publishes:
                scheduler.pages.publish(change.sequence)
            if change.output is not None:
                scheduler.finish(change.sequence)
            elif change.crops:
                scheduler.crop(change.sequence)
        self._outbox, self._cancelled, self._flight = plan.outbox, plan.cancelled, plan.flight
        if anew:
            scheduler.reconcile()
        scheduler.is_dirty = False
        self._plan = None
