"""The engine: takes requests, advances all of them in each step, and returns their tokens.

A step schedules, runs and commits, each once. A request whose iteration raises ends with the error,
and the other requests go on. After an exception that no request has caused, all requests end with
it, and the engine goes on empty: no state that was being changed is used again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256

import torch

from eecore.config import EngineConfig, SamplingParams, T5Config
from eecore.decoding.capture import Capture, RunProgram, run_program_on
from eecore.decoding.iterate import Flight, Iterations
from eecore.engine.commit import Commits
from eecore.engine.faults import LOGGER, described, isolated
from eecore.engine.intake import Intake
from eecore.errors import RequestError
from eecore.exits import Exit, Full
from eecore.guide import Guide
from eecore.models import KVCache, Network, Tokenizer, allocate_cache, cache_dtype, num_states
from eecore.ops import build_info
from eecore.output import Output, StepOutput
from eecore.planning.heads import max_ahead
from eecore.planning.row import Outcome
from eecore.scheduling.pages import PageAllocator
from eecore.scheduling.prefix_cache import PrefixCache
from eecore.scheduling.scheduler import Scheduler, Work
from eecore.scheduling.sequence import Sequence, SequenceStatus
from eecore.scheduling.states import StatePool
from eecore.values import shown

__all__ = ["Engine", "RunProgram"]


class Engine:
    """Continuous batching over one model, with an exit policy per request.

    Only one thread may use it at a time. A call that is interrupted, by KeyboardInterrupt or in any
    other way, ends all requests: the next step returns their outputs, with ``finish_reason``
    "error".

    Args:
        network: the model.
        tokenizer: its tokenizer; without one prompts are token ids, and there are no texts.
        config: limits.
        run: how decoding programs run; None: as suits the device.
        ahead: whether a program's next run is launched before the outcome of this one is known;
            None: where ``run`` returns before the program has ended.

    Attributes:
        num_failed_iterations: iterations, or parts of one, that raised; any thread may read it.
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
        dtype = cache_dtype(network, self.config.kv_cache_dtype)
        self._num_states = num_states(network, self.config, dtype)
        kv = allocate_cache(
            network, self.config.num_pages, self.config.page_size, dtype, self._num_states
        )
        self.iterations = Iterations(
            network,
            kv,
            run or run_program_on(network.device),
            ahead=ahead,
            max_chunk=self.config.max_prefill_chunk,
        )
        self.intake = Intake(network, tokenizer, self.config)
        self.num_failed_iterations = 0
        self._arrivals = 0
        self._flight: Flight | None = None
        self._outbox: list[list[StepOutput]] = []
        """The results that the next steps return, a list for each: taking one is one operation."""
        self._empty()

    @property
    def num_layers(self) -> int:
        """The layers of the model; of its decoder, where it has an encoder."""
        return self.network.config.num_layers

    @property
    def has_unfinished(self) -> bool:
        """Whether :meth:`step` has anything left to do or to return."""
        return bool(self._outbox or self.scheduler.requests)

    @property
    def has_runnable(self) -> bool:
        """Whether a step would do anything: not if all requests are on hold."""
        return bool(self._outbox or self.scheduler.has_runnable)

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
        """Pages of the cache that requests hold; approximate when read from another thread."""
        pages = self.scheduler.pages
        return pages.num_pages - pages.num_free

    @property
    def num_cached_pages(self) -> int:
        """Pages that a new prompt may share, in use or not; approximate from another thread."""
        return self.scheduler.pages.num_cached

    @property
    def pages(self) -> PageAllocator:
        """The pages of the cache, as the requests hold them."""
        return self.scheduler.pages

    @property
    def kv(self) -> KVCache:
        """The cache of all requests."""
        return self.iterations.kv

    @property
    def captures(self) -> list[Capture]:
        """Decoding programs captured so far, with the time and memory that each took."""
        return self.iterations.captures

    def fingerprint(self, exit: Exit, think: str | None = None) -> str | None:
        """What a text depends on beside its request: eecore's version, the CPU's capability or the
        GPU, the model's files and number formats, and for a policy that is not lossless a digest of
        its contract, as for the rule that may end thoughts, whose contract is ``think``. Equal
        requests with equal fingerprints have equal texts on a CPU, whatever runs beside them. None
        for a model whose weights eecore has not read itself.
        """
        source, device = self.network.source, self.network.device
        if source is None or source.fingerprint is None:
            return None
        built = build_info()
        runs_on = built["cpu_capability"]
        if device.type == "cuda":
            runs_on = torch.cuda.get_device_name(device).replace(" ", "_")
        cache = str(self.kv.k.dtype).removeprefix("torch.")
        parts = ["eecore", built["version"], runs_on, source.fingerprint, source.dtype, cache]
        if source.weights is not None:
            parts.append(source.weights)
        if exit.contract != Full().contract and not exit.contract.endswith("lossless"):
            parts.append(sha256(exit.contract.encode()).hexdigest()[:6])
        if think is not None:
            parts.append(sha256(think.encode()).hexdigest()[:6])
        return "-".join(parts)

    def knows_full_depth(self, num_requests: int) -> bool:
        """Whether the time of a pass of full depth with ``num_requests`` is known."""
        return self.iterations.planner.chooser.costs.full(num_requests) is not None

    @property
    def requests(self) -> dict[str, Sequence]:
        """The unfinished requests, by id."""
        return dict(self.scheduler.requests)

    def add_request(
        self,
        prompt: str | list[int],
        *,
        exit: Exit | str | None = None,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request and return its id. If this raises anything, nothing is queued.

        Raises:
            RequestError: for a prompt, setting or length that this engine can never serve.
            ExitError: for an exit policy that the model cannot run.
            ModelError: the model that the weights are shared with has changed.
        """
        self.check_held()
        return self.enqueue(self.prepare(prompt, exit=exit, sampling=sampling), request_id)

    def check_held(self) -> None:
        """Check that weights which are shared with another model are still that model's.

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
        """A request for :meth:`enqueue`. The engine does not change, so that any thread may prepare
        a request while another steps.

        Raises:
            RequestError: for a prompt, setting or length that this engine can never serve.
            ExitError: for an exit policy that the model cannot run.
        """
        return self.intake.sequence(prompt, exit, sampling)

    def compile(self, guide: Guide) -> None:
        """Compile a guide before a request that follows it; any thread may call this.

        Raises:
            GuideError: it cannot be compiled, or nothing can follow it.
        """
        self.intake.guides.follow(guide)

    def enqueue(self, sequence: Sequence, request_id: str | None = None) -> str:
        """Queue a request from :meth:`prepare`, once, and return its id.

        Raises:
            RequestError: for an id that is in use, or is no string.
        """
        request_id = self._own_id(request_id)
        sequence.request_id, sequence.arrival = request_id, self._arrivals
        self._arrivals += 1
        return self.scheduler.add(sequence).request_id

    def step(self) -> list[StepOutput]:
        """One iteration of all requests that can run; returns what each request got.

        A request that makes the iteration fail ends with ``finish_reason`` "error", and so does a
        request for whose next token the model gives NaN or infinity; the other requests go on. If
        no request is at fault, all of them end in this way. A ``BaseException`` that is no
        ``Exception``, such as KeyboardInterrupt, passes through.

        On a GPU the next iteration may be in flight when this one returns: its outcome is discarded
        for requests that turn out to be finished.
        """
        try:
            if not self._outbox:
                self._advance()
        except BaseException as error:
            self._end_all(error)
            if not isinstance(error, Exception):
                raise
        return self._outbox.pop(0) if self._outbox else []

    def cancel(self, request_id: str) -> Output | None:
        """End a request now and free its pages; None when it is not (or no longer) known."""
        sequence = self.scheduler.requests.get(request_id)
        if sequence is None:
            return None
        with self._or_end_all():
            output = self._commits.end(sequence, time.perf_counter()).output
            self.scheduler.finish(sequence)
        return output

    def hold(self, request_id: str) -> None:
        """Leave a request out of the next steps until :meth:`resume`, if it is unfinished.

        The request keeps its pages as long as no other request needs them, and delays no other.
        """
        sequence = self.scheduler.requests.get(request_id)
        if sequence is not None:
            with self._or_end_all():
                self.scheduler.hold(sequence)

    def resume(self, request_id: str) -> None:
        """Let a request on hold go on; its output is the same as without the hold."""
        sequence = self.scheduler.requests.get(request_id)
        if sequence is not None:
            with self._or_end_all():
                self.scheduler.resume(sequence)

    def reset_prefix_cache(self) -> None:
        """Forget the contents of pages that no unfinished request holds."""
        with self._or_end_all():
            self.scheduler.pages.reset()

    def run(self) -> Iterator[StepOutput]:
        """Step until nothing is left but requests on hold."""
        while self.has_runnable:
            yield from self.step()

    def _count(self, status: SequenceStatus) -> int:
        return sum(s.status is status for s in list(self.scheduler.requests.values()))

    def _own_id(self, request_id: str | None) -> str:
        """The id that a new request asks for, or an unused one."""
        requests = self.scheduler.requests
        given = {step.request_id for steps in self._outbox for step in steps}
        if request_id is None:
            names = (f"request-{number}" for number in itertools.count(self._arrivals))
            return next(name for name in names if name not in requests and name not in given)
        if not isinstance(request_id, str):
            raise RequestError(f"request_id: expected a string, got {shown(request_id)}")
        request_id = str.__str__(request_id)
        if request_id in requests or request_id in given:
            raise RequestError(f"request_id: {request_id!r} is in use")
        return request_id

    # A step

    def _advance(self) -> None:
        """Schedule an iteration, run it, and commit what it did."""
        flight, self._flight = self._flight, None  # it is run again if this fails
        following: Flight | None = None
        if flight is None or flight.is_over:
            works = self.scheduler.schedule()
            flight = self._launch(works) if works and self.iterations.ahead else None
        else:
            works = flight.works
        outcomes = None
        if flight is not None:
            next_works = self.scheduler.schedule_ahead(flight.works)
            following = self._launch(next_works, flight) if next_works else None
            outcomes = self._land(flight)
        if outcomes is None:
            if flight is not None:
                works = [w for w in works if w.sequence.status is SequenceStatus.RUNNING]
            following = None
            run = partial(self.iterations.iterate, others_wait=bool(self.scheduler.waiting))
            outcomes = isolated(run, works, self._failed) if works else []
        self._commit(outcomes, () if following is None else following.places)
        self._flight = following

    def _launch(self, works: list[Work], after: Flight | None = None) -> Flight | None:
        """An iteration in flight; None where it has to be waited for, or fails to launch."""
        try:
            is_planned = after is None or after.is_planned
            others_wait = is_planned and bool(self.scheduler.waiting)
            return self.iterations.launch(works, after, others_wait=others_wait)
        except Exception:
            self._failed("an iteration could not be launched")
            return None

    def _land(self, flight: Flight) -> list[Outcome] | None:
        """The outcomes of a flight; None where its requests have to be run again."""
        try:
            outcomes = self.iterations.land(flight)
        except Exception:
            self._failed("an iteration in flight failed")
            return None
        for outcome in outcomes:
            if outcome.error is not None or outcome.is_cut:
                return None
        return outcomes

    def _commit(self, outcomes: list[Outcome], going_on: Container[Sequence]) -> None:
        """Commit the outcomes of an iteration to the requests."""
        steps = list[StepOutput]()
        self._outbox.append(steps)
        self.num_failed_iterations += self._commits.put(outcomes, steps, going_on)

    def _failed(self, what: str) -> None:
        """Count and log the exception that is being handled."""
        self.num_failed_iterations += 1
        LOGGER.warning("%s", what, exc_info=True)

    # After an error that no request has caused

    def _empty(self) -> None:
        """Begin empty: no requests, all pages free."""
        cache = None
        if self.has_prefix_cache:
            cache = PrefixCache(self.config.page_size, self.network.config.num_layers)
        states = StatePool(self._num_states, self.kv.copy_state) if self._num_states else None
        pages = PageAllocator(self.config.num_pages, self.config.page_size, cache, states)
        self._flight = None
        keyed = self.kv.of_head is not None
        draft_keys = max_ahead(self.network.draft_head) + 1 if keyed else 0
        self.scheduler = Scheduler(self.config, pages, draft_keys=draft_keys)
        self._commits = Commits(
            self.network.config.num_layers, self.scheduler, self.fingerprint, keyed=keyed
        )

    def _end_all(self, error: BaseException) -> None:
        """End all requests with an error that none of them has caused, and begin empty."""
        self._failed("all requests end with an error that none of them has caused")
        now, why = time.perf_counter(), f"engine: expected no error, got {described(error)}"
        ended = {s.request_id for steps in self._outbox for s in steps if s.finished}
        unfinished = [s for s in self.scheduler.requests.values() if s.request_id not in ended]
        for sequence in unfinished:
            sequence.status = SequenceStatus.FINISHED
        self._empty()
        self._outbox.append([self._commits.last_step(s, now, why) for s in unfinished])

    @contextmanager
    def _or_end_all(self) -> Iterator[None]:
        """A change of requests that is completed, or ends all requests."""
        try:
            yield
        except BaseException as error:
            self._end_all(error)
            raise
