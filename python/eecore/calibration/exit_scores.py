"""Scores of every exit of a model on given tokens: teacher-forced, on eecore's own kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from eecore.config import AnyModelConfig, T5Config
from eecore.errors import RequestError
from eecore.models import AttentionBatch, CrossBatch, KVCache, Network, T5Model

# Rows whose logits are in memory at a time.
ROWS_AT_A_TIME = 64


@dataclass(frozen=True)
class Scored:
    """A sequence, and the token from which on its predictions count."""

    token_ids: list[int]
    first: int = 1
    input_ids: list[int] | None = None
    """The encoder's tokens, where there is an encoder."""

    @staticmethod
    def of(config: AnyModelConfig, given: list[int], learnt: list[int]) -> Scored:
        """A prompt and the text that should follow it, as a model reads the two."""
        if isinstance(config, T5Config):
            return Scored([config.decoder_start_token_id, *learnt], 1, given)
        return Scored([*given, *learnt], len(given))


@dataclass(frozen=True)
class ExitScore:
    """Means over the counted tokens, predicted by head(h[exit_layer])."""

    exit_layer: int
    perplexity: float
    accuracy: float
    """Share of tokens whose most probable prediction is right."""
    agreement: float
    """Share of tokens whose most probable prediction is the last layer's."""


@torch.inference_mode()
def score_exits(
    network: Network, sequences: Sequence[Scored], layers: Sequence[int]
) -> list[ExitScore]:
    """Perplexity, accuracy and agreement with the last layer after each of ``layers``.

    (LayerSkip §5, Figure 6 and Tables 1 and 2: the quality of early exits.)

    Args:
        sequences: token ids; each must fit into the model's context.

    Raises:
        RequestError: there is nothing to score, a sequence is too long, or a layer does not exist.
    """
    known = network.config.exit_layers
    wanted = sorted({*layers, known[-1]})
    if not layers or not set(wanted) <= set(known):
        listed = f"1..{known[-1]}" if known.step == 1 else ", ".join(map(str, known))
        raise RequestError(f"layers: expected some of {listed}, got {list(layers)}")
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


def _sums(network: Network, sequence: Scored, layers: list[int]) -> dict[int, Tensor]:
    """By layer: summed nats, right and agreeing predictions of one sequence."""
    ids = torch.tensor(sequence.token_ids, device=network.device)
    rows = slice(sequence.first - 1, len(ids) - 1)  # row i predicts token i + 1
    targets = ids[sequence.first :]
    states = {layer: hidden[rows] for layer, hidden in forced_states(network, sequence, layers)}
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


def forced_states(
    network: Network, sequence: Scored, layers: Iterable[int]
) -> Iterator[tuple[int, Tensor]]:
    """Each of ``layers``, ascending, and the states after it, [num_tokens, hidden_size]."""
    ids = torch.tensor(sequence.token_ids, device=network.device)
    count, given = len(ids), sequence.input_ids
    most = max(count, len(given or ()))
    kv = KVCache.allocate(network.config, 2, most, device=ids.device, dtype=network.dtype)
    batch = whole_sequences([count], most, ids.device)
    if isinstance(network, T5Model):
        assert given is not None
        slots = torch.arange(most, most + len(given), device=ids.device)  # the second page
        network.encode(torch.tensor(given, device=ids.device), [len(given)], kv, slots)
        cross = CrossBatch(batch.page_table + 1, torch.full_like(batch.seq_lens, len(given)))
        batch = replace(batch, cross=cross)
    hidden = network.embed(ids)
    for begin, end in itertools.pairwise([0, *layers]):
        hidden = network.layers(begin, end, hidden, kv, batch)
        yield end, hidden


def whole_sequences(lengths: Sequence[int], page_size: int, device: torch.device) -> AttentionBatch:
    """A batch of all rows of some sequences, one after the other in pages 0, 1, ..."""
    pages = [-(-length // page_size) for length in lengths]
    first_pages = [0, *itertools.accumulate(pages[:-1])]
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    for row, first, count in zip(table, first_pages, pages, strict=True):
        row[:count] = torch.arange(first, first + count)
    positions = [torch.arange(length) for length in lengths]
    slots = [first * page_size + own for first, own in zip(first_pages, positions, strict=True)]
    starts = [0, *itertools.accumulate(lengths)]
    return AttentionBatch(
        positions=torch.cat(positions).to(device),
        slot_mapping=torch.cat(slots).to(device),
        page_table=table.to(device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        states=torch.zeros(len(lengths), 2, dtype=torch.int32, device=device),
    )
