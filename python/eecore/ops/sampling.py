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
    min-p. The steps before these are vLLM's, in its order: allowed tokens, bias, repetition,
    frequency and presence penalty.
    """

    temperature: Tensor
    """float32 [num_requests]; 0: the most probable token, the lowest id among equals."""
    top_k: Tensor
    """int32 [num_requests]: only the k most probable tokens, and all equal to the last; 0: off."""
    top_p: Tensor
    """float32 [num_requests]: only the most probable tokens, lower ids first among equals: a token
    is kept while those before it have less than this mass (within a millionth of it, since
    float32 probabilities are rounded); the first token is always kept; 1: off."""
    min_p: Tensor
    """float32 [num_requests]: minimum probability of a token, as a share of the largest; 0: off."""
    repetition_penalty: Tensor
    """float32 [num_requests]: positive logits of seen tokens are divided by it, negative ones
    multiplied, once however often a token was seen (CTRL, Keskar et al. 2019); 1: off."""
    seed: Tensor
    """int64 [num_requests]: the seeds of the random numbers."""
    seen: Tensor
    """int64 [num_requests, num_seen]: the ids that have been seen, filled up with -1."""
    presence_penalty: Tensor | None = None
    """float32 [num_requests]: subtracted from the logits of generated tokens, once however often a
    token was generated; 0: off."""
    frequency_penalty: Tensor | None = None
    """float32 [num_requests]: subtracted from the logits of generated tokens each time that a token
    was generated; 0: off."""
    generated: Tensor | None = None
    """int64 [num_requests, num_generated]: ids that have been generated, each as often as it was
    generated, filled up with -1."""
    bias_ids: Tensor | None = None
    """int64 [num_requests, num_bias]: ids whose logits are biased, none twice, then -1."""
    bias: Tensor | None = None
    """float32 [num_requests, num_bias], added to the logits of ``bias_ids``."""
    allowed: Tensor | None = None
    """int32 [num_requests, num_masks, ceil(vocab_size / 32)]: token ``id`` can be chosen where bit
    ``id % 32`` of word ``id // 32`` is set, as in llguidance and xgrammar. The logits of all other
    tokens are -infinity in all outputs of a row: confidence, log-probabilities, distributions. A
    row has mask ``positions[w] - first_position[r]`` of its request, 0 without ``first_position``;
    if there is no mask of that number, all tokens are allowed."""


class SampledRows(NamedTuple):
    """The results of :func:`sample_tokens` for each output row.

    Where the logits of allowed tokens hold NaN, or the largest is not finite, the token is -1, its
    numbers are NaN and its distribution is zeros.
    """

    token: Tensor
    """int64 [num_outputs]; -1 where no token has a positive probability."""
    confidence: Tensor
    """float32 [num_outputs]: the gap of the two largest probabilities of the softmax of the given
    logits, or the chosen token's probability."""
    logprob: Tensor
    """float32 [num_outputs]: the token's value in the log-softmax of the given logits."""
    logsumexp: Tensor
    """float32 [num_outputs], of the given logits."""
    probs: Tensor | None = None
    """float32 [num_probs, vocab_size]: the distributions that tokens are drawn from, whole rows;
    at temperature 0 the chosen token has probability 1."""
    uniform: Tensor | None = None
    """float32 [num_outputs, 2] in [0, 1): random numbers for :func:`accept_round`."""
    top_ids: Tensor | None = None
    """int64 [num_outputs, num_top]: the most probable tokens of the given logits, lower ids first
    among equals; -1 after the last token of the vocabulary."""
    top_logprobs: Tensor | None = None
    """float32 [num_outputs, num_top], of ``top_ids``; -infinity where an id is -1."""


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
    """Choose a token for each row of logits, by the settings of its request.

    Row j of the logits writes row ``w = index[j]`` of the outputs for request ``r = row[w]``.
    Tokens are drawn by inversion, in id order and float64. The random numbers are Philox4x32-10's
    (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with the seed as key and
    (position of the drawn token, purpose) as counter: a request draws the same numbers alone and in
    any batch, after a preemption, and on every device. A token takes 53 bits of the first two
    words, ``uniform`` 24 bits of each of the first two at purpose 2.

    Args:
        logits: [num_rows, vocab_size], any row stride.
        rows: the settings of the requests.
        out: written in place, except for rows that are skipped.
        purpose: what the token is for, 0..2**32-1 and not 2: tokens drawn at one position for
            different purposes are independent.
        positions: int64 [num_outputs], the position of the token before the drawn one.
        index: int32 [num_rows], each at most once. None: j.
        row: int32 [num_outputs]. None: w.
        kind: int32 [num_requests]; requests of a kind other than ``wanted`` are skipped.
        wanted: see ``kind``.
        round_tokens: int64 [num_requests, round_width]; the ids of ``round_tokens[r]`` at 1 up to
            ``positions[w] - first_position[r]`` also count as seen and generated.
        first_position: int64 [num_requests], the position of ``round_tokens[:, 0]``; required with
            ``round_tokens``, ``probs_by_step`` or several masks.
        as_probability: ``out.confidence`` is the token's probability in the distribution that it
            is drawn from (at temperature 0 in the softmax of the given logits).
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
