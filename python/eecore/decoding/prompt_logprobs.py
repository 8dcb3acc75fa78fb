"""Log-probabilities of prompts: of each token of a prompt, by the state before it.

States go through the head a slice at a time, so that at most the logits of ``SLICE_ROWS`` positions
are in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isnan

import torch
from torch import Tensor

from eecore import ops
from eecore.decoding.sampling import DRAWS_TOKEN
from eecore.models import Network
from eecore.output import PromptLogprob
from eecore.scheduling.sequence import Sequence

SLICE_ROWS = 64


@dataclass(frozen=True)
class Scored:
    """Consecutive rows of a pass, and the tokens to score, each after its row."""

    first_row: int
    token_ids: list[int]
    num_top: int
    """Number of most probable tokens to report with each."""

    @classmethod
    def of(cls, sequence: Sequence, first: int, stop: int, end_row: int) -> Scored | None:
        """The tokens to score after positions ``first..stop-1`` of a request, which are the rows
        before ``end_row``; None where the request asks for no log-probabilities, or where all of
        them are known, as in a replay.
        """
        asked, known = sequence.sampling.prompt_logprobs, len(sequence.prompt_logprobs)
        if asked is None:
            return None
        begin = max(first, known)
        token_ids = sequence.prompt_ids[begin + 1 : stop + 1]
        return cls(end_row - stop + begin, token_ids, asked) if token_ids else None


def prompt_logprobs(
    model: Network, hidden: Tensor, scored: list[Scored]
) -> list[list[PromptLogprob] | None]:
    """Log-probabilities of tokens in the log-softmax of the unchanged logits.

    Args:
        hidden: [num_rows, hidden_size], states of a pass.
        scored: the rows and tokens to score.

    Returns:
        For each of ``scored`` one entry per token; None where a row has no finite distribution.
    """
    rows = [row for s in scored for row in range(s.first_row, s.first_row + len(s.token_ids))]
    token_ids = [token for s in scored for token in s.token_ids]
    tops = [s.num_top for s in scored for _ in s.token_ids]
    found: list[PromptLogprob | None] = []
    for begin in range(0, len(rows), SLICE_ROWS):
        part = slice(begin, begin + SLICE_ROWS)
        states = hidden.index_select(0, torch.tensor(rows[part], device=hidden.device))
        found += _of_slice(model, states, token_ids[part], tops[part])
    entries = iter(found)
    return [_whole([next(entries) for _ in s.token_ids]) for s in scored]


def _whole(entries: list[PromptLogprob | None]) -> list[PromptLogprob] | None:
    known = [entry for entry in entries if entry is not None]
    return known if len(known) == len(entries) else None


def _of_slice(
    model: Network, hidden: Tensor, token_ids: list[int], tops: list[int]
) -> list[PromptLogprob | None]:
    """One entry for each row of ``hidden``, [num_rows, hidden_size]; None: logits not finite."""
    logits = model.logits(hidden)
    best = _most_probable(logits, max(tops))
    tokens = torch.tensor(token_ids, device=logits.device)[:, None]
    own = logits.gather(1, tokens)
    lower_ids = torch.arange(logits.shape[1], device=logits.device) < tokens
    ranks = 1 + (logits > own).sum(1) + ((logits == own) & lower_ids).sum(1)
    logprobs = own[:, 0] - best.logsumexp
    assert best.top_ids is not None
    assert best.top_logprobs is not None
    rows = zip(
        token_ids,
        logprobs.tolist(),
        ranks.tolist(),
        best.top_ids.tolist(),
        best.top_logprobs.tolist(),
        tops,
        strict=True,
    )
    return [
        None if isnan(logprob) else PromptLogprob(token, logprob, rank, _top(ids, values, count))
        for token, logprob, rank, ids, values, count in rows
    ]


def _top(ids: list[int], values: list[float], count: int) -> dict[int, float]:
    pairs = zip(ids[:count], values[:count], strict=True)
    return {token: value for token, value in pairs if value > -inf}


def _most_probable(logits: Tensor, num_top: int) -> ops.SampledRows:
    """The most probable tokens of each row, as for generated tokens without penalties."""
    num_rows, device = logits.shape[0], logits.device

    def of_request(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((1,), value, dtype=dtype, device=device)

    def of_rows(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty((num_rows, *shape), dtype=dtype, device=device)

    request = ops.SamplingRows(
        temperature=of_request(0.0, torch.float32),
        top_k=of_request(0, torch.int32),
        top_p=of_request(1.0, torch.float32),
        min_p=of_request(0.0, torch.float32),
        repetition_penalty=of_request(1.0, torch.float32),
        seed=of_request(0, torch.int64),
        seen=torch.empty((1, 0), dtype=torch.int64, device=device),
    )
    out = ops.SampledRows(
        token=of_rows(torch.int64),
        confidence=of_rows(torch.float32),
        logprob=of_rows(torch.float32),
        logsumexp=of_rows(torch.float32),
        top_ids=of_rows(torch.int64, num_top),
        top_logprobs=of_rows(torch.float32, num_top),
    )
    ops.sample_tokens(
        logits,
        request,
        out,
        purpose=DRAWS_TOKEN,
        positions=torch.zeros(num_rows, dtype=torch.int64, device=device),
        row=torch.zeros(num_rows, dtype=torch.int32, device=device),
    )
    return out
