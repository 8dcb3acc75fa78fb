"""The engine: requests come in, each step moves all of them, tokens come out.

A step that fails changes no request: nothing of an iteration is committed before all of it is done.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, replace

from eecore.config import EngineConfig, SamplingParams, T5Config
from eecore.decoding.capture import Capture, RunProgram, run_program_on
from eecore.decoding.iterate import Flight, Iterations
from eecore.decoding.outcome import Outcome
from eecore.decoding.route import route_of
from eecore.engine.text import TextStream
from eecore.errors import RequestError
from eecore.exits import Exit, Full
from eecore.models import KVCache, Network, Tokenizer
from eecore.output import Output, RequestStats, StepOutput
from eecore.scheduling.pages import PageAllocator
from eecore.scheduling.scheduler import Scheduler
from eecore.scheduling.sequence import Sequence, TokenRecord
from eecore.values import as_index, shown

__all__ = ["Engine", "RunProgram"]


class Engine:
    """Continuous batching over one model, with an exit policy per request.

    Args:
        network: the model.
        tokenizer: its tokenizer; without one prompts are token ids, and there are no texts.
        config: limits.
        run: how decoding programs run; what suits the device when None.
        ahead: whether a program's next run is launched before the outcome of this one is known;
            where the device works on its own when None.
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
            dtype=network.dtype,
        )
        self.pages = PageAllocator(self.config.num_pages, self.config.page_size)
        self.iterations = Iterations(
            network, kv, run or run_program_on(network.device), ahead=ahead
        )
        self._num_layers = network.config.num_layers
        self._flight: Flight | None = None
        self.scheduler = Scheduler(self.config, self.pages)
        self._sequences: dict[str, Sequence] = {}
        self._texts: dict[str, TextStream] = {}
        self._arrivals = 0
        self._seeds = random.Random()

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    @property
    def has_runnable(self) -> bool:
        """Whether a step would get anywhere: not with requests alone that are on hold."""
        return self.scheduler.has_runnable

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_held(self) -> int:
        return len(self.scheduler.held)

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
        return dict(self._sequences)

    def add_request(
        self,
        prompt: str | list[int],
        *,
        exit: Exit | None = None,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request and return its id.

        Raises:
            RequestError: for a prompt, setting or length that this engine can never serve.
            ExitError: for an exit policy that the model cannot run.
        """
        return self.enqueue(self.prepare(prompt, exit=exit, sampling=sampling), request_id)

    def prepare(
        self,
        prompt: str | list[int],
        *,
        exit: Exit | None = None,
        sampling: SamplingParams | None = None,
    ) -> Sequence:
        """A request for :meth:`enqueue`. Nothing of the engine changes, so that any thread may
        prepare one while another steps.

        Raises:
            RequestError: for a prompt, setting or length that this engine can never serve.
            ExitError: for an exit policy that the model cannot run.
        """
        sampling = SamplingParams() if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            raise RequestError(f"sampling: expected SamplingParams, got {shown(sampling)}")
        policy = Full() if exit is None else exit
        if not isinstance(policy, Exit) or type(policy) is Exit:
            raise RequestError(f"exit: expected an exit policy such as Full(), got {shown(policy)}")
        prompt_ids = self._tokenize(prompt)
        config = self.network.config
        policy.check(config.num_layers, config.hidden_size)
        policy.check_request(self.network.source, sampling.temperature)
        input_ids = None
        if isinstance(config, T5Config):
            prompt_ids, input_ids = [config.decoder_start_token_id], prompt_ids
        self._check_length(len(prompt_ids), input_ids, sampling.max_tokens)
        self._check_sampling(sampling)
        if sampling.seed is None:
            sampling = replace(sampling, seed=self._seeds.getrandbits(63))
        return Sequence(
            request_id="",
            prompt_ids=prompt_ids,
            sampling=sampling,
            exit=policy,
            arrival=-1,
            eos_token_ids=frozenset(config.eos_token_ids),
            input_ids=input_ids,
        )

    def enqueue(self, sequence: Sequence, request_id: str | None = None) -> str:
        """Queue what :meth:`prepare` made, once, and return its id.

        Raises:
            RequestError: for an id that is in use, or is no string.
        """
        if request_id is not None and not isinstance(request_id, str):
            raise RequestError(f"request_id: expected a string, got {shown(request_id)}")
        if request_id is None:
            request_id = self._unused_id()
        if request_id in self._sequences:
            raise RequestError(f"request_id: {request_id!r} is in use")
        sequence.request_id, sequence.arrival = request_id, self._arrivals
        self._arrivals += 1
        self._sequences[request_id] = sequence
        if self.tokenizer is not None:
            before = sequence.prompt_ids if sequence.input_ids is None else []
            self._texts[request_id] = TextStream(self.tokenizer, before, sequence.sampling.stop)
        self.scheduler.add(sequence)
        return request_id

    def step(self) -> list[StepOutput]:
        """One iteration for everybody who can run; returns what each request got.

        On a GPU the next iteration may be under way when it returns: requests that turn out to be
        finished have its outcome discarded.
        """
        flight, self._flight = self._flight, None
        if flight is None or flight.is_over:
            works = self.scheduler.schedule()
            if not works:
                return []
            flight = self.iterations.launch(works)
            if flight is None:
                return self._commit_all(self.iterations.iterate(works))
        try:
            works = self.scheduler.schedule_ahead(flight.works)
            self._flight = self.iterations.launch(works, flight) if works else None
            return self._commit_all(flight.land())
        except BaseException:
            self._flight = None  # it goes on from tokens that nobody has taken over
            raise

    def cancel(self, request_id: str) -> Output | None:
        """End a request now; its pages go back. None when it is not (or no longer) known."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._finish(sequence, "cancelled")

    def hold(self, request_id: str) -> None:
        """Leave a request out of the next steps until :meth:`resume`, if it is unfinished.

        It keeps its pages as long as nobody else needs them, and stands in nobody's way.
        """
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self.scheduler.hold(sequence)

    def resume(self, request_id: str) -> None:
        """Let a request go on that was on hold; its output is what it would have been anyway."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self.scheduler.resume(sequence)

    def run(self) -> Iterator[StepOutput]:
        """Step until nothing is left but requests on hold."""
        while self.has_runnable:
            yield from self.step()

    def _tokenize(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "prompt: expected token ids, since the model has no tokenizer; got a string"
                )
            if not prompt:
                raise RequestError("prompt: expected some text, got an empty string")
            try:
                prompt = self.tokenizer.encode(prompt)
            except Exception as error:  # half of a surrogate pair, for one
                raise RequestError(
                    f"prompt: expected text that the tokenizer takes, got {shown(prompt)}: {error}"
                ) from error
        if not isinstance(prompt, (list, tuple)):
            raise RequestError(
                f"prompt: expected a string or a list of token ids, got {shown(prompt)}"
            )
        if not prompt:
            raise RequestError("prompt: expected at least one token, got none")
        return [self._token_id(token) for token in prompt]

    def _token_id(self, token: object) -> int:
        vocab_size = self.network.config.vocab_size
        number = token if type(token) is int else as_index(token)
        if number is None or not 0 <= number < vocab_size:
            raise RequestError(
                f"prompt: expected token ids 0..{vocab_size - 1}, got {shown(token)}"
            )
        return number

    def _check_sampling(self, sampling: SamplingParams) -> None:
        """Of what only the model tells whether it can be."""
        vocab_size = self.network.config.vocab_size
        if sampling.stop and self.tokenizer is None:
            raise RequestError("stop: expected a model with a tokenizer for stop strings")
        if sampling.logprobs is not None and sampling.logprobs > vocab_size:
            raise RequestError(
                f"logprobs: expected at most {vocab_size}, the size of the vocabulary, "
                f"got {sampling.logprobs}"
            )

    def _unused_id(self) -> str:
        names = (f"request-{number}" for number in itertools.count(self._arrivals))
        return next(name for name in names if name not in self._sequences)

    def _check_length(
        self, prompt_tokens: int, input_ids: list[int] | None, max_tokens: int
    ) -> None:
        total = prompt_tokens + max_tokens
        given, config = f"prompt of {prompt_tokens} tokens", self.network.config
        if total > config.max_position:
            raise RequestError(
                f"{given} and max_tokens={max_tokens}: expected at most {config.max_position} "
                f"together, the size of the model's context, got {total}"
            )
        pages = self.pages.pages_for(total)
        if input_ids is not None:
            assert isinstance(config, T5Config)
            most, given = self.config.max_input_tokens, f"input of {len(input_ids)} tokens"
            if len(input_ids) > (most or config.max_input):
                what = "max_input_tokens" if most else "what the model was made for"
                raise RequestError(
                    f"{given}: expected at most {most or config.max_input}, {what}"
                    + ("" if most else " (max_input_tokens of the engine sets another limit)")
                )
            pages += self.pages.pages_for(len(input_ids))
            total += len(input_ids)
        if pages > self.pages.num_pages:
            room = self.pages.num_pages * self.pages.page_size
            raise RequestError(
                f"{given} and max_tokens={max_tokens}: expected at most {room} together, the size "
                f"of the KV cache (kv_cache_tokens), got {total}"
            )

    def _commit_all(self, outcomes: list[Outcome]) -> list[StepOutput]:
        now = time.perf_counter()
        return [step for outcome in outcomes if (step := self._commit(outcome, now)) is not None]

    def _commit(self, outcome: Outcome, now: float) -> StepOutput | None:
        """Take over what an iteration did for a sequence; None when no token came out."""
        sequence, records = outcome.sequence, outcome.records
        sequence.counters.add(outcome.counters)
        if outcome.draft_stop is not None:
            sequence.draft_stop = outcome.draft_stop
        computed = range(sequence.num_computed, outcome.num_computed)
        sequence.num_computed = outcome.num_computed
        sequence.is_encoded = sequence.input_ids is not None
        sequence.kv_exit_layers += outcome.kv_exit_layers
        if not records or min(outcome.kv_exit_layers, default=0) < self._num_layers:
            self._mark_approximate(sequence, computed)
        if not records:
            return None
        if sequence.times.first_token is None:
            sequence.times.first_token = now

        text = self._texts.get(sequence.request_id)
        reason = None
        for added, record in enumerate(records, 1):
            reason = self._append(sequence, record, text)
            if reason is not None:
                records = records[:added]
                break
        output = None
        if reason is not None:
            output = self._finish(sequence, reason)
        elif sequence.max_drafts and (self._flight is None or sequence not in self._flight.places):
            self.scheduler.crop(sequence)
        return StepOutput(
            request_id=sequence.request_id,
            token_ids=[record.token_id for record in records],
            exit_layers=[record.exit_layer for record in records],
            confidences=[record.confidence for record in records],
            output=output,
            piece=None if text is None else text.piece(final=reason is not None),
        )

    def _mark_approximate(self, sequence: Sequence, computed: range) -> None:
        """Remember which pages of newly computed positions lack a layer's own work."""
        size, prompt = self.pages.page_size, sequence.num_prompt_tokens
        num_layers = self._num_layers
        if route_of(sequence, num_layers).depth < num_layers:
            for position in computed:
                self.pages.mark_approximate([sequence.pages[position // size]])
            return
        for position in range(max(prompt, computed.start), computed.stop):
            if sequence.kv_exit_layers[position - prompt] < num_layers:
                self.pages.mark_approximate([sequence.pages[position // size]])

    def _append(
        self, sequence: Sequence, record: TokenRecord, text: TextStream | None
    ) -> str | None:
        """One more token; returns why the sequence ends, or None."""
        token = record.token_id
        sequence.records.append(record)
        sequence.output_ids.append(token)
        if token in sequence.stop_ids or (text is not None and text.push(token)):
            return "stop"
        return "length" if sequence.tokens_left == 0 else None

    def _finish(self, sequence: Sequence, reason: str) -> Output:
        self.scheduler.finish(sequence)
        del self._sequences[sequence.request_id]
        text = self._texts.pop(sequence.request_id, None)
        if text is not None:
            text.finish()
        sequence.times.finished = time.perf_counter()
        records = sequence.records
        asked = sequence.sampling.logprobs
        return Output(
            request_id=sequence.request_id,
            prompt_token_ids=sequence.given_ids,
            token_ids=list(sequence.output_ids),
            text=None if text is None else text.text,
            finish_reason=reason,
            exit_layers=[record.exit_layer for record in records],
            confidences=[record.confidence for record in records],
            logprobs=None if asked is None else [r.logprob or 0.0 for r in records],
            top_logprobs=None if not asked else [r.top_logprobs or {} for r in records],
            stats=self._stats(sequence),
        )

    def _stats(self, sequence: Sequence) -> RequestStats:
        times, count = sequence.times, len(sequence.records)
        assert times.finished is not None
        first = times.first_token if times.first_token is not None else times.finished
        depth = sum(record.exit_layer for record in sequence.records)
        return RequestStats(
            contract=sequence.exit.contract,
            num_layers=self.network.config.num_layers,
            prompt_tokens=len(sequence.given_ids),
            generated_tokens=count,
            time_to_first_token_s=first - times.arrived,
            total_s=times.finished - times.arrived,
            mean_exit_layer=depth / count if count else 0.0,
            **asdict(sequence.counters),
        )
