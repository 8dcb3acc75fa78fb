"""What a request wants of its distributions, as the rows of ``sample_tokens`` have it.

Random numbers come from (seed, position, purpose): whatever is drawn again, after a failure or a
preemption, alone or in another batch, is the same. Draft and target distributions of a speculating
request go through the same filters, which is what makes acceptance lossless.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eecore import ops
from eecore.config import SamplingParams
from eecore.decoding.memory import Field, HostSide, power_of_two
from eecore.scheduling.sequence import Sequence

__all__ = [
    "DRAWS_DRAFT",
    "DRAWS_TOKEN",
    "NO_TOKEN",
    "HeadSizes",
    "head_sizes",
    "needs_logits",
    "sampling_fields",
    "sampling_rows",
    "top_logprobs",
    "write_sampling",
]

# What a random number is for: two of one position must not be the same.
DRAWS_TOKEN = 0
DRAWS_DRAFT = 1

NO_TOKEN = "expected finite logits and confidences from the model, got NaN or infinity"


def needs_logits(sampling: SamplingParams) -> bool:
    """Whether a request needs logits in memory; the others get by with the fused head."""
    return (
        sampling.temperature > 0.0 or sampling.repetition_penalty != 1.0 or bool(sampling.logprobs)
    )


@dataclass(frozen=True)
class HeadSizes:
    """Which heads the rows of a program need, and what memory."""

    greedy: bool = True
    """Some rows get by with the fused head."""
    logits: bool = False
    """Some rows do not."""
    seen: int = 0
    """Most tokens that a repetition penalty counts."""
    top: int = 0
    """Most log-probabilities that a row asks for."""


def head_sizes(sequences: list[Sequence]) -> HeadSizes:
    """What these requests need, sizes rounded up."""
    needing = [s.sampling for s in sequences if needs_logits(s.sampling)]
    if not needing:
        return HeadSizes()
    seen = max(
        (len(seen_tokens(s)) for s in sequences if s.sampling.repetition_penalty != 1.0), default=0
    )
    top = max(sampling.logprobs or 0 for sampling in needing)
    return HeadSizes(
        len(needing) < len(sequences),
        True,
        power_of_two(seen) if seen else 0,
        power_of_two(top) if top else 0,
    )


def seen_tokens(sequence: Sequence) -> list[int]:
    """What a repetition penalty counts, the prompt included, as in transformers."""
    return sorted({*sequence.prompt_ids, *sequence.output_ids})


def sampling_fields(num_rows: int, sizes: HeadSizes) -> dict[str, Field]:
    """Memory of the rows' settings."""
    if not sizes.logits:
        return {}
    row = (num_rows,)
    return {
        "temperature": (torch.float32, row),
        "top_k": (torch.int32, row),
        "top_p": (torch.float32, row),
        "min_p": (torch.float32, row),
        "repetition_penalty": (torch.float32, row),
        "seed": (torch.int64, row),
        "seen": (torch.int64, (num_rows, sizes.seen)),
    }


def sampling_rows(tensors: dict[str, Tensor]) -> ops.SamplingRows:
    """Of the fields on the device."""
    return ops.SamplingRows(*(tensors[name] for name in ops.SamplingRows._fields))


def write_sampling(host: HostSide, sequences: list[Sequence]) -> None:
    """Write each row's settings."""
    settings = [sequence.sampling for sequence in sequences]
    count = len(settings)
    host.write(
        temperature=[s.temperature for s in settings],
        top_k=[s.top_k for s in settings],
        top_p=[s.top_p for s in settings],
        min_p=[s.min_p for s in settings],
        repetition_penalty=[s.repetition_penalty for s in settings],
    )
    host.arrays["seed"][:count] = np.array([s.seed or 0 for s in settings], dtype=np.uint64).view(
        np.int64
    )
    seen = host.arrays["seen"]
    if seen.shape[1]:
        seen[:count] = -1
        for i, sequence in enumerate(sequences):
            if sequence.sampling.repetition_penalty != 1.0:
                tokens = seen_tokens(sequence)
                seen[i, : len(tokens)] = tokens


def top_logprobs(
    asked: int | None, logprob: float, ids: list[int], values: list[float]
) -> tuple[float | None, dict[int, float] | None]:
    """What a request that asked for ``asked`` log-probabilities gets to know of a token."""
    if asked is None:
        return None, None
    best = dict(zip(ids[:asked], values[:asked], strict=True))
    best.pop(-1, None)
    return logprob, best
