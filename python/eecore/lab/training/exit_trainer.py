"""The training of a transformers model by the loss of its exits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from eecore.errors import TrainingError
from eecore.lab.training.data import Batch, BatchOrder, TokenData, collate
from eecore.lab.training.early_exit_loss import Targets, weighted_exit_loss
from eecore.lab.training.exit_model import ExitModel, ExitScores, exit_sums
from eecore.lab.training.layer_dropout import drop_layers
from eecore.lab.training.looped_loss import GateLoss, LoopedLoss, loss_over_loops
from eecore.lab.training.processes import share, total
from eecore.lab.training.recipe import TrainingConfig
from eecore.lab.training.trainer import StepTrainer

MIN_SIZE = 1e-3
"""The smallest size that a relative rate refers to, since some weights start near 0."""
VECTOR_SHARE = 0.1
"""The relative rate of vectors, which start at 1."""


class ExitTrainer(StepTrainer):
    """A transformers model whose exits are trained.

    Args:
        model: the model, or the peft model around it. Until :meth:`close` its forward pass gives a
            loss over exits, and its layers are wrapped.
        on_cpu: whether it is trained on the CPU; None: where it is.
    """

    config: TrainingConfig

    def __init__(
        self,
        model: nn.Module,
        data: TokenData,
        config: TrainingConfig,
        directory: Path,
        held_out: TokenData | None = None,
        on_cpu: bool | None = None,
    ) -> None:
        self.exits = ExitModel.of(model)
        check_exits(self.exits, data, config)
        self.exit_scores: ExitScores | None = None
        self._batches = _Batches(data, config, self.exits.decoder_start)
        self._held_out = None
        if held_out is not None:
            self._held_out = _Batches(held_out, config, self.exits.decoder_start)
        exits = self.exits.exit_layers
        measures = ("loss", "accuracy", "agreement")
        super().__init__(
            model,
            config,
            directory,
            self._batches,
            pieces=config.accumulate,
            evaluates=held_out is not None,
            step_columns=tuple(f"loss_exit_{layer}" for layer in exits),
            evaluation_columns=tuple(f"{m}_exit_{layer}" for m in measures for layer in exits),
            on_cpu=self.exits.device.type == "cpu" if on_cpu is None else on_cpu,
        )
        self._batches.divide(self.args.process_index, self.args.world_size)
        if self._held_out is not None:
            self._held_out.divide(self.args.process_index, self.args.world_size)
        self._wrapped, self._dropouts = ExitStack(), []
        for index, stack in enumerate((self.exits.layers, self.exits.encoder_layers)):
            if config.layer_dropout is not None and stack:
                dropout = drop_layers(
                    stack,
                    config.layer_dropout,
                    num_steps=config.steps,
                    seed=config.seed + index,
                )
                self._dropouts.append(self._wrapped.enter_context(dropout))
        if isinstance(config.loss, GateLoss):
            self._wrapped.enter_context(_gate_alone(self.exits))
        if config.gradient_checkpointing:
            self.exits.base.gradient_checkpointing_enable({"use_reentrant": False})
            self._wrapped.callback(self.exits.base.gradient_checkpointing_disable)
        model.forward = self._forward
        self._wrapped.callback(lambda: vars(model).pop("forward", None))

    def close(self) -> None:
        """Restore the model's layers and its forward pass."""
        self._wrapped.close()

    def losses(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
        found = model(**inputs)
        by_exit, nothing = found["by_exit"], torch.tensor(torch.nan, device=self.args.device)
        return found["loss"], [by_exit.get(i, nothing) for i in range(len(self.step_columns))]

    def _forward(
        self,
        step: int | None,
        rows: list[int],
        num_rows: int,
        positions: Tensor,
        tokens: Tensor,
        count: int,
        **inputs: Tensor,
    ) -> dict[str, Any]:
        """The loss of a piece, and that of each exit; without a step the sums of the exits'
        scores.
        """
        config, targets = self.config, Targets(positions, tokens, count)
        if step is not None:
            for dropout in self._dropouts:
                dropout.begin_step(step, rows, num_rows)
        with config.autocast(positions.device):
            states = self.exits.states(inputs)
            if step is None:
                return {"sums": exit_sums(self.exits, states, targets)}
            if isinstance(config.loss, (LoopedLoss, GateLoss)):
                loss, by_exit = loss_over_loops(self.exits, states, targets, config.loss)
            else:
                weights = config.loss.weights(step, config.steps, len(states))
                loss, by_exit = weighted_exit_loss(self.exits.head, states, targets, weights)
        return {"loss": loss, "by_exit": by_exit}

    def tokens_at(self, step: int) -> int:
        return self._batches.num_tokens(step)

    @torch.no_grad()
    def scores(self) -> tuple[float, ...]:
        assert self._held_out is not None
        sums = torch.zeros(3, len(self.step_columns), dtype=torch.float64, device=self.args.device)
        count, was_training = 0, self.model.training
        self.model.eval()
        for step in range(min(self.config.evaluate_batches, self._held_out.steps_per_epoch)):
            batch = self._held_out.piece(step, 0, 1)
            sums += self.model(**self._prepare_inputs({**batch, "step": None}))["sums"]
            count += batch["count"]
        self.model.train(was_training)
        self.exit_scores = ExitScores.of(total(sums), count)
        scores = self.exit_scores
        return (*scores.loss, *scores.accuracy, *scores.agreement)

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


class _Batches(Dataset[dict[str, Any]]):
    """This process's share of each piece of each step's batch, one after the other."""

    def __init__(self, data: TokenData, config: TrainingConfig, decoder_start: int | None) -> None:
        self._data, self._config, self._decoder_start = data, config, decoder_start
        self._rows = data.rows(config.packing)
        self._num_learnt, self._lengths = data.num_learnt, data.lengths
        in_rows = [int(self._lengths[row].sum()) for row in self._rows]
        self._order = BatchOrder(torch.tensor(in_rows), config.batch_size, config.seed)
        self._rank, self._size = 0, 1

    def divide(self, rank: int, size: int) -> None:
        """Leave the share of one of several processes."""
        self._rank, self._size = rank, size

    @property
    def steps_per_epoch(self) -> int:
        return self._order.steps_per_epoch

    def __len__(self) -> int:
        return self._config.steps * self._config.accumulate

    def __getitem__(self, number: int) -> dict[str, Any]:
        step, piece = divmod(number, self._config.accumulate)
        return self.piece(step, piece, self._config.accumulate)

    def piece(self, step: int, piece: int, pieces: int) -> dict[str, Any]:
        """The arguments of the forward pass for a piece of a step."""
        rows = self._of(step)
        places, count_here = share(len(rows), self._rank + piece * self._size, pieces * self._size)
        chosen = [rows[place] for place in places]
        batch: Batch = collate(self._data, chosen, decoder_start=self._decoder_start)
        count = int(self._num_learnt[[index for row in rows for index in row]].sum())
        targets = batch.targets.share(count, count_here)
        about = {"step": step, "rows": places, "num_rows": len(rows), "count": count}
        return {**batch.inputs, "positions": targets.positions, "tokens": targets.tokens, **about}

    def num_tokens(self, step: int) -> int:
        """Tokens of a step's whole batch."""
        return int(self._lengths[[index for row in self._of(step) for index in row]].sum())

    def _of(self, step: int) -> list[list[int]]:
        return [self._rows[index] for index in self._order.indices(step).tolist()]


def check_exits(exits: ExitModel, data: TokenData, config: TrainingConfig) -> None:
    """Refuse data and settings that do not go with a model.

    Raises:
        TrainingError: the message names the setting.
    """
    if exits.has_encoder and data.for_decoders:
        raise TrainingError(
            "data: expected pairs for a model with an encoder, got texts or conversations"
        )
    if exits.has_encoder and config.packing is not None:
        raise TrainingError(
            f"packing: expected none for a model with an encoder, got {config.packing}"
        )
    if not exits.is_looped:
        if isinstance(config.loss, (LoopedLoss, GateLoss)):
            raise TrainingError(
                f"loss: expected one of layers for {type(exits.base).__name__}, without loops, "
                f"got {type(config.loss).__name__}"
            )
        return
    for name, expected in (
        ("layer_dropout", None),
        ("lora", None),
        ("gradient_checkpointing", False),
    ):
        value = getattr(config, name)
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
