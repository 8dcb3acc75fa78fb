"""Tokens drawn from logits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from eecore.ops.registered import compiled

__all__ = ["SampledRows", "SamplingRows", "sample_tokens"]

_sample_tokens = compiled("sample_tokens")


class SamplingRows(NamedTuple):
    """How the requests of a batch choose their tokens.

    The filters and their order are transformers': repetition penalty, temperature, top-k, top-p,
    min-p. What is before them is vLLM's, in its order: allowed tokens, bias, repetition penalty,
    frequency penalty, presence penalty.
    """

    temperature: Tensor
    """float32 [num_requests]; 0: the most probable token, the lowest id among equals."""
    top_k: Tensor
    """int32 [num_requests]: only the k most probable tokens, and what equals the last; 0: off."""
    top_p: Tensor
    """float32 [num_requests]: only the most probable tokens, lower ids first among equals, while
    those before a token have less than this mass (but for a millionth of it, which float32
    probabilities may be off by); the first always stays; 1: off."""
    min_p: Tensor
    """float32 [num_requests]: only tokens of this share of the largest probability; 0: off."""
    repetition_penalty: Tensor
    """float32 [num_requests]: positive logits of seen tokens are divided by it, negative ones
    multiplied, once however often a token was seen (CTRL, Keskar et al. 2019); 1: off."""
    seed: Tensor
    """int64 [num_requests], of the random numbers."""
    seen: Tensor
    """int64 [num_requests, num_seen]: the ids that have been seen, filled up with -1."""
    presence_penalty: Tensor | None = None
    """float32 [num_requests]: subtracted from the logits of generated tokens, once however often a
    token was generated; 0: off."""
    frequency_penalty: Tensor | None = None
    """float32 [num_requests]: subtracted from the logits of generated tokens each time that a token
    was; 0: off."""
    generated: Tensor | None = None
    """int64 [num_requests, num_generated]: ids that have been generated, each as often as it was,
    filled up with -1."""
    bias_ids: Tensor | None = None
    """int64 [num_requests, num_bias]: ids whose logits are biased, none twice, -1 behind them."""
    bias: Tensor | None = None
    """float32 [num_requests, num_bias], added to their logits. With ``bias_ids``."""
    allowed: Tensor | None = None
    """int32 [num_requests, num_masks, ceil(vocab_size / 32)]: token ``id`` can be chosen where bit
    ``id % 32`` of word ``id // 32`` is set, as in llguidance and xgrammar. The logits of the others
    are -infinity in all that is written of a row: confidence, log-probabilities, distributions. A
    row has mask ``positions[w] - first_position[r]`` of its request, 0 without ``first_position``;
    where that is none, all tokens are allowed."""


class SampledRows(NamedTuple):
    """What :func:`sample_tokens` writes of each output row.

    Where the logits of allowed tokens hold NaN, or the largest is not finite, there is no token
    (-1): its numbers are NaN, its distribution zeros.
    """

    token: Tensor
    """int64 [num_outputs]; -1 where no token has a positive probability."""
    confidence: Tensor
    """float32 [num_outputs]: the gap of the two largest probabilities of the softmax of the logits
    as they came, or the chosen token's probability."""
    logprob: Tensor
    """float32 [num_outputs]: of the token, in the log-softmax of the logits as they came."""
    logsumexp: Tensor
    """float32 [num_outputs], of the logits as they came."""
    probs: Tensor | None = None
    """float32 [num_probs, vocab_size]: the distributions that tokens are drawn from, whole rows;
    all on the chosen token at temperature 0."""
    uniform: Tensor | None = None
    """float32 [num_outputs, 2] in [0, 1): random numbers for :func:`accept_round`."""
    top_ids: Tensor | None = None
    """int64 [num_outputs, num_top]: the most probable tokens of the logits as they came, lower ids
    first among equals; -1 behind the vocabulary."""
    top_logprobs: Tensor | None = None
    """float32 [num_outputs, num_top], theirs; -infinity there. With ``top_ids``."""


def sample_tokens(
    logits: Tensor,
    rows: SamplingRows,
    out: SampledRows,
    *,
    purpose: int,
    positions: Tensor,
    index: Tensor | None = None,
    row: Tensor | None = None,
    kind: Tensor | None = None,
    wanted: int = 0,
    round_tokens: Tensor | None = None,
    first_position: Tensor | None = None,
    as_probability: bool = False,
    probs_by_step: int = 0,
) -> None:
    """Choose a token for each row of logits, as its request asks for.

    Row j of the logits writes row ``w = index[j]`` of the outputs for request ``r = row[w]``.
    Tokens are drawn by inversion, in id order and float64. The random numbers are Philox4x32-10's
    (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with the seed as key and
    (position of the drawn token, purpose) as counter: a request draws the same numbers alone and in
    any batch, after a preemption, and on every device. A token takes 53 bits of the first two
    words, ``uniform`` 24 bits of each of the first two at purpose 2.

    Args:
        logits: [num_rows, vocab_size], any row stride.
        rows: of the requests.
        out: written in place, but for rows that are passed over.
        purpose: what the token is for, 0..2**32-1 and not 2: tokens drawn at one position for
            different purposes are independent.
        positions: int64 [num_outputs], of the token before the drawn one.
        index: int32 [num_rows], each at most once. None: j.
        row: int32 [num_outputs]. None: w.
        kind: int32 [num_requests]; requests of a kind other than ``wanted`` are passed over.
        wanted: see ``kind``.
        round_tokens: int64 [num_requests, round_width]; of ``round_tokens[r]`` the ids at 1 up to
            ``positions[w] - first_position[r]`` count as seen and generated too.
        first_position: int64 [num_requests], of ``round_tokens[:, 0]``; with it, with
            ``probs_by_step`` and with several masks.
        as_probability: ``out.confidence`` is the token's probability in the distribution that it
            is drawn from (at temperature 0 in the softmax of the logits as they came).
        probs_by_step: where it is above 0, ``out.probs`` has this many rows for each request, and
            a distribution is row ``positions[w] - first_position[r]`` of them; else row w.
    """
    _sample_tokens(
        logits,
        *rows,
        purpose,
        positions,
        index,
        row,
        kind,
        wanted,
        round_tokens,
        first_position,
        as_probability,
        probs_by_step,
        *out,
    )
