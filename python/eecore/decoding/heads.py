"""What the LM head says of rows that have left the layers: token, confidence, log-probability.

Rows of plain greedy requests share one fused pass that never has logits in memory; rows of requests
that sample, penalise or ask for log-probabilities share one pass with logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from eecore.decoding.runner import Runner
from eecore.decoding.sampling import needs_logits, penalise_repetition, top_logprobs
from eecore.scheduling.sequence import Sequence

__all__ = ["HeadRows", "Heads", "read_heads"]


@dataclass(frozen=True)
class Heads:
    """Results by row of the pass; rows that were not asked for hold nothing of meaning."""

    token: list[int]
    """The greedy token of rows without logits."""
    confidence: list[float]
    """Gap of the two largest probabilities."""
    top_logprob: list[float]
    """Log-probability of the most probable token."""
    logits: dict[int, Tensor]
    """float32 [vocab_size] of each row of a request that needs them."""
    tokens: Tensor | None = None
    """int64 [num_rows], ``token`` on the model's device, where no row has logits."""

    def adjusted(self, row: int, sequence: Sequence, context: list[int]) -> Tensor:
        """The row's logits after the request's repetition penalty over ``context``."""
        return penalise_repetition(self.logits[row], context, sequence.sampling.repetition_penalty)

    def logprobs(
        self, row: int, sequence: Sequence, token_id: int
    ) -> tuple[float | None, dict[int, float] | None]:
        """What the request asked to know of the emitted token's log-probability."""
        asked = sequence.sampling.logprobs
        if asked is None:
            return None, None
        if row not in self.logits:
            return self.top_logprob[row], {}
        return top_logprobs(self.logits[row], token_id, asked)


HeadRows = Iterable[tuple[int, Sequence]]


def read_heads(runner: Runner, hidden: Tensor, rows: HeadRows) -> Heads:
    """Run the head for some rows of ``hidden`` [num_rows, hidden_size]."""
    asked = list(rows)
    plain = [row for row, sequence in asked if not needs_logits(sequence.sampling)]
    full = [row for row, sequence in asked if needs_logits(sequence.sampling)]
    num_rows = hidden.shape[0]
    if len(plain) == num_rows:
        got = runner.model.confidence(hidden)
        logprobs = (got.top_logit - got.logsumexp).tolist()
        return Heads(got.token.tolist(), got.confidence.tolist(), logprobs, {}, got.token)
    token, confidence, logprob = [0] * num_rows, [0.0] * num_rows, [0.0] * num_rows
    logits: dict[int, Tensor] = {}

    if plain:
        got = runner.model.confidence(_pick_rows(runner, hidden, plain))
        values = zip(
            plain,
            got.token.tolist(),
            got.confidence.tolist(),
            got.top_logit.tolist(),
            got.logsumexp.tolist(),
            strict=True,
        )
        for row, row_token, row_confidence, top_logit, logsumexp in values:
            token[row], confidence[row] = row_token, row_confidence
            logprob[row] = top_logit - logsumexp
    if full:
        block = runner.model.logits(_pick_rows(runner, hidden, full))
        best = block.softmax(dim=-1).topk(2, dim=-1).values
        gaps = (best[:, 0] - best[:, 1]).tolist()
        tops = best[:, 0].log().tolist()
        for i, row in enumerate(full):
            logits[row] = block[i]
            confidence[row], logprob[row] = gaps[i], tops[i]
    return Heads(token, confidence, logprob, logits)


def _pick_rows(runner: Runner, hidden: Tensor, index: list[int]) -> Tensor:
    if len(index) == hidden.shape[0]:
        return hidden  # rows are asked for in order
    return hidden.index_select(0, runner.tensor(np.asarray(index, dtype=np.int64)))
