"""From logits to tokens: the filters of a request, its random numbers, its log-probabilities.

The order is transformers': repetition penalty, temperature, top-k, top-p, min-p. Draft and target
distributions of a speculating request go through the same filters, which is what makes acceptance
lossless.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eecore.config import SamplingParams
from eecore.scheduling.sequence import Sequence

__all__ = [
    "NO_TOKEN",
    "filtered_probs",
    "generator_of",
    "make_generator",
    "needs_logits",
    "penalise_repetition",
    "pick",
    "top_logprobs",
]


MIN_TEMPERATURE = 1e-30
NO_TOKEN = "expected a probability above 0 for some token, got logits of NaN from the model"


def needs_logits(sampling: SamplingParams) -> bool:
    """Whether a request needs logits in memory; the others get by with the fused head."""
    return (
        sampling.temperature > 0.0 or sampling.repetition_penalty != 1.0 or bool(sampling.logprobs)
    )


def make_generator(seed: int) -> torch.Generator:
    """A request's own source of random numbers, on the host whatever the device."""
    return torch.Generator().manual_seed(int(seed))


def generator_of(sequence: Sequence) -> torch.Generator:
    """The request's own random numbers, made at first use and kept across preemptions."""
    if sequence.generator is None:
        assert sequence.sampling.seed is not None
        sequence.generator = make_generator(sequence.sampling.seed)
    generator: torch.Generator = sequence.generator
    return generator


def penalise_repetition(logits: Tensor, token_ids: list[int], penalty: float) -> Tensor:
    """Logits [vocab_size] with those of seen tokens divided (negative: multiplied) by ``penalty``.

    (CTRL, Keskar et al. 2019; the prompt counts as seen, as in transformers.)
    """
    if penalty == 1.0 or not token_ids:
        return logits
    seen = torch.tensor(sorted(set(token_ids)), device=logits.device)
    values = logits[seen]
    logits = logits.clone()
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    return logits


def filtered_probs(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """The distribution a request samples from.

    Args:
        logits: float32 [vocab_size], repetition penalty applied.

    Returns:
        float32 [vocab_size]; with temperature 0 all of it is on the first largest logit.
    """
    if sampling.temperature == 0.0:
        return torch.zeros_like(logits).scatter_(0, logits.argmax(keepdim=True), 1.0)
    # With the largest at 0, a temperature that float32 can hold makes no infinity but -inf.
    logits = (logits - logits.max()) / max(sampling.temperature, MIN_TEMPERATURE)
    if 0 < sampling.top_k < logits.numel():
        kth = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probs = logits.softmax(dim=-1)
    if sampling.top_p < 1.0:
        ordered, order = probs.sort(descending=True, stable=True)
        # A token stays while the mass before it is below top_p; the first always stays.
        dropped = ordered.cumsum(dim=-1) - ordered >= sampling.top_p
        dropped[0] = False
        probs = probs.index_fill(0, order[dropped], 0.0)
    if sampling.min_p > 0.0:
        probs = probs.masked_fill(probs < sampling.min_p * probs.max(), 0.0)
    return probs / probs.sum()


def pick(probs: Tensor, generator: torch.Generator) -> int:
    """Draws a token from probs [vocab_size] by inversion, in float64; RuntimeError for NaN."""
    cumulative = probs.double().cumsum(dim=-1).cpu()
    if not cumulative[-1] > 0.0:
        raise RuntimeError(NO_TOKEN)
    u = torch.rand((), generator=generator, dtype=torch.float64) * cumulative[-1]
    index = int(torch.searchsorted(cumulative, u, right=True))
    if index >= probs.numel() or probs[index] == 0.0:  # u rounded up to the total
        index = int(probs.nonzero()[-1])
    return index


def top_logprobs(logits: Tensor, token_id: int, count: int) -> tuple[float, dict[int, float]]:
    """Log-probability of a token and of the ``count`` most probable ones, of the raw logits."""
    logprobs = logits.log_softmax(dim=-1)
    values, ids = logprobs.topk(min(count, logprobs.numel()))
    best = dict(zip(ids.tolist(), values.tolist(), strict=True))
    return float(logprobs[token_id]), best
