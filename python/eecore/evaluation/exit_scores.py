"""How well every exit of a model predicts given tokens: teacher-forced, on eecore's own kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from eecore.errors import RequestError
from eecore.models import AttentionBatch, KVCache, LlamaModel

__all__ = ["ExitScore", "Scored", "score_exits", "whole_batch"]

# Rows whose logits are in memory at a time.
ROWS_AT_A_TIME = 64


@dataclass(frozen=True)
class Scored:
    """A sequence, and from which token on its predictions count."""

    token_ids: list[int]
    first: int = 1


@dataclass(frozen=True)
class ExitScore:
    """Means over the counted tokens, predicted by head(h[exit_layer])."""

    exit_layer: int
    perplexity: float
    accuracy: float
    """How often the likeliest token is the right one."""
    agreement: float
    """How often it is that of the last layer."""


@torch.inference_mode()
def score_exits(
    network: LlamaModel, sequences: Sequence[Scored], layers: Sequence[int]
) -> list[ExitScore]:
    """Perplexity, accuracy and agreement with the last layer after each of ``layers``.

    (LayerSkip §5, Figure 6 and Tables 1 and 2: the quality of early exits.)

    Args:
        network: the model.
        sequences: token ids; each must fit into the model's context.
        layers: exit layers, 1..num_layers.

    Raises:
        RequestError: nothing to score, a sequence that is too long, a layer there is not.
    """
    num_layers = network.config.num_layers
    wanted = sorted({*layers, num_layers})
    if not layers or wanted[0] < 1 or wanted[-1] > num_layers:
        raise RequestError(f"layers: expected some of 1..{num_layers}, got {list(layers)}")
    limit = network.config.max_position
    for number, sequence in enumerate(sequences):
        length = len(sequence.token_ids)
        if not 1 <= sequence.first < length <= limit:
            raise RequestError(
                f"sequences[{number}]: expected at most {limit} tokens and one or more to predict, "
                f"got {length} of which the first {sequence.first} are given"
            )
    if not sequences:
        raise RequestError("sequences: expected at least one, got none")
    sums = {layer: torch.zeros(3, dtype=torch.float64) for layer in wanted}
    for sequence in sequences:
        for layer, sum_ in _sums(network, sequence, wanted).items():
            sums[layer] += sum_
    count = sum(len(sequence.token_ids) - sequence.first for sequence in sequences)
    scores = []
    for layer in wanted:
        nats, right, agreeing = (sums[layer] / count).tolist()
        scores.append(ExitScore(layer, math.exp(min(nats, 700.0)), right, agreeing))
    return [score for score in scores if score.exit_layer in set(layers)]


def _sums(network: LlamaModel, sequence: Scored, layers: list[int]) -> dict[int, Tensor]:
    """By layer: summed nats, right and agreeing predictions of one sequence."""
    ids = torch.tensor(sequence.token_ids, device=network.device)
    rows = slice(sequence.first - 1, len(ids) - 1)  # row i predicts token i + 1
    targets = ids[sequence.first :]
    states = {}
    hidden = network.embed(ids)
    kv = KVCache.allocate(network.config, 1, len(ids), device=ids.device, dtype=network.dtype)
    batch = whole_batch(len(ids), ids.device)
    for begin, end in itertools.pairwise([0, *layers]):
        hidden = network.layers(begin, end, hidden, kv, batch)
        states[end] = hidden[rows]
    sums = {layer: torch.zeros(3, dtype=torch.float64) for layer in layers}
    for first in range(0, len(targets), ROWS_AT_A_TIME):
        part = slice(first, first + ROWS_AT_A_TIME)
        last = None
        for layer in reversed(layers):
            logits = network.logits(states[layer][part])
            chosen = logits.argmax(-1)
            last = chosen if last is None else last
            nats = cross_entropy(logits, targets[part], reduction="sum")
            right, agreeing = (chosen == targets[part]).sum(), (chosen == last).sum()
            sums[layer] += torch.stack([nats.double(), right.double(), agreeing.double()]).cpu()
    return sums


def whole_batch(count: int, device: torch.device) -> AttentionBatch:
    """One sequence in one page."""
    return AttentionBatch(
        positions=torch.arange(count, device=device),
        slot_mapping=torch.arange(count, device=device),
        page_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
        seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
        query_start_loc=torch.tensor([0, count], dtype=torch.int32, device=device),
    )
