"""Decoding steps of an engine, each timed."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import eecore

PAGE_SIZE = 16


class Step(NamedTuple):
    """One iteration of an engine."""

    seconds: float
    exit_layers: list[int]
    """The exit layers of the step's tokens."""


class Decoding:
    """An engine that decodes the same batches of prompts, one after the other, every round."""

    def __init__(
        self,
        model: eecore.Model,
        batches: Sequence[Sequence[list[int]]],
        policy: eecore.exits.Exit,
        steps: int,
        temperature: float = 0.0,
    ) -> None:
        self._batches, self._policy, self._steps = batches, policy, steps
        self._rows = len(batches[0])
        self._temperature = temperature
        # Enough tokens that no request finishes or drafts less before the last step.
        self._room = 1 + (steps + 1) * (policy.max_drafts + 1)
        prompt = max(len(prompt) for batch in batches for prompt in batch)
        pages = 2 + (2 * prompt + self._room) // PAGE_SIZE
        config = dataclasses.replace(
            model.engine_config,
            kv_cache_tokens=self._rows * (pages + 1) * PAGE_SIZE,
            page_size=PAGE_SIZE,
            max_num_seqs=self._rows + 1,
        )
        self._engine = model.engine(config)
        self.rounds: list[list[Step]] = []

    def round(self) -> None:
        """Run all batches once."""
        self.rounds.append([step for batch in self._batches for step in self._decode(batch)])

    def _decode(self, batch: Sequence[list[int]]) -> list[Step]:
        engine = self._engine
        sampling = eecore.SamplingParams(
            max_tokens=self._room, ignore_eos=True, temperature=self._temperature, seed=0
        )
        ids = {engine.add_request(p, exit=self._policy, sampling=sampling) for p in batch}
        waiting = set(ids)
        while waiting:
            waiting -= {output.request_id for output in engine.step()}
        steps: list[Step] = []
        for _ in range(self._steps):
            began = time.perf_counter()
            outputs = engine.step()
            seconds = time.perf_counter() - began
            steps.append(Step(seconds, [e for output in outputs for e in output.exit_layers]))
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
    def token_ms(self) -> float:
        """Milliseconds per token of each request, by :attr:`step_ms`."""
        return self.step_ms / self.tokens_per_step
