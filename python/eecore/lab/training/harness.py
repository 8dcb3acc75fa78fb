"""A training run, of a model or a draft head: step, log, evaluate, save, and resume.

A :class:`Trainee` knows its data and its loss; the run owns the steps, the learning rates, the
optimizer, the logs and the state. A stopped or killed run continues, once resumed, exactly as if it
had not been stopped. Of several processes (:class:`Processes`) each computes its share of a step,
and the first one writes.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eecore.errors import TrainingError
from eecore.lab.training.processes import Processes, whole
from eecore.lab.training.recipe import RunConfig
from eecore.lab.training.run_log import EVALUATIONS, STEPS, RunLog
from eecore.lab.training.run_state import RunState, load_state, save_state

STATE_FILE = "state.safetensors"
STEP_COLUMNS = ("step", "tokens", "learning_rate", "gradient_norm", "loss")


@dataclass(frozen=True)
class Losses:
    """The losses of a step; those of several processes add up.

    Attributes:
        loss: the value whose gradients were computed.
        tokens: read by it.
        values: further values for the log, by column; missing columns stay empty. Every process has
            the same columns.
    """

    loss: Tensor
    tokens: int
    values: Mapping[str, Tensor]


class Trainee(ABC):
    """A model or head that a run trains.

    Attributes:
        config: the settings of the run.
        module: its parameters with gradients are trained and saved.
        step_columns: columns of the log of steps, after those of every run.
        evaluation_columns: columns of the log of evaluations, after the step and the tokens.
    """

    config: RunConfig
    module: nn.Module
    step_columns: tuple[str, ...]
    evaluation_columns: tuple[str, ...]

    @abstractmethod
    def digest(self) -> str:
        """A hash of the training data."""

    @abstractmethod
    def backward(self, step: int) -> Losses:
        """Add the gradients of this process's share of the batch of a step."""

    @abstractmethod
    def evaluate(self) -> tuple[float, ...] | None:
        """The values of the evaluation columns over all processes; None: there is no held-out
        data.
        """

    @abstractmethod
    def describe(self, values: Mapping[str, float]) -> str:
        """The values of a step in words."""

    @abstractmethod
    def describe_evaluation(self, values: Mapping[str, float]) -> str:
        """The values of an evaluation in words."""

    def rates(self, name: str, parameter: nn.Parameter) -> tuple[bool, float]:  # noqa: ARG002
        """Whether a parameter decays, and its learning rate as a share of the run's."""
        return parameter.ndim > 1, 1.0


@dataclass(frozen=True)
class StepReport:
    """A finished training step.

    Attributes:
        step: steps done, this one included.
        steps: steps of the run.
        tokens: read so far.
        loss: this step's loss.
        values: further values of its log, by column.
        tokens_per_s: since the run started or was resumed.
        seconds_left: at the speed of the steps since then.
        described: the values in words.
        evaluated: the evaluation after this step in words, when there was one.
    """

    step: int
    steps: int
    tokens: int
    loss: float
    values: Mapping[str, float]
    tokens_per_s: float
    seconds_left: float
    described: str
    evaluated: str | None = None


