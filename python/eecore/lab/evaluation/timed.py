"""Exit policies on the same prompts in turns: their texts, speeds and depths."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from eecore.calibration.generated import generated
from eecore.calibration.similarity import SIMILARITIES
from eecore.errors import RequestError
from eecore.exit_text import exit_text
from eecore.exits import ConfidentExit, Exit, Full, SelfSpeculative
from eecore.generation import Model
from eecore.models import Tokenizer
from eecore.output import Output


@dataclass
class TimedRun:
    """One policy's outputs, and its times in each round."""

    policy: Exit
    outputs: list[Output] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    """Inner-token latency of each round: the sum over sequences of (finish - first token) /
    generated tokens (early-exit framework §5.2).
    """

    @property
    def name(self) -> str:
        """The policy as a text, with what its own text leaves out."""
        policy, more = self.policy, ""
        if isinstance(policy, ConfidentExit):
            measure = "" if policy.calibration else f" {policy.measure}"
            more = f"{measure} {policy.batch}"
        elif isinstance(policy, SelfSpeculative) and not policy.reuse:
            more = " without reuse"
        return exit_text(policy) + more

    @property
    def tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s of the fastest round."""
        return self.tokens / min(self.seconds)

    @property
    def mean_exit_layer(self) -> float:
        layers = [layer for output in self.outputs for layer in output.exit_layers]
        return sum(layers) / len(layers)

    @property
    def acceptance(self) -> float | None:
        """Acceptance rate: accepted drafts / drafted tokens; None when nothing was drafted."""
        drafted = sum(output.stats.drafted for output in self.outputs)
        accepted = sum(output.stats.accepted for output in self.outputs)
        return accepted / drafted if drafted else None

    def speedup_over(self, other: TimedRun) -> float:
        """Tokens/s over another run's: the median of the rounds' ratios, as both ran in turns."""
        return self.tokens / other.tokens * median_ratio(other.seconds, self.seconds)

    def latency_speedup_over(self, other: TimedRun) -> float:
        """Another run's inner-token latency over this one's, likewise."""
        return median_ratio(other.latencies, self.latencies)

    def mean_similarity(self, metric: str, references: Sequence[str | None]) -> float | None:
        """The mean similarity to the references, one a prompt; None where there are none."""
        found = [
            SIMILARITIES[metric](output.text or "", reference)
            for output, reference in zip(self.outputs, references, strict=True)
            if reference is not None
        ]
        return statistics.fmean(found) if found else None

    def record(self, outputs: Sequence[list[Output]], seconds: float) -> None:
        """Add a round; its outputs, by group of prompts, replace the last round's."""
        self.outputs = [output for group in outputs for output in group]
        self.seconds.append(seconds)
        stats = [output.stats for output in self.outputs]
        after_first = sum(each.total_s - each.time_to_first_token_s for each in stats)
        self.latencies.append(after_first / self.tokens)


def checked_tokenizer(model: Model, metric: str) -> Tokenizer:
    """The tokenizer of a model, for a metric of :data:`SIMILARITIES`.

    Raises:
        RequestError: there is no tokenizer or no such metric, or a package is missing.
    """
    if model.tokenizer is None:
        raise RequestError("evaluate: expected a model with a tokenizer, got one without")
    if metric not in SIMILARITIES:
        raise RequestError(f"metric: expected {' or '.join(SIMILARITIES)}, got {metric!r}")
    SIMILARITIES[metric]("", "")
    return model.tokenizer


def median_ratio(over: Iterable[float], under: Iterable[float]) -> float:
    """The median of the ratios of rounds, of two runs that took turns; a run that was stopped may
    have fewer rounds.
    """
    return float(statistics.median(a / b for a, b in zip(over, under, strict=False)))


def time_policies(
    model: Model,
    prompts: Sequence[str | list[int]],
    policies: Sequence[Exit],
    *,
    max_tokens: int,
    batch_size: int = 1,
    rounds: int = 1,
    progress: Callable[[int, TimedRun], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> list[TimedRun]:
    """Generate greedily with each policy and with :class:`eecore.Full`, which is the first of the
    result. Each round begins with another policy. Every prompt is computed each time: there is no
    prefix cache.

    Args:
        model: from :func:`eecore.load`.
        prompts: texts, or token ids.
        policies: compared with ``Full()``.
        max_tokens: new tokens a prompt.
        batch_size: prompts that run together.
        rounds: the number of times that each policy takes its turn.
        progress: called with the round and the run after each turn.
        should_stop: called after each group of prompts; True returns the runs with their finished
            turns: some have one less than others, or none.
    """
    for name, value in (("max_tokens", max_tokens), ("batch_size", batch_size), ("rounds", rounds)):
        if value < 1:
            raise RequestError(f"{name}: expected 1 or more, got {value}")
    if not prompts:
        raise RequestError("prompts: expected at least one, got none")
    for policy in policies:
        policy.check(model.config)
    groups = [
        list(prompts[first : first + batch_size]) for first in range(0, len(prompts), batch_size)
    ]
    model = model.without_prefix_cache()
    runs = [TimedRun(policy) for policy in (Full(), *policies)]
    generated(model, groups[0], max_tokens=1)
    for number in range(rounds):
        first = number % len(runs)
        for run in [*runs[first:], *runs[:first]]:
            outputs: list[list[Output]] = []
            begin = time.perf_counter()
            for group in groups:
                outputs.append(generated(model, group, exit=run.policy, max_tokens=max_tokens))
                stops = should_stop is not None and should_stop()
                if stops and len(outputs) < len(groups):
                    return runs
            run.record(outputs, time.perf_counter() - begin)
            if progress is not None:
                progress(number, run)
            if stops:
                return runs
    return runs
