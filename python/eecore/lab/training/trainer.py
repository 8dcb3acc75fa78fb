"""A run of transformers' Trainer over numbered steps: its batches, rates, logs and stops.

The batch of a step depends on the seed and the step alone, so one epoch of the Trainer is the whole
run. A stopped or killed run continues, once resumed, as if it had not been stopped.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from eecore.errors import TrainingError
from eecore.lab.training.libraries import library, no_progress_bars, tensorboard_writer
from eecore.lab.training.processes import any_of, total
from eecore.lab.training.recipe import RunConfig
from eecore.lab.training.run_files import last_checkpoint

library("accelerate")
transformers = library("transformers")
ProgressCallback: Any = library("transformers.trainer_callback").ProgressCallback
LOG_SECONDS = 10.0
"""Seconds between two states of the bar where stderr is not a terminal."""


class StepTrainer(transformers.Trainer):  # type: ignore[misc, name-defined]
    """A Trainer of numbered steps.

    Args:
        model: its parameters with gradients are trained.
        config: the settings of the run.
        directory: for checkpoints and logs.
        batches: the inputs of :meth:`losses`, of every piece of every step, one after the other.
        pieces: of a step, which are computed one after the other.
        evaluates: whether there is held-out data.
        step_columns: names of the values of :meth:`losses` in the log.
        evaluation_columns: names of :meth:`scores` in the log.
        on_cpu: whether the run stays off a GPU that is there.
    """

    def __init__(
        self,
        model: nn.Module,
        config: RunConfig,
        directory: Path,
        batches: Dataset[dict[str, Any]],
        *,
        pieces: int = 1,
        evaluates: bool,
        step_columns: tuple[str, ...],
        evaluation_columns: tuple[str, ...],
        on_cpu: bool = True,
    ) -> None:
        self.config, self.directory = config, directory
        self.step_columns, self.evaluation_columns = step_columns, evaluation_columns
        self.tokens, self.finished, self._seconds_before = 0, False, 0.0
        self._begun = time.monotonic()
        self._values: Tensor | None = None
        arguments = transformers.TrainingArguments(
            output_dir=str(directory),
            max_steps=config.steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=pieces,
            max_grad_norm=config.max_grad_norm,
            seed=config.seed,
            logging_steps=1,
            logging_nan_inf_filter=False,
            eval_strategy="steps" if evaluates else "no",
            eval_steps=config.evaluate_steps,
            eval_on_start=evaluates and last_checkpoint(directory)[0] is None,
            save_strategy="no",  # the callback says when
            save_total_limit=1,
            disable_tqdm=True,
            report_to="none",
            use_cpu=on_cpu,
            log_level="error",
            log_level_replica="error",
        )
        arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs are for torchrun
        uses_cache = getattr(getattr(model, "config", None), "use_cache", None)
        super().__init__(
            model,
            arguments,
            train_dataset=batches,
            eval_dataset=batches if evaluates else None,
        )
        if uses_cache is not None:
            model.config.use_cache = uses_cache  # type: ignore[union-attr]
        self.model_accepts_loss_kwargs = False  # of several pieces the Trainer makes a mean
        self.remove_callback(transformers.PrinterCallback)
        if config.tensorboard and self.is_world_process_zero():
            _, begun = last_checkpoint(directory)
            place = str(directory / "tensorboard")
            board = tensorboard_writer()(place, purge_step=begun + 1 if begun else None)
            self.add_callback(library("transformers.integrations").TensorBoardCallback(board))

    def losses(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
        """The loss of a piece of a step, and values for the log; those of all pieces and
        processes add up.
        """
        raise NotImplementedError

    def scores(self) -> tuple[float, ...]:
        """How good the model is on held-out data, over all processes."""
        raise NotImplementedError

    def tokens_at(self, step: int) -> int:
        """Tokens that all processes read in a step."""
        raise NotImplementedError

    def describe_evaluation(self, values: Mapping[str, float]) -> str:
        """The values of an evaluation in words."""
        raise NotImplementedError

    def rates(self, name: str, parameter: nn.Parameter) -> tuple[bool, float]:  # noqa: ARG002
        """Whether a parameter decays, and its learning rate as a share of the run's."""
        return parameter.ndim > 1, 1.0

    def run(
        self,
        should_stop: Callable[[], bool] | None = None,
        max_seconds: float | None = None,
        *,
        shows: bool = False,
    ) -> bool:
        """Train to the end (True), or until stopped (False); the state is saved either way.

        When one process is told to stop, all stop. With ``max_seconds``, of a single process, the
        step after which the run has taken as long is the last. With ``shows`` there is a bar on
        stderr.
        """
        checkpoint, _ = last_checkpoint(self.directory)
        self.add_callback(_Follower(self, should_stop, max_seconds))
        if shows:
            self.add_callback(_Bar(self))
        with no_progress_bars():
            self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        return self.finished

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.state.global_step)

    @property
    def seconds(self) -> float:
        """The time of the run, that before it was resumed included."""
        return self._seconds_before + time.monotonic() - self._begun

    def seconds_per_step(self, steps: int = 3) -> float:
        """The mean seconds of the first steps, measured before the run starts; nothing changes."""
        random_state, begun = torch.get_rng_state(), 0.0
        for step in range(steps + 1):
            if step == 1:  # the first one warms up
                begun = time.monotonic()
            inputs = self._prepare_inputs(self.train_dataset[step])
            self.compute_loss(self.model, inputs).backward()
        spent = time.monotonic() - begun
        self.model.zero_grad()
        torch.set_rng_state(random_state)
        self._values = None
        return spent / steps

    # What the Trainer calls

    def get_train_dataloader(self) -> DataLoader[dict[str, Any]]:
        """Every piece of this process, in its order; nothing is left to divide."""
        return DataLoader(self.train_dataset, batch_size=1, collate_fn=_alone)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW with the rates of :meth:`rates`."""
        config = self.config
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in (model or self.model).named_parameters():
            if parameter.requires_grad:
                decays, scale = self.rates(name, parameter)
                groups.setdefault((config.weight_decay * decays, scale), []).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": own, "weight_decay": decay, "lr": config.learning_rate * scale}
                for (decay, scale), own in groups.items()
            ],
            betas=(config.beta1, config.beta2),
            fused=True,
        )
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """The rates of the config."""
        config = self.config

        def share(step: int) -> float:
            return config.learning_rate_at(min(step, num_training_steps - 1)) / config.learning_rate

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, share)
        return self.lr_scheduler

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss of a piece, as a sum over pieces and processes: the Trainer makes means."""
        del num_items_in_batch
        loss, values = self.losses(model, inputs)
        found = torch.stack([value.detach().double() for value in values])
        self._values = found if self._values is None else self._values + found
        loss = loss * (self.args.gradient_accumulation_steps * self.args.world_size)
        return (loss, values) if return_outputs else loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:  # noqa: ARG002
        """0: they are not counted."""
        return 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Complete the values of a step, and keep them.

        Raises:
            TrainingError: the loss or a gradient is not finite.
        """
        if "loss" in logs and self._values is not None:
            step, rate = self.step, self.config.learning_rate_at(self.step - 1)
            norm = float(logs.pop("grad_norm"))
            if not (math.isfinite(logs["loss"]) and math.isfinite(norm)):
                raise TrainingError(
                    f"step {step}: expected finite numbers, got loss {logs['loss']} and gradient "
                    f"norm {norm}: try a lower learning rate (this one: {rate:g})"
                )
            self.tokens += self.tokens_at(step - 1)
            shown = zip(self.step_columns, total(self._values).tolist(), strict=True)
            logs |= {name: value for name, value in shown if not math.isnan(value)}
            logs |= {"learning_rate": rate, "gradient_norm": norm}
            logs |= {"tokens": self.tokens, "seconds": self.seconds}
            self._values = None
        super().log(logs, start_time)

    def evaluate(self, *_given: Any, **_named: Any) -> dict[str, float]:
        """Score the model on held-out data."""
        scores = dict(zip(self.evaluation_columns, self.scores(), strict=True))
        found = {f"eval_{name}": value for name, value in scores.items()}
        self.log({**found, "tokens": self.tokens})
        handler: Any = self.callback_handler
        self.control: Any = handler.on_evaluate(self.args, self.state, self.control, found)
        return found


def _alone(items: list[dict[str, Any]]) -> dict[str, Any]:
    return items[0]


class _Bar(ProgressCallback):  # type: ignore[misc]
    """The Trainer's bar, with the loss of the last step; evaluations get lines that stay."""

    def __init__(self, trainer: StepTrainer) -> None:
        super().__init__()
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        super().on_train_begin(args, state, control, **more)
        if self.training_bar is not None:
            self.training_bar.initial = self.training_bar.n = self.current_step = state.global_step
            if not sys.stderr.isatty():
                self.training_bar.mininterval = LOG_SECONDS

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
        if self.training_bar is None:
            return
        if "loss" in logs:
            self.training_bar.set_postfix(loss=f"{logs['loss']:.3f}", refresh=False)
        elif f"eval_{self._trainer.evaluation_columns[-1]}" in logs:
            values = {name.removeprefix("eval_"): value for name, value in logs.items()}
            described = self._trainer.describe_evaluation(values)
            self.training_bar.write(f"step {state.global_step}: {described}", file=sys.stderr)


