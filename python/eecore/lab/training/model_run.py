"""The training of a model for early exits: from batches to a saved model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from eecore.errors import TrainingError
from eecore.files.readable import is_file, kind_of, path_of, shown_path
from eecore.files.whole import filling
from eecore.lab.plots import plot_run
from eecore.lab.training.data import Batch, BatchOrder, TokenData, collate
from eecore.lab.training.early_exit_loss import early_exit_backward
from eecore.lab.training.exit_model import ExitModel, ExitScores, evaluate_exits
from eecore.lab.training.harness import STATE_FILE, Losses, StepReport, Trainee, TrainingRun
from eecore.lab.training.layer_dropout import drop_layers
from eecore.lab.training.libraries import library, no_progress_bars
from eecore.lab.training.looped_loss import GateLoss, LoopedLoss, looped_backward
from eecore.lab.training.processes import Processes
from eecore.lab.training.recipe import LoraSettings, TrainingConfig
from eecore.lab.training.run_log import read_logs, tensorboard_writer
from eecore.lab.training.run_state import state_to_resume
from eecore.models import model_digest

if TYPE_CHECKING:
    from eecore.lab.training.sharding import ShardedExitModel

MIN_SIZE = 1e-3
"""The smallest size that a relative rate refers to, since some weights start near 0."""
VECTOR_SHARE = 0.1
"""The relative rate of vectors, which start at 1."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)


@dataclass(frozen=True)
class TrainingResult:
    """The result of a run.

    Attributes:
        finished: False when it was stopped; ``train(..., resume=True)`` continues.
        step: steps done.
        tokens: tokens read.
        scores: the exits' on held-out data, if there is any.
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
    ``exits.json`` in it has the exits' scores, ``training/`` the logs, a plot and, until the run is
    finished, its state. A stopped or killed run continues, once resumed, exactly as if it had not
    been stopped: with the same model, data and config on the same machine and number of threads it
    writes the same logs bit for bit.

    In a process of several (``torchrun``, after ``torch.distributed.init_process_group``; all on
    one file system) each computes its share of every batch, and the result is that of one process,
    up to rounding; the first one writes. A run is resumed with as many processes as it began with.

    Args:
        model: of a class that :class:`ExitModel` supports; trained in place, on its device, or with
            ``config.shard`` on the processes' devices.
        out: a new or empty directory, or with ``resume`` the run's.
        held_out: sequences to score the exits on.
        tokenizer_directory: its tokenizer files are copied to ``out``.
        resume: continue the run in ``out``.
        progress: called after each step.
        should_stop: called after each step; once it returns True in any process, the state is saved
            and the run ends.

    Raises:
        TrainingError: a setting, the data or the directory cannot be used.
    """
    processes = Processes.current()
    _check_processes(config, processes)
    if config.tensorboard:
        tensorboard_writer()
    directory = path_of(out, TrainingError)
    state = state_path(directory)
    saved = state_to_resume(state, config, data.digest()) if resume else None
    if saved is None:
        check_new(directory)
    processes.wait()  # the first one makes the directory
    torch.manual_seed(config.seed)
    trained = model if config.lora is None else _with_lora(model, config.lora)
    processes.same_weights(trained)
    trainee = ModelTrainee(trained, data, config, held_out)
    if processes.rank:
        torch.manual_seed(config.seed * 1_000_003 + processes.rank)
    with closing(trainee), TrainingRun(trainee, state.parent, saved) as run:
        finished = run.all_steps(progress, should_stop)
    if finished:
        if trainee.scores is None:  # stopped between the last step and here
            trainee.evaluate()
        if trainee.sharded is not None:
            trainee.sharded.gather(keep=processes.is_first)
    if finished and processes.is_first:
        _save(
            trained,
            directory,
            config=config,
            scores=trainee.scores,
            tokens=run.tokens,
            tokenizer_directory=None if tokenizer_directory is None else Path(tokenizer_directory),
        )
        plot_run(state.parent / "run.svg", *read_logs(state.parent))
        state.unlink(missing_ok=True)
    processes.wait()
    return TrainingResult(finished, run.step, run.tokens, trainee.scores)


def state_path(out: str | Path) -> Path:
    """The file of the state of the run that writes to ``out``."""
    return Path(out) / "training" / STATE_FILE


