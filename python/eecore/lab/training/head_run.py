"""The training of draft heads: data, settings, evaluation."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from eecore.errors import TrainingError
from eecore.lab.training.draft_head import DraftHead
from eecore.lab.training.head_keys import Attended
from eecore.lab.training.head_loss import (
    FrozenSide,
    StretchOrder,
    agreement_by_position,
    draft_loss,
)
from eecore.lab.training.head_states import HeadStates
from eecore.lab.training.recipe import MAX_SIZE, RunConfig
from eecore.lab.training.trained_head import TrainedHead
from eecore.lab.training.trainer import StepTrainer
from eecore.models import LlamaModel
from eecore.models.head_vocabulary import matrix_rows
from eecore.values import MIN_POSITIVE, real, whole

MAX_DRAFTS = 8
"""Drafts of a row in training, at most."""
SIZE, DRAFTS = whole(1, MAX_SIZE), whole(1, MAX_DRAFTS)
ONE_IN = 20
"""One pair of texts in so many is held out."""
FITTED_ROWS = 4096
"""Rows that are fitted at once."""
RIDGE = 1e-2
"""The ridge of the least squares, as a share of the mean square of the inputs."""


@dataclass(frozen=True, kw_only=True)
class HeadConfig(RunConfig):
    """The settings of a head's run; a batch consists of stretches of texts.

    Args:
        intermediate_size: the size of the head's MLP.
        vocabulary_size: the number of tokens that can be drafted.
        evaluated_rows: held-out rows, at most, in evaluations during the run.
        num_drafts: tokens of a draft in training.
        stretch: rows of a text that drafts start from.
        measured_drafts: positions at which agreement is measured.
        begins_with: SHA-256 of the weights file of the head that it starts from; empty for none.
    """

    intermediate_size: Annotated[int, SIZE]
    vocabulary_size: Annotated[int, SIZE] = 8192
    learning_rate: Annotated[float, real(MIN_POSITIVE, 1.0, expected="above 0, at most 1")] = 1e-3
    final_learning_rate: Annotated[float, real(0.0, 1.0)] = 0.05
    weight_decay: Annotated[float, real(0.0, 1e6, expected="0 or more")] = 0.01
    checkpoint_seconds: Annotated[float | None, real(0.0, math.inf, expected="0 or more")] = 120.0
    evaluate_steps: Annotated[int, SIZE] = 100
    evaluated_rows: Annotated[int, SIZE] = 2048
    num_drafts: Annotated[int, DRAFTS] = 3
    batch_size: Annotated[int, SIZE] = 32
    stretch: Annotated[int, SIZE] = 32
    measured_drafts: Annotated[int, DRAFTS] = 5
    begins_with: str = ""


class HeadTask:
    """A draft head, and the texts of a frozen model that it learns from.

    Args:
        data: states and tokens of its own texts.
        beginning: the head that it starts from, of the same sizes, whose vocabulary it keeps; for
            another head the vocabulary is chosen from the texts.

    Raises:
        TrainingError: there are too few texts, or the vocabulary is larger than the model's.
    """

    def __init__(
        self,
        network: LlamaModel,
        data: HeadStates,
        config: HeadConfig,
        beginning: TrainedHead | None = None,
    ) -> None:
        self.config, self.beginning, self.settings = config, beginning, data.settings
        held = is_held_out(data.text)
        texts = torch.unique(data.text)
        if len(texts) < 2:
            raise TrainingError(f"texts: expected 2 or more, to hold one out, got {len(texts)}")
        if not held.any() or held.all():  # of few texts the last greedy one
            greedy = texts[texts % 2 == 0]
            held = data.text == (greedy if len(greedy) else texts)[-1]
        self.held_out, self.data = data.part(held), data.part(~held)
        if beginning is None:
            tokens = [self.data.token, self.data.greedy]
            vocabulary = choose_vocabulary(network, tokens, config.vocabulary_size)
        else:
            vocabulary = beginning.vocabulary
        reached = 0 if data.keys is None else int(data.positions.max()) + MAX_DRAFTS + 1
        self.frozen = frozen_side(network, vocabulary, reached, data.settings.attended)
        sizes = data.settings.sizes(config.intermediate_size)
        self.head = DraftHead(sizes, self.frozen.eps, self.frozen.final_norm, config.seed)
        if beginning is not None:
            beginning.put_into(self.head)
        if data.settings.attended and (beginning is None or not beginning.attends):
            begin_queries(self.head, self.frozen, data, ~held)
        self.order = StretchOrder(self.data.text, config.stretch, config.batch_size, config.seed)

    def digest(self) -> str:
        """A hash of the training data."""
        digest = hashlib.sha256(f"{self.settings.taps}{self.settings.attended}".encode())
        for numbers in (self.data.text, self.data.token, self.data.greedy):
            digest.update(numbers.numpy().tobytes())
        return digest.hexdigest()

    def agreement(self, max_rows: int | None = None, *, greedy: bool = False) -> list[float]:
        """Agreement by position on held-out texts; with ``greedy`` on the greedy ones only."""
        starts = self.held_out.starts
        if greedy:
            starts = starts[self.held_out.text[starts] % 2 == 0]
        if max_rows is not None and len(starts) > max_rows:
            starts = starts[:: -(-len(starts) // max_rows)]
        measured = self.config.measured_drafts
        return agreement_by_position(self.head, self.frozen, self.held_out, starts, measured)


class HeadTrainer(StepTrainer):
    """The training of a head."""

    config: HeadConfig

    def __init__(self, task: HeadTask, config: HeadConfig, directory: Path) -> None:
        self._task = task
        super().__init__(
            task.head,
            config,
            directory,
            _Steps(config.steps),
            evaluates=True,
            step_columns=("agreement",),
            evaluation_columns=tuple(f"agreement_{k + 1}" for k in range(config.measured_drafts)),
        )

    def losses(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:  # noqa: ARG002
        task, starts = self._task, self._task.order.starts(inputs["step"])
        with self.config.autocast(torch.device("cpu")):
            loss, agreement = draft_loss(
                task.head, task.frozen, task.data, starts, self.config.num_drafts
            )
        return loss, [torch.tensor(agreement)]

    def scores(self) -> tuple[float, ...]:
        return tuple(self._task.agreement(self.config.evaluated_rows))

    def tokens_at(self, step: int) -> int:
        return len(self._task.order.starts(step))

    def describe_evaluation(self, values: Mapping[str, float]) -> str:
        shown = " ".join(f"{values[name]:.3f}" for name in self.evaluation_columns)
        return f"held-out agreement by draft: {shown}"

    def rates(self, name: str, parameter: nn.Parameter) -> tuple[bool, float]:
        return parameter.ndim > 1 and not name.endswith("norm"), 1.0


class _Steps(Dataset[dict[str, Any]]):
    """The numbers of the steps."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, step: int) -> dict[str, Any]:
        return {"step": step}