class _Follower(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Says when a run saves and stops."""

    def __init__(
        self,
        trainer: StepTrainer,
        should_stop: Callable[[], bool] | None,
        max_seconds: float | None,
    ) -> None:
        self._trainer = trainer
        self._should_stop, self._max_seconds = should_stop, max_seconds
        self._saved_at = time.monotonic()

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        trainer = self._trainer
        last: dict[str, float] = next(
            (e for e in reversed(state.log_history) if "seconds" in e), {}
        )
        trainer.tokens = int(last.get("tokens", 0))
        trainer._seconds_before, trainer._begun = float(last.get("seconds", 0.0)), time.monotonic()
        self._saved_at = trainer._begun
        trainer.finished = state.global_step >= state.max_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        config, trainer = self._trainer.config, self._trainer
        is_over = self._max_seconds is not None and trainer.seconds >= self._max_seconds
        is_last = is_over or state.global_step >= state.max_steps
        asked = self._should_stop is not None and self._should_stop()
        steps, seconds = config.checkpoint_steps, config.checkpoint_seconds
        is_due = steps is not None and state.global_step % steps == 0
        is_due |= seconds is not None and time.monotonic() - self._saved_at >= seconds
        stops, saves = any_of([asked and not is_last, is_due], args.device)
        control.should_evaluate |= is_last and args.eval_strategy != "no"
        control.should_save |= is_last or stops or saves
        control.should_training_stop |= is_last or stops
        trainer.finished = is_last

    def on_save(self, *_given: Any, **_named: Any) -> None:
        self._saved_at = time.monotonic()
