"""The training loop of a draft head: step, log, evaluate, save, and go on where it stopped."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eecore.errors import TrainingError
from eecore.files import replacing
from eecore.json_fields import JsonFields, parse_json
from eecore.lab.training.draft_head import DraftHead, HeadSizes
from eecore.lab.training.head_loss import (
    FrozenSide,
    StretchOrder,
    agreement_by_position,
    draft_loss,
    starts_of,
)
from eecore.lab.training.head_queries import begin_queries
from eecore.lab.training.head_states import HeadStates
from eecore.lab.training.run_log import CsvLog, read_log
from eecore.lab.training.trained_head import TrainedHead
from eecore.models import LlamaModel
from eecore.models.head_vocabulary import matrix_rows
from eecore.readable import is_file
from eecore.tensor_files import TensorFile
from eecore.values import shown

__all__ = [
    "HeadConfig",
    "HeadReport",
    "HeadRun",
    "choose_vocabulary",
    "is_held_out",
    "steps_in",
]

STATE_FORMAT = "eecore head training 1"
STATE_FILE, STEPS_FILE, EVALUATIONS_FILE = "head.safetensors", "steps.csv", "evaluations.csv"
OPTIMIZER_PARTS = ("step", "exp_avg", "exp_avg_sq")
PRECISIONS = ("float32", "bfloat16")
BETAS = (0.9, 0.95)
LEAST_RATE = 0.05
"""Of the learning rate, at the end."""
MOST_GRADIENT = 1.0
MOST_STEPS = 8
"""Drafts of a row."""
ONE_IN = 20
"""Pairs of texts that are held out."""


@dataclass(frozen=True)
class HeadConfig:
    """How a head is trained.

    Attributes:
        steps: training steps.
        intermediate_size: of the head's MLP.
        num_blocks: MLPs, one after the other.
        vocabulary_size: tokens that can be drafted.
        num_drafts: tokens of a draft in training.
        learning_rate: at its highest, see :meth:`learning_rate_at`.
        weight_decay: AdamW's, of matrices.
        batch_size: stretches of a step.
        stretch: rows of a text that drafts start from.
        seed: of the beginning and of the order.
        evaluate_steps: held-out texts are looked at so often.
        evaluated_rows: of them, at most, while the run lasts.
        measured_drafts: how many positions agreement is measured at.
        precision: ``float32``, or ``bfloat16`` for autocast over float32 weights.
        keep_vocabulary: that of the head it begins with; otherwise it is chosen from the texts.
        begins_with: SHA-256 of the file of a head whose weights it begins with; empty for none.
    """

    steps: int
    intermediate_size: int
    num_blocks: int = 1
    vocabulary_size: int = 8192
    num_drafts: int = 3
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    batch_size: int = 32
    stretch: int = 32
    seed: int = 0
    evaluate_steps: int = 100
    evaluated_rows: int = 2048
    measured_drafts: int = 5
    precision: str = "float32"
    keep_vocabulary: bool = False
    begins_with: str = ""

    def __post_init__(self) -> None:
        for name in (
            *("steps", "intermediate_size", "num_blocks", "vocabulary_size", "batch_size"),
            *("stretch", "evaluate_steps", "evaluated_rows"),
        ):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        for name in ("num_drafts", "measured_drafts"):
            if not 1 <= getattr(self, name) <= MOST_STEPS:
                got = getattr(self, name)
                raise TrainingError(f"{name}: expected 1..{MOST_STEPS}, got {got}")
        if self.precision not in PRECISIONS:
            raise TrainingError(
                f"precision: expected float32 or bfloat16, got {shown(self.precision)}"
            )
        if not 0 < self.learning_rate < 1:
            raise TrainingError(f"learning_rate: expected 0..1, got {self.learning_rate}")

    def learning_rate_at(self, step: int) -> float:
        """Up for 5 % of the run, then down along a cosine."""
        warm = min(1.0, (step + 1) / max(1.0, 0.05 * self.steps))
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.learning_rate * warm * (LEAST_RATE + (1 - LEAST_RATE) * cosine)


@dataclass(frozen=True)
class HeadReport:
    """A step that has been done.

    Attributes:
        step: how many have been.
        steps: how many will be.
        loss: weighted over the drafts.
        agreement: of the first draft, on this step's texts.
        held_out: by position, when it has just been measured.
        seconds_left: as this run's steps have taken.
    """

    step: int
    steps: int
    loss: float
    agreement: float
    held_out: list[float] | None
    seconds_left: float


class HeadRun:
    """A run between two steps; its state and logs are in a directory.

    Args:
        network: the model, which is not changed.
        data: states and tokens of its own texts.
        config: everything else.
        directory: of the run's files.
        share: of the texts that are trained on, for seeing what more of them bring.
        beginning: the head whose weights it begins with, of the same sizes.
        resume: go on with the run that is there, if one is.

    Raises:
        TrainingError: the data or the settings cannot be used, or are not those of the run that is
            there.
    """

    def __init__(
        self,
        network: LlamaModel,
        data: HeadStates,
        config: HeadConfig,
        directory: Path,
        *,
        share: float = 1.0,
        beginning: TrainedHead | None = None,
        resume: bool = False,
    ) -> None:
        self.config, self._directory = config, directory
        held = is_held_out(data.text)
        if not held.any() or held.all():
            raise TrainingError(
                f"texts: expected more than {2 * ONE_IN}, to hold some out, got "
                f"{len(torch.unique(data.text))}"
            )
        self.held_out = data.part(held)
        texts = torch.unique(data.text[~held])
        last = texts[max(1, round(share * len(texts))) - 1]
        self.data = data.part(~held & (data.text <= last))
        if beginning is None or not config.keep_vocabulary:
            vocabulary = choose_vocabulary(
                network, [self.data.token, self.data.greedy], config.vocabulary_size
            )
        else:
            vocabulary = beginning.vocabulary
        reached = int(data.positions.max()) + MOST_STEPS + 1 if data.keys else 0
        self.frozen = frozen_side(network, vocabulary, reached)
        sizes = HeadSizes(
            network.config.hidden_size,
            len(data.settings.taps),
            config.intermediate_size,
            config.num_blocks,
            len(data.settings.attended),
            data.settings.queries,
        )
        self.head = DraftHead(sizes, self.frozen.eps, self.frozen.final_norm, config.seed)
        if beginning is not None:
            beginning.put_into(self.head)
        if data.settings.attended and (beginning is None or not beginning.attends):
            begin_queries(self.head, self.frozen, data, ~held)
        self.beginning = beginning
        self._optimizer = _optimizer(self.head, config)
        self._order = StretchOrder(self.data.text, config.stretch, config.batch_size, config.seed)
        self._digest = _digest(self.data)
        self.step, self.seconds = 0, 0.0
        directory.mkdir(parents=True, exist_ok=True)
        if resume and is_file(directory / STATE_FILE):
            self._load()
        measured = [f"agreement_{k + 1}" for k in range(config.measured_drafts)]
        self._steps = CsvLog(
            directory / STEPS_FILE, ("step", "learning_rate", "loss", "agreement"), self.step
        )
        self._evaluations = CsvLog(
            directory / EVALUATIONS_FILE, ("step", "loss", *measured), self.step
        )

    @property
    def epochs(self) -> float:
        return self.config.steps / self._order.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        return self._order.steps_per_epoch

    @property
    def curve(self) -> list[tuple[int, float, float]]:
        """Step, loss in training and held-out agreement of the first draft."""
        log = read_log(self._directory / EVALUATIONS_FILE)
        rows = zip(log["step"], log["loss"], log["agreement_1"], strict=True)
        return [
            (int(step or 0), round(loss or 0.0, 4), round(agreement or 0.0, 4))
            for step, loss, agreement in rows
        ]

    def close(self) -> None:
        self._steps.close()
        self._evaluations.close()

    def all_steps(
        self,
        progress: Callable[[HeadReport], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        *,
        checkpoint_seconds: float = 120.0,
    ) -> bool:
        """Train to the end, True, or until told to stop, False; the state is saved either way."""
        config = self.config
        begun, done, saved_at = time.monotonic(), self.step, time.monotonic()
        before = self.seconds
        while self.step < config.steps:
            loss, agreement = self._one_step()
            held_out = None
            if self.step % config.evaluate_steps == 0 or self.step == config.steps:
                held_out = self.agreement(config.evaluated_rows)
                self._evaluations.write((self.step, loss, *held_out))
            now = time.monotonic()
            self.seconds = before + now - begun
            stops = should_stop is not None and should_stop() and self.step < config.steps
            if stops or now - saved_at >= checkpoint_seconds or self.step == config.steps:
                self._save()
                saved_at = now
            if progress is not None:
                left = (config.steps - self.step) * (now - begun) / (self.step - done)
                progress(HeadReport(self.step, config.steps, loss, agreement, held_out, left))
            if stops:
                return False
        return True

    def agreement(self, most_rows: int | None = None, *, greedy: bool = False) -> list[float]:
        """By position, on texts that are held out; on the greedy ones alone if asked for."""
        starts = starts_of(self.held_out.text)
        if greedy:
            starts = starts[self.held_out.text[starts] % 2 == 0]
        if most_rows is not None and len(starts) > most_rows:
            starts = starts[:: -(-len(starts) // most_rows)]
        return agreement_by_position(
            self.head, self.frozen, self.held_out, starts, self.config.measured_drafts
        )

    def loss_of(self, step: int) -> tuple[Tensor, float]:
        """Of a step's stretches, with the agreement of their first drafts."""
        starts, config = self._order.starts(step), self.config
        with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bfloat16"):
            return draft_loss(self.head, self.frozen, self.data, starts, config.num_drafts)

    def _one_step(self) -> tuple[float, float]:
        config = self.config
        for group in self._optimizer.param_groups:
            group["lr"] = config.learning_rate_at(self.step)
        rate = config.learning_rate_at(self.step)
        loss, agreement = self.loss_of(self.step)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise TrainingError(
                f"step {self.step + 1}: expected a finite loss, got {value}: try a lower learning "
                f"rate (this one: {rate:g})"
            )
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), MOST_GRADIENT)
        self._optimizer.step()
        self.step += 1
        self._steps.write((self.step, rate, value, agreement))
        return value, agreement

    def _save(self) -> None:
        tensors = {}
        for name, parameter in self.head.named_parameters():
            tensors[f"parameter.{name}"] = parameter.detach()
            for part, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{part}.{name}"] = value
        about = {
            "step": self.step,
            "seconds": self.seconds,
            "data": self._digest,
            "config": asdict(self.config),
        }
        with replacing(self._directory / STATE_FILE) as partial:
            save_file(
                {name: tensor.contiguous() for name, tensor in tensors.items()},
                partial,
                {"format": STATE_FORMAT, "state": json.dumps(about)},
            )

    def _load(self) -> None:
        path = self._directory / STATE_FILE
        with TensorFile(path, TrainingError, what="the state of a head's training") as file:
            if file.metadata.get("format") != STATE_FORMAT:
                raise TrainingError(f"{path}: expected the state of a head's training")
            about = parse_json(file.metadata.get("state", ""), str(path), TrainingError)
            fields = JsonFields.of(about, str(path), TrainingError)
            for name, expected in (("data", self._digest), ("config", asdict(self.config))):
                if about.get(name) != expected:
                    raise fields.wrong(name, f"{expected}, as this run has", about.get(name))
            self.step = fields.integer("step", 0, self.config.steps)
            self.seconds = fields.number("seconds", 0.0)
            for name, parameter in self.head.named_parameters():
                wanted = [f"parameter.{name}"]
                wanted += [f"optimizer.{part}.{name}" for part in OPTIMIZER_PARTS]
                for tensor in wanted:
                    shape = () if tensor.startswith("optimizer.step.") else tuple(parameter.shape)
                    if tensor not in file.names or file.shape(tensor) != shape:
                        raise file.wrong(tensor, f"float32 {list(shape)}", "another or none")
                parameter.data.copy_(file.tensor(wanted[0]))
                self._optimizer.state[parameter] = {
                    part: file.tensor(f"optimizer.{part}.{name}") for part in OPTIMIZER_PARTS
                }


