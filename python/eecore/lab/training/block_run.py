"""The training of a head that drafts a block: its settings, and what it learns from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional

from eecore.lab.training.block_head import BlockHead, BlockSizes
from eecore.lab.training.block_loss import AnchorOrder, block_agreement, block_loss
from eecore.lab.training.head_loss import FrozenSide
from eecore.lab.training.head_run import SIZE, DraftConfig, DraftTrainee
from eecore.lab.training.head_states import HeadStates
from eecore.models import LlamaModel
from eecore.models.head_vocabulary import matrix_rows
from eecore.values import whole

MAX_BLOCK, MAX_LAYERS, MAX_RANK = 64, 16, 1024
SPREAD = 2.0
"""The standard deviation of the logits that a head begins with."""
MEASURED_TOKENS = 512
"""Tokens whose embeddings are measured for it, at most."""
SIZED_ROWS = 4096
"""Rows whose states are measured, to give the taps' states one size."""


@dataclass(frozen=True, kw_only=True)
class BlockConfig(DraftConfig):
    """The settings of a run; a batch consists of texts, with blocks from random rows of each.

    Args:
        num_layers: the head's own layers.
        block_size: tokens of a block: the text's last one, and masks; as many drafts.
        markov_rank: of the table that corrects a draft by the token before it.
        anchors: blocks of a text in a step, at most.
    """

    num_layers: Annotated[int, whole(1, MAX_LAYERS)] = 1
    block_size: Annotated[int, whole(2, MAX_BLOCK)] = 7
    markov_rank: Annotated[int, whole(1, MAX_RANK)] = 64
    batch_size: Annotated[int, SIZE] = 8
    anchors: Annotated[int, SIZE] = 16
    evaluated_rows: Annotated[int, SIZE] = 1024

    @property
    def measured(self) -> int:
        return self.block_size


class BlockTrainee(DraftTrainee):
    """A head that drafts a block, which learns from the texts of a frozen model.

    Args:
        data: states and tokens of its own texts, those of the prompts among them.

    Raises:
        TrainingError: there are too few texts, or the vocabulary is larger than the model's.
    """

    config: BlockConfig

    def __init__(
        self, network: LlamaModel, data: HeadStates, config: BlockConfig, *, share: float = 1.0
    ) -> None:
        super().__init__(network, data, config, share)
        model = network.config
        # A head multiplies by embeddings and LM head as they are stored.
        every = torch.arange(model.vocab_size, device=network.device)
        embeddings = matrix_rows(network.weights.embed_tokens, every).float().cpu()
        self.frozen = replace(self.frozen, embeddings=embeddings, rows_of=None)
        self.mask_token = choose_mask(self.data, embeddings)
        sizes = BlockSizes(
            hidden_size=model.hidden_size,
            num_taps=len(data.settings.taps),
            intermediate_size=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=model.num_q_heads,
            head_dim=model.head_dim,
            rope_theta=model.ropes[0].theta,
            block_size=config.block_size,
            vocab_size=model.vocab_size,
            vocabulary_size=config.vocabulary_size,
            markov_rank=config.markov_rank,
        )
        norm, taps = first_norm(self.frozen), tap_sizes(self.data)
        self.head = BlockHead(sizes, self.frozen.eps, norm, taps, config.seed)
        self.module: nn.Module = self.head
        starts = self.data.starts
        self.order = AnchorOrder(
            starts, self.data.text[starts], config.anchors, config.batch_size, config.seed
        )

    def loss(self, step: int) -> tuple[Tensor, int, float]:
        starts = self.order.starts(step)
        loss, agreement = block_loss(self.head, self.frozen, self.data, starts, self.mask_token)
        return loss, len(starts) * self.config.block_size, agreement

    def agreement_of(self, starts: Tensor) -> list[float]:
        return block_agreement(self.head, self.frozen, self.held_out, starts, self.mask_token)

    def rates(self, name: str, parameter: nn.Parameter) -> tuple[bool, float]:
        decays, rate = super().rates(name, parameter)
        return decays and "markov" not in name, rate


def first_norm(frozen: FrozenSide) -> Tensor:
    """The initial value of a head's output norm, [hidden_size]: the model's, scaled down.

    A head's states begin as embeddings, with which the model's own norm gives a token's own row far
    too large a logit.
    """
    some = frozen.vocabulary[:: -(-len(frozen.vocabulary) // MEASURED_TOKENS)]
    norm = frozen.final_norm
    states = functional.rms_norm(frozen.embeddings[some], norm.shape, norm, frozen.eps)
    return norm * (SPREAD / float(frozen.products(states).std().clamp(min=1e-6)))


def choose_mask(data: HeadStates, embeddings: Tensor) -> int:
    """The token that stands for what is to be drafted: the first of those that the texts have
    least, whose embedding is not zero.
    """
    counts = torch.bincount(data.token, minlength=len(embeddings))
    counts[~embeddings.any(1)] += len(data) + 1
    return int(counts.argmin())


def tap_sizes(data: HeadStates) -> Tensor:
    """The median over rows of the root mean square of each tap's states: float32 [num_taps]."""
    some = torch.arange(0, len(data), -(-len(data) // SIZED_ROWS))
    squares = data.states[some].float().square().mean(-1)
    return squares.sqrt().median(0).values.clamp(min=1e-6)