class ModelTrainee(Trainee):
    """A transformers model whose exits are trained.

    Args:
        model: the model, or the peft model around it; its layers are wrapped until :meth:`close`.
    """

    config: TrainingConfig

    def __init__(
        self,
        model: nn.Module,
        data: TokenData,
        config: TrainingConfig,
        held_out: TokenData | None = None,
    ) -> None:
        self.config, self._data, self._held_out = config, data, held_out
        self._processes = Processes.current()
        self.exits = ExitModel.of(model)
        if self.exits.has_encoder:
            _check_for_encoder(data, config)
        self._rows = data.rows(config.packing)
        self._num_learnt = data.num_learnt
        self._held_out_rows = [] if held_out is None else held_out.rows(config.packing)
        self.sharded: ShardedExitModel | None = None
        if config.shard:
            from eecore.lab.training.sharding import ShardedExitModel

            self.sharded = ShardedExitModel.divide(self.exits, self._processes.device)
            self.exits = self.sharded
        self.module = model
        self.scores: ExitScores | None = None
        _check_loops(self.exits, config)
        exits = self.exits.exit_layers
        self.step_columns = tuple(f"loss_exit_{layer}" for layer in exits)
        measures = ("loss", "accuracy", "agreement")
        self.evaluation_columns = tuple(f"{m}_exit_{layer}" for m in measures for layer in exits)
        self._order = _order(data, self._rows, config)
        self._wrapped = ExitStack()
        stacks = (self.exits.layers, self.exits.encoder_layers)
        schedule = config.layer_dropout
        self._dropouts = [
            self._wrapped.enter_context(
                drop_layers(
                    stack,
                    schedule,
                    num_steps=config.steps,
                    seed=config.seed + index,
                    sharded=config.shard,
                )
            )
            for index, stack in enumerate(stacks)
            if schedule is not None and stack
        ]
        if isinstance(config.loss, GateLoss):
            self._wrapped.enter_context(_gate_alone(self.exits))
        if config.gradient_checkpointing:
            self.exits.base.gradient_checkpointing_enable({"use_reentrant": False})
            self._wrapped.callback(self.exits.base.gradient_checkpointing_disable)

    def close(self) -> None:
        """Restore the model's layers."""
        self._wrapped.close()

    def digest(self) -> str:
        return self._data.digest()

    def backward(self, step: int) -> Losses:
        config = self.config
        rows = [self._rows[index] for index in self._order.indices(step).tolist()]
        count = int(self._num_learnt[[index for row in rows for index in row]].sum())
        losses: dict[int, Tensor] = {}
        total, num_tokens = torch.zeros(()), 0
        for piece in range(config.accumulate):
            places, are_real = self._processes.share(len(rows), piece, config.accumulate)
            for dropout in self._dropouts:
                dropout.begin_step(step, places, len(rows))
            batch = self._batch(self._data, [rows[place] for place in places])
            targets = batch.targets.share(count, are_real)
            with config.autocast(self.exits.device):
                states = self.exits.states(batch.inputs)
                if isinstance(config.loss, (LoopedLoss, GateLoss)):
                    loss, found = looped_backward(self.exits, states, targets, config.loss)
                else:
                    weights = config.loss.weights(step, config.steps, len(states))
                    found = early_exit_backward(self.exits.head, states, targets, weights)
                    loss = torch.stack([weights[i] * each for i, each in found.items()]).sum()
            total = total.to(loss.device) + loss
            losses = {index: losses.get(index, 0) + each for index, each in found.items()}
            num_tokens += batch.num_tokens * are_real
        by_column = {self.step_columns[index]: loss for index, loss in losses.items()}
        return Losses(total, num_tokens, by_column)

    def evaluate(self) -> tuple[float, ...] | None:
        if self._held_out is None:
            return None
        with self.config.autocast(self.exits.device):
            self.scores = evaluate_exits(self.exits, self._held_out_batches(self._held_out))
        if self.sharded is not None:
            self.sharded.release()
        return (*self.scores.loss, *self.scores.accuracy, *self.scores.agreement)

    def describe(self, values: Mapping[str, float]) -> str:
        exits = (f"{name.rpartition('_')[2]}:{loss:.2f}" for name, loss in values.items())
        return f"by exit {' '.join(exits)}"

    def describe_evaluation(self, values: Mapping[str, float]) -> str:
        agreement = [value for name, value in values.items() if name.startswith("agreement")]
        return (
            f"held-out loss {values[self.step_columns[-1]]:.3f}, agreement with the last layer by "
            f"exit: {' '.join(f'{value:.2f}' for value in agreement)}"
        )

    def rates(self, name: str, parameter: nn.Parameter) -> tuple[bool, float]:
        decays, rate = super().rates(name, parameter)
        if self.config.relative_rate:
            size = float(parameter.detach().float().square().mean().sqrt())
            rate = max(size, MIN_SIZE) * (1.0 if decays else VECTOR_SHARE)
        return decays, rate

    def _held_out_batches(self, data: TokenData) -> Iterator[Batch]:
        """This process's share of the held-out batches."""
        order = _order(data, self._held_out_rows, self.config)
        for step in range(min(self.config.evaluate_batches, order.steps_per_epoch)):
            rows = [self._held_out_rows[index] for index in order.indices(step).tolist()]
            places, are_real = self._processes.share(len(rows))
            batch = self._batch(data, [rows[place] for place in places])
            count = len(batch.targets.tokens)
            yield replace(batch, targets=batch.targets.share(count, are_real))

    def _batch(self, data: TokenData, rows: list[list[int]]) -> Batch:
        batch = collate(data, rows, decoder_start=self.exits.decoder_start)
        return batch.to(self.exits.device)


