"""Decoding steps of an engine, each timed."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import eecore

ARRIVING = 64  # length of an arriving prompt
PAGE_SIZE = 16


class Step(NamedTuple):
    """One iteration of an engine."""

    seconds: float
    exit_layers: list[int]
    """The exit layers of the step's tokens."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Requests that decode together."""

    prompts: list[list[int]]
    policies: list[eecore.exits.Exit]
    sampled: int = 0
    """The number of requests, from the first on, that sample."""
    arriving: list[int] | None = None
    """A prompt that arrives before every step and asks for one token."""


class Decoding:
    """An engine that decodes the same batches, one after the other, every round."""

    def __init__(self, model: eecore.Model, batches: Sequence[Batch], steps: int) -> None:
        self._batches = batches
        first = batches[0]
        self._rows = len(first.prompts)
        most = max(policy.max_drafts for policy in first.policies)
        self._steps = steps
        # Enough tokens that no request finishes or drafts less before the last step.
        self._room = 1 + (self._steps + 1) * (most + 1)
        prompt = max(len(prompt) for batch in batches for prompt in batch.prompts)
        pages = 2 + (2 * prompt + self._room) // PAGE_SIZE
        arriving = 2 * ARRIVING if first.arriving else 0
        config = dataclasses.replace(
            model.engine_config,
            kv_cache_tokens=self._rows * (pages + 1) * PAGE_SIZE + arriving,
            page_size=PAGE_SIZE,
            max_num_seqs=self._rows + 1,
        )
        self._engine = model.engine(config)
        self.rounds: list[list[Step]] = []

    def round(self) -> None:
        """Run all batches once."""
        self.rounds.append([step for batch in self._batches for step in self._decode(batch)])

    def _decode(self, batch: Batch) -> list[Step]:
        engine = self._engine
        ids = set()
        for row, (prompt, policy) in enumerate(zip(batch.prompts, batch.policies, strict=True)):
            sampling = eecore.SamplingParams(
                max_tokens=self._room,
                temperature=0.8 if row < batch.sampled else 0.0,
                seed=row,
                ignore_eos=True,
            )
            ids.add(engine.add_request(prompt, exit=policy, sampling=sampling))
        waiting = set(ids)
        while waiting:
            waiting -= {output.request_id for output in engine.step()}
        steps: list[Step] = []
        for _ in range(self._steps):
            if batch.arriving is not None:
                one = eecore.SamplingParams(max_tokens=1, ignore_eos=True)
                engine.add_request(batch.arriving, exit="full", sampling=one)
            began = time.perf_counter()
            outputs = engine.step()
            seconds = time.perf_counter() - began
            own = (output.exit_layers for output in outputs if output.request_id in ids)
            steps.append(Step(seconds, [layer for layers in own for layer in layers]))
        for request_id in ids:
            engine.cancel(request_id)
        return steps

    @property
    def exits(self) -> list[list[int]]:
        """The exit layers of each step, the same in every round."""
        return [step.exit_layers for step in self.rounds[-1]]

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens of a request in a step."""
        return statistics.fmean(map(len, self.exits)) / self._rows

    @property
    def step_ms(self) -> float:
        """Mean milliseconds of a step, each by its fastest round."""
        steps = zip(*self.rounds, strict=False)
        return statistics.fmean(min(s.seconds for s in same) for same in steps) * 1e3

    @property
    def fastest_ms(self) -> float:
        """Milliseconds of the fastest step of all."""
        return min(step.seconds for steps in self.rounds for step in steps) * 1e3

    @property
    def token_ms(self) -> float:
        """Milliseconds per token of each request, by :attr:`step_ms`."""
        return self.step_ms / self.tokens_per_step

    @property
    def median_token_ms(self) -> float:
        """Milliseconds per token of each request, by the median round."""
        rounds = [statistics.fmean(step.seconds for step in steps) for steps in self.rounds]
        return statistics.median(rounds) * 1e3 / self.tokens_per_step