def is_held_out(text: Tensor) -> Tensor:
    """Whether texts, int64 of their indices, are kept for measuring: two in 40."""
    return (text // 2) % ONE_IN == ONE_IN - 1


def choose_vocabulary(network: LlamaModel, tokens: list[Tensor], size: int) -> Tensor:
    """int64 [size], ascending: the tokens that end a text, and those that came most often.

    Raises:
        TrainingError: the model has fewer.
    """
    config = network.config
    if not 1 <= size <= config.vocab_size:
        raise TrainingError(f"vocabulary: expected 1..{config.vocab_size}, the model's, got {size}")
    counts = torch.zeros(config.vocab_size, dtype=torch.int64)
    for some in tokens:
        counts += torch.bincount(some, minlength=config.vocab_size)
    counts[list(config.eos_token_ids)] += 1 << 40
    order = torch.argsort(counts, descending=True, stable=True)
    return order[:size].sort().values


@torch.no_grad()
def frozen_side(network: LlamaModel, vocabulary: Tensor, num_positions: int = 0) -> FrozenSide:
    """What a head uses of a model, in float32 on the CPU.

    Args:
        network: the model.
        vocabulary: int64 [vocabulary_size], tokens that can be drafted.
        num_positions: that drafts attend from.
    """
    every = torch.arange(network.config.vocab_size, device=network.device)

    def rows_of(tokens: Tensor) -> Tensor:
        return matrix_rows(network.weights.lm_head, tokens.to(network.device)).float().cpu()

    return FrozenSide(
        embeddings=network.embed(every).float().cpu().clone(),
        head_rows=rows_of(vocabulary),
        vocabulary=vocabulary,
        final_norm=network.weights.final_norm.detach().float().cpu().clone(),
        eps=network.config.rms_norm_eps,
        cos_sin=network.cos_sin(num_positions).float().cpu(),
        rows_of=rows_of,
    )


def steps_in(run: HeadRun, seconds: float, *, timed: int = 3) -> HeadConfig:
    """The run's settings with as many steps as fit, measured on a few that change nothing."""
    config = run.config
    for repeat in range(timed + 1):
        if repeat == 1:
            begun = time.monotonic()
        loss, _ = run.loss_of(repeat)
        loss.backward()  # type: ignore[no-untyped-call]
    run.head.zero_grad()
    each = (time.monotonic() - begun) / timed
    return replace(config, steps=max(1, int(seconds / each)))


def _digest(data: HeadStates) -> str:
    attended = data.settings.attended
    digest = hashlib.sha256(f"{data.settings.taps}{attended or ''}".encode())
    for numbers in (data.text, data.token, data.greedy):
        digest.update(numbers.numpy().tobytes())
    return digest.hexdigest()


def _optimizer(head: DraftHead, config: HeadConfig) -> torch.optim.AdamW:
    """AdamW; matrices decay, norms do not."""
    groups: dict[float, list[Any]] = {config.weight_decay: [], 0.0: []}
    for name, parameter in head.named_parameters():
        groups[0.0 if name.endswith("norm") else config.weight_decay].append(parameter)
    return torch.optim.AdamW(
        [{"params": some, "weight_decay": decay} for decay, some in groups.items()],
        lr=config.learning_rate,
        betas=BETAS,
        fused=True,
    )
