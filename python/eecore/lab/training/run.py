"""The training loop: step, log, evaluate, save, and go on where it stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from eecore.errors import TrainingError
from eecore.lab.training.data import Batch, BatchOrder, TokenData, collate
from eecore.lab.training.early_exit_loss import early_exit_backward
from eecore.lab.training.evaluation import ExitScores, evaluate_exits
from eecore.lab.training.exit_model import ExitModel
from eecore.lab.training.layer_dropout import LayerDropoutHandle, drop_layers
from eecore.lab.training.libraries import library
from eecore.lab.training.plots import plot_run
from eecore.lab.training.recipe import LoraSettings, TrainingConfig
from eecore.lab.training.run_log import RunLog
from eecore.lab.training.run_state import RunState, load_state, read_state, save_state
from eecore.lab.training.saving import save_model
from eecore.readable import is_file, kind_of, path_of, shown_path

__all__ = ["StepReport", "TrainingResult", "check_new", "state_path", "train"]

LOG_DIRECTORY = "training"
STATE_FILE = "state.safetensors"
# Of relative rates: of weights that start near 0, and what vectors, that start at 1, get of theirs.
SMALLEST_SIZE, VECTOR_SHARE = 1e-3, 0.1


@dataclass(frozen=True)
class StepReport:
    """A training step that has been done.

    Attributes:
        step: how many have been, this one included.
        steps: how many will be.
        tokens: read so far.
        loss: weighted over exits.
        exit_losses: by exit layer E, of those whose loss counted.
        tokens_per_s: since the run started or was resumed.
        scores: of the exits on held-out data, when they have just been measured.
    """

    step: int
    steps: int
    tokens: int
    loss: float
    exit_losses: dict[int, float]
    tokens_per_s: float
    scores: ExitScores | None = None


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended.

    Attributes:
        finished: False when it was stopped; ``train(..., resume=True)`` goes on.
        step: steps done.
        tokens: tokens read.
        scores: of the exits on held-out data, if there was any.
    """

    finished: bool
    step: int
    tokens: int
    scores: ExitScores | None