def is_held_out(text: Tensor) -> Tensor:
    """Whether texts, int64 indices, are held out: two in 40."""
    return (text // 2) % ONE_IN == ONE_IN - 1


def choose_vocabulary(network: LlamaModel, tokens: list[Tensor], size: int) -> Tensor:
    """int64 [size], ascending: the tokens that end a text, and the most frequent tokens.

    Raises:
        TrainingError: the model has fewer tokens.
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
def frozen_side(
    network: LlamaModel, vocabulary: Tensor, num_positions: int = 0, attended: Attended = ()
) -> FrozenSide:
    """The parts of a model that a head uses, in float32 on the CPU.

    Args:
        vocabulary: int64 [vocabulary_size], the tokens that can be drafted.
        num_positions: positions that drafts attend from.
        attended: the key heads that they attend to, in layers whose queries are rotated alike.
    """
    layer = attended[0][0] if attended else 0
    measure = network.measure
    every = torch.arange(network.config.vocab_size, device=network.device)

    def rows_of(tokens: Tensor) -> Tensor:
        return matrix_rows(network.weights.lm_head, tokens.to(network.device)).float().cpu()

    return FrozenSide(
        embeddings=network.embed(every).float().cpu().clone(),
        head_rows=rows_of(vocabulary),
        vocabulary=vocabulary,
        final_norm=network.weights.final_norm.detach().float().cpu().clone(),
        eps=network.config.rms_norm_eps,
        cos_sin=network.cos_sin(num_positions, layer).float().cpu(),
        attention_scale=network.attention_scale,
        multiplier=measure.multiplier,
        soft_cap=measure.soft_cap,
        rows_of=rows_of,
    )


@torch.no_grad()
def begin_queries(head: DraftHead, frozen: FrozenSide, data: HeadStates, rows: Tensor) -> None:
    """Fit a head's queries to the model's own queries, by least squares.

    They start as the model's own queries to the same keys, as far as a linear layer can compute
    them from the head's state. Random queries would learn nothing for a long time, since values are
    of use only after the right keys are found.

    Args:
        head: its ``attention_query`` is written; the other weights have their initial values.
        data: all of it, with queries.
        rows: bool [n], the rows that may be learnt from.
    """
    hidden = head.sizes.hidden_size
    squares = torch.zeros(hidden, hidden)
    products = torch.zeros(hidden, head.attention_query.shape[:2].numel())
    queries = data.queries
    assert queries is not None
    for begin in range(0, len(queries), FITTED_ROWS):
        asked = torch.arange(max(1, begin), min(begin + FITTED_ROWS, len(queries)))
        before = asked - 1
        inside = (data.text[before] == data.text[asked]) & rows[before]
        asked, before = asked[inside], before[inside]
        if not len(asked):
            continue
        state = head.begin(data.states[before].float())
        known = head.asked(state, frozen.embeddings[data.token[before]])
        known = functional.rms_norm(known, head.attention_norm.shape, None, frozen.eps)
        squares += known.T @ known
        products += known.T @ queries[asked].float().flatten(1)
    scale = squares.diagonal().mean()
    if not scale > 0:
        return
    ridge = RIDGE * scale * torch.eye(hidden)
    fitted = torch.linalg.solve(squares + ridge, products)
    head.attention_query.copy_(fitted.T.view_as(head.attention_query))