class TrainingRun:
    """A run between two steps; its state and its logs are in a directory.

    Args:
        saved: the checked state in the directory to resume from; None begins.
    """

    def __init__(
        self, trainee: Trainee, directory: Path, saved: RunState[Any] | None = None
    ) -> None:
        self.trainee, self.directory, self._path = trainee, directory, directory / STATE_FILE
        self._processes = Processes.current()
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self._is_fresh, self._digest = saved is None, trainee.digest()
        self._parameters = [each for each in trainee.module.parameters() if each.requires_grad]
        self._optimizer = _optimizer(trainee)
        if saved is not None:
            load_state(self._path, saved.step, trainee.module, self._optimizer)
            self.step, self.tokens, self.seconds = saved.step, saved.tokens, saved.seconds
        columns = {
            STEPS: (*STEP_COLUMNS, *trainee.step_columns),
            EVALUATIONS: ("step", "tokens", *trainee.evaluation_columns),
        }
        self._log = None
        if self._processes.is_first:
            directory.mkdir(parents=True, exist_ok=True)
            self._log = RunLog(directory, columns, self.step, trainee.config.tensorboard)
        self._saved_at = time.monotonic()

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._log is not None:
            self._log.close()

    def all_steps(
        self,
        progress: Callable[[StepReport], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        max_seconds: float | None = None,
    ) -> bool:
        """Train to the end (True), or until stopped (False); the state is saved either way.

        When one process is told to stop, all stop. With ``max_seconds``, of a single process, the
        step after which the run has taken as long is the last.
        """
        config, trainee = self.trainee.config, self.trainee
        trainee.module.train()
        if self._is_fresh:
            self._evaluate()
            self._save()  # a full disk is found out now, not in an hour
        begun, first, tokens, seconds = time.monotonic(), self.step, self.tokens, self.seconds
        while self.step < config.steps:
            loss, values = self._one_step()
            so_far = seconds + time.monotonic() - begun
            is_over = max_seconds is not None and so_far >= max_seconds
            is_last = is_over or self.step == config.steps
            evaluates = is_last or self.step % config.evaluate_steps == 0
            evaluated = self._evaluate() if evaluates else None
            spent = time.monotonic() - begun
            self.seconds = seconds + spent
            asked = should_stop is not None and should_stop()
            stops, saves = self._processes.any(asked and not is_last, self._save_is_due())
            if stops or is_last or saves:
                self._save()
            if progress is not None:
                progress(
                    StepReport(
                        step=self.step,
                        steps=config.steps,
                        tokens=self.tokens,
                        loss=loss,
                        values=values,
                        tokens_per_s=(self.tokens - tokens) / spent,
                        seconds_left=(config.steps - self.step) * spent / (self.step - first),
                        described=trainee.describe(values),
                        evaluated=evaluated,
                    )
                )
            if stops or is_over:
                return not stops
        return True

    def _one_step(self) -> tuple[float, dict[str, float]]:
        """The loss of a step, and its values by column."""
        config, trainee = self.trainee.config, self.trainee
        rate = config.learning_rate_at(self.step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["rate_scale"]
        self._optimizer.zero_grad()
        found = trainee.backward(self.step)
        self._processes.add_gradients(self._parameters)
        norm = nn.utils.clip_grad_norm_(self._parameters, config.max_grad_norm)
        gradient_norm = float(whole(norm))
        shares = torch.stack([found.loss.detach(), *found.values.values()]).double().cpu()
        tokens = torch.tensor([found.tokens], dtype=torch.float64)
        num_tokens, loss, *others = self._processes.total(torch.cat([tokens, shares])).tolist()
        values = dict(zip(found.values, others, strict=True))
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            raise TrainingError(
                f"step {self.step + 1}: expected finite numbers, got loss {loss} and gradient norm "
                f"{gradient_norm}: try a lower learning rate (this one: {rate:g})"
            )
        self._optimizer.step()
        self.step += 1
        self.tokens += int(num_tokens)
        own = [values.get(column) for column in trainee.step_columns]
        if self._log is not None:
            self._log.write(STEPS, (self.step, self.tokens, rate, gradient_norm, loss, *own))
        return loss, values

    def _evaluate(self) -> str | None:
        """The evaluation in words, where there is held-out data."""
        scores, columns = self.trainee.evaluate(), self.trainee.evaluation_columns
        if scores is None:
            return None
        if self._log is not None:
            self._log.write(EVALUATIONS, (self.step, self.tokens, *scores))
        return self.trainee.describe_evaluation(dict(zip(columns, scores, strict=True)))

    def _save_is_due(self) -> bool:
        config = self.trainee.config
        steps, seconds = config.checkpoint_steps, config.checkpoint_seconds
        by_steps = steps is not None and self.step % steps == 0
        return by_steps or (seconds is not None and time.monotonic() - self._saved_at >= seconds)

    def _save(self) -> None:
        config, module = self.trainee.config, self.trainee.module
        size = self._processes.size
        state = RunState(self.step, self.tokens, self.seconds, self._digest, config, size)
        save_state(self._path, state, module, self._optimizer)
        self._saved_at = time.monotonic()


def seconds_per_step(
    trainee: Trainee,
    *,
    points: int = 8,
    steps_a_point: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The mean seconds of a step over a run, measured before it starts.

    Curricula make steps dearer or cheaper as a run goes on, so steps are timed at points spread
    over it. Weights, gradients and random states are restored.
    """
    module, random_state = trainee.module, torch.get_rng_state()
    was_training = module.training
    module.train()
    spent = 0.0
    for point in range(points):
        first = (2 * point + 1) * trainee.config.steps // (2 * points)
        for repeat in range(steps_a_point + 1):  # the first one warms up
            if repeat == 1:
                started = clock()
            trainee.backward(min(first + repeat, trainee.config.steps - 1))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        spent += clock() - started
    module.zero_grad()
    module.train(was_training)
    torch.set_rng_state(random_state)
    return spent / (points * steps_a_point)


def _optimizer(trainee: Trainee) -> torch.optim.AdamW:
    config = trainee.config
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in trainee.module.named_parameters():
        if parameter.requires_grad:
            decays, scale = trainee.rates(name, parameter)
            groups.setdefault((config.weight_decay * decays, scale), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": decay, "rate_scale": scale}
            for (decay, scale), parameters in groups.items()
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=True,
    )