def train(
    model: nn.Module,
    data: TokenData,
    config: TrainingConfig,
    out: str | Path,
    *,
    held_out: TokenData | None = None,
    tokenizer_directory: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[StepReport], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> TrainingResult:
    """Train a transformers model for early exits and write it to a directory.

    ``out`` becomes a Hugging Face directory that ``eecore.load`` and transformers read;
    ``exits.json`` in it says how good each exit is, ``training/`` holds logs, a plot and, until the
    run is finished, its state. A run that was stopped or killed goes on, resumed, exactly as if it
    had not been: with the same model, data and config on the same machine and number of threads it
    writes the same logs bit for bit.

    Args:
        model: of a class that :class:`ExitModel` knows; is trained in place, on its device.
        data: sequences to learn.
        config: everything else.
        out: a new or empty directory, or with ``resume`` that of the run.
        held_out: sequences to score the exits on.
        tokenizer_directory: its tokenizer files are copied to ``out``.
        resume: go on with the run in ``out``.
        progress: called after each step.
        should_stop: asked after each step; once it says True the state is saved and the run ends.

    Raises:
        TrainingError: a setting, the data or the directory cannot be used.
    """
    run = _Run(model, data, config, path_of(out, TrainingError), held_out, resume)
    try:
        finished = run.all_steps(progress, should_stop)
    finally:
        run.close()
    if finished:
        source = None if tokenizer_directory is None else Path(tokenizer_directory)
        run.finish(source)
    return TrainingResult(finished, run.step, run.tokens, run.scores)


def state_path(out: str | Path) -> Path:
    """Where the state of the run that writes to ``out`` is."""
    return Path(out) / LOG_DIRECTORY / STATE_FILE


class _Run:
    """A run between two steps."""

    def __init__(
        self,
        model: nn.Module,
        data: TokenData,
        config: TrainingConfig,
        out: Path,
        held_out: TokenData | None,
        resume: bool,
    ) -> None:
        self.config = config
        self.out = out
        self.data = data
        self.held_out = held_out
        self.digest = data.digest()
        self.order = BatchOrder(data.lengths, config.batch_size, config.seed)
        self.step = 0
        self.tokens = 0
        self.scores: ExitScores | None = None
        saved = _saved_run(out, resume, config, self.digest)
        self.is_fresh = saved is None
        torch.manual_seed(config.seed)
        self.exits = ExitModel.of(model if config.lora is None else _with_lora(model, config.lora))
        self.model = self.exits.model
        self.decoder_start = _decoder_start(self.exits, data)
        self.optimizer = _optimizer(self.model, config)
        if saved is not None:
            load_state(state_path(out), saved.step, self.model, self.optimizer)
            self.step, self.tokens = saved.step, saved.tokens
        state_path(out).parent.mkdir(parents=True, exist_ok=True)
        self.saved_at = time.monotonic()
        self.open = ExitStack()
        self.log = RunLog(state_path(out).parent, self.exits.num_layers, self.step)
        self.open.callback(self.log.close)
        self.dropouts = [self.open.enter_context(handle) for handle in self._dropouts()]
        if config.gradient_checkpointing:
            self.exits.base.gradient_checkpointing_enable({"use_reentrant": False})
            self.open.callback(self.exits.base.gradient_checkpointing_disable)

    def close(self) -> None:
        """Close the logs and leave the model's layers as they were."""
        self.open.close()

    def all_steps(
        self, progress: Callable[[StepReport], None] | None, should_stop: Callable[[], bool] | None
    ) -> bool:
        """Train to the end, True, or until told to stop, False."""
        self.model.train()
        started, tokens_before = time.monotonic(), self.tokens
        if self.is_fresh:
            self._evaluate()
            self._save()  # a disk that cannot take it is found out now, not in an hour
        while self.step < self.config.steps:
            losses, row = self._one_step()
            self.log.step(row, losses)
            evaluates = self.step % self.config.evaluate_steps == 0
            if evaluates or self.step == self.config.steps:
                self._evaluate()
            stops = should_stop is not None and should_stop() and self.step < self.config.steps
            if stops or self._save_is_due():
                self._save()
            if progress is not None:
                seconds = time.monotonic() - started
                progress(
                    StepReport(
                        step=self.step,
                        steps=self.config.steps,
                        tokens=self.tokens,
                        loss=float(row[4] or 0.0),
                        exit_losses={layer + 1: loss for layer, loss in losses.items()},
                        tokens_per_s=(self.tokens - tokens_before) / seconds,
                        scores=self.scores if evaluates else None,
                    )
                )
            if stops:
                return False
        return True

    def finish(self, tokenizer_directory: Path | None) -> None:
        """Write the model, its scores and the plot; the state goes last."""
        if self.scores is None:  # stopped between the last step and here
            self.scores = self._measured()
        save_model(
            self.model,
            self.out,
            config=self.config,
            scores=self.scores,
            tokens=self.tokens,
            tokenizer_directory=tokenizer_directory,
        )
        logs = state_path(self.out).parent
        plot_run(logs, logs / "run.svg")
        state_path(self.out).unlink(missing_ok=True)

    def _one_step(self) -> tuple[dict[int, float], list[int | float | None]]:
        """Losses by layer, and the row of the log."""
        config, step = self.config, self.step
        for dropout in self.dropouts:
            dropout.begin_step(step)
        rate = config.learning_rate_at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["rate_scale"]
        batch = self._batch(self.data, self.order.indices(step))
        weights = config.loss.weights(step, config.steps, self.exits.num_layers)
        self.optimizer.zero_grad()
        with self._autocast():
            states = self.exits.states(batch.inputs)
            losses = early_exit_backward(self.exits.head, states, batch.targets, weights)
        norm = nn.utils.clip_grad_norm_(_trained(self.model), config.max_grad_norm)
        *values, norm_value = torch.stack([*losses.values(), norm]).tolist()
        by_layer = dict(zip(losses, values, strict=True))
        loss = sum(weights[layer] * value for layer, value in by_layer.items())
        if not (math.isfinite(loss) and math.isfinite(norm_value)):
            raise TrainingError(
                f"step {step + 1}: expected finite numbers, got loss {loss} and gradient norm "
                f"{norm_value}: try a lower learning rate (this one: {rate:g})"
            )
        self.optimizer.step()
        self.step += 1
        self.tokens += batch.num_tokens
        exits = [by_layer.get(layer) for layer in range(self.exits.num_layers)]
        return by_layer, [self.step, self.tokens, rate, norm_value, loss, *exits]

    def _batch(self, data: TokenData, indices: Tensor) -> Batch:
        batch = collate(data, indices.tolist(), decoder_start=self.decoder_start)
        return batch.to(self.exits.device)

    def _autocast(self) -> torch.autocast:
        enabled = self.config.precision == "bfloat16"
        return torch.autocast(self.exits.device.type, torch.bfloat16, enabled=enabled)

    def _dropouts(self) -> list[LayerDropoutHandle]:
        schedule = self.config.layer_dropout
        if schedule is None:
            return []
        stacks = [stack for stack in (self.exits.layers, self.exits.encoder_layers) if stack]
        return [
            drop_layers(stack, schedule, num_steps=self.config.steps, seed=self.config.seed + index)
            for index, stack in enumerate(stacks)
        ]

    def _evaluate(self) -> None:
        self.scores = self._measured()
        if self.scores is not None:
            self.log.evaluation(self.step, self.tokens, self.scores)

    def _measured(self) -> ExitScores | None:
        if self.held_out is None:
            return None
        config = self.config
        order = BatchOrder(self.held_out.lengths, config.batch_size, config.seed)
        count = min(config.evaluate_batches, order.steps_per_epoch)
        batches = (self._batch(self.held_out, order.indices(index)) for index in range(count))
        with self._autocast():
            return evaluate_exits(self.exits, batches)

    def _save_is_due(self) -> bool:
        steps, seconds = self.config.checkpoint_steps, self.config.checkpoint_seconds
        by_steps = steps is not None and self.step % steps == 0
        by_time = seconds is not None and time.monotonic() - self.saved_at >= seconds
        return by_steps or by_time or self.step == self.config.steps

    def _save(self) -> None:
        state = RunState(self.step, self.tokens, self.digest, self.config)
        save_state(state_path(self.out), state, self.model, self.optimizer)
        self.saved_at = time.monotonic()


def check_new(out: Path) -> None:
    """Refuse a place where a new run cannot begin.

    Raises:
        TrainingError: something is there; a run that can be resumed is named.
    """
    found = kind_of(out)
    if found != "nothing" and (found != "a directory" or any(out.iterdir())):
        hint = " (a run can be resumed there)" if is_file(state_path(out)) else ""
        got = f"{shown_path(out)}{hint}"
        raise TrainingError(f"out: expected a new or empty directory, got {got}")


def _saved_run(out: Path, resume: bool, config: TrainingConfig, digest: str) -> RunState | None:
    """The state to go on from, checked against what is asked for; None for a fresh run."""
    path = state_path(out)
    if not resume:
        check_new(out)
        return None
    saved = read_state(path)
    difference = saved.config.difference(config)
    if difference is not None:
        raise TrainingError(f"{path}: expected the settings that the run began with: {difference}")
    if saved.data_digest != digest:
        raise TrainingError(f"{path}: expected the data that the run began with, got other data")
    return saved


def _with_lora(model: nn.Module, settings: LoraSettings) -> nn.Module:
    peft = library("peft")
    ExitModel.of(model)  # a model that is not known is refused before it is changed
    wrapped: nn.Module = peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules="all-linear",
        ),
    )
    return wrapped


def _decoder_start(exits: ExitModel, data: TokenData) -> int | None:
    """The first token of a decoder with an encoder, which learns from pairs alone."""
    if exits.has_encoder and data.is_text:
        raise TrainingError("data: expected pairs for a model with an encoder, got texts")
    return exits.decoder_start


def _optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW; matrices decay, vectors (norms and biases) do not."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in _trained(model):
        decay = config.weight_decay if parameter.ndim > 1 else 0.0
        scale = _starting_size(parameter) if config.relative_rate else 1.0
        groups.setdefault((decay, scale), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": decay, "rate_scale": scale}
            for (decay, scale), parameters in groups.items()
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def _starting_size(parameter: nn.Parameter) -> float:
    """What a relative rate is relative to."""
    size = float(parameter.detach().float().square().mean().sqrt())
    return max(size, SMALLEST_SIZE) * (VECTOR_SHARE if parameter.ndim <= 1 else 1.0)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