def _order(data: TokenData, rows: list[list[int]], config: TrainingConfig) -> BatchOrder:
    lengths = data.lengths.tolist()
    in_rows = [sum(lengths[index] for index in row) for row in rows]
    return BatchOrder(torch.tensor(in_rows), config.batch_size, config.seed)


def _check_for_encoder(data: TokenData, config: TrainingConfig) -> None:
    if data.for_decoders:
        raise TrainingError(
            "data: expected pairs for a model with an encoder, got texts or conversations"
        )
    if config.packing is not None:
        raise TrainingError(
            f"packing: expected none for a model with an encoder, got {config.packing}"
        )


def _check_loops(exits: ExitModel, config: TrainingConfig) -> None:
    """Refuse settings that do not go with a looped model, or with another one."""
    if not exits.is_looped:
        if isinstance(config.loss, (LoopedLoss, GateLoss)):
            raise TrainingError(
                f"loss: expected one of layers for {type(exits.base).__name__}, without loops, "
                f"got {type(config.loss).__name__}"
            )
        return
    for name, expected, value in (
        ("layer_dropout", None, config.layer_dropout),
        ("lora", None, config.lora),
        ("shard", False, config.shard),
        ("gradient_checkpointing", False, config.gradient_checkpointing),
    ):
        if value != expected:
            raise TrainingError(f"{name}: expected {expected} for a looped model, got {value}")


@contextmanager
def _gate_alone(exits: ExitModel) -> Iterator[None]:
    """All weights of a looped model but its gate's have no gradients."""
    gate = {id(weight) for weight in exits.base.model.early_exit_gate.parameters()}
    others = [w for w in exits.model.parameters() if w.requires_grad and id(w) not in gate]
    for weight in others:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in others:
            weight.requires_grad_(True)


def _check_processes(config: TrainingConfig, processes: Processes) -> None:
    if config.shard and processes.size == 1:
        raise TrainingError("shard: expected several processes (torchrun), got one")
    pieces = processes.size * config.accumulate
    if config.batch_size < pieces:
        raise TrainingError(
            f"batch_size: expected {pieces} or more, for {processes.size} processes and "
            f"accumulate={config.accumulate}, got {config.batch_size}"
        )


def check_new(out: Path) -> None:
    """Refuse a directory in which a new run cannot begin.

    Raises:
        TrainingError: it has files; a run that can be resumed is named.
    """
    found = kind_of(out)
    if found != "nothing" and (found != "a directory" or any(out.iterdir())):
        hint = " (a run can be resumed there)" if is_file(state_path(out)) else ""
        got = f"{shown_path(out)}{hint}"
        raise TrainingError(f"out: expected a new or empty directory, got {got}")


def _with_lora(model: nn.Module, settings: LoraSettings) -> nn.Module:
    peft = library("peft")
    ExitModel.of(model)  # refuses an unsupported model before it is changed
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


def _save(
    model: Any,
    directory: Path,
    *,
    config: TrainingConfig,
    scores: ExitScores | None,
    tokens: int,
    tokenizer_directory: Path | None,
) -> None:
    """Write weights (adapters merged, and alone under ``adapter/``), tokenizer, exits.json."""
    with filling(directory) as partial:
        if hasattr(model, "merge_and_unload"):
            model.save_pretrained(str(partial / "adapter"))
            model = model.merge_and_unload()
        with no_progress_bars():
            model.save_pretrained(str(partial))
        place = tokenizer_directory or directory
        for name in TOKENIZER_FILES if place != directory else ():
            for source in place.glob(name):
                copied = partial / source.relative_to(place)
                copied.parent.mkdir(exist_ok=True)
                shutil.copyfile(source, copied)
        about = {
            "model_sha256": model_digest(partial),
            "num_layers": ExitModel.of(model).num_layers,
            "training": config.to_dict(),
            "training_tokens": tokens,
            "held_out": None if scores is None else asdict(scores),
        }
        (partial / "exits.json").write_text(json.dumps(about, indent=2) + "\n")
