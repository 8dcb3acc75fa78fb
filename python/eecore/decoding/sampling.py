"""The sampling settings of requests, as rows of ``sample_tokens``.

Random numbers follow from (seed, position, purpose), so that a token that is drawn again, after a
failure or a preemption, alone or in another batch, is the same. Draft and target distributions of a
speculating request go through the same filters, which makes acceptance lossless.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eecore import ops
from eecore.decoding.memory import Array, Cells, Field, HostSide, numbers_of, power_of_two
from eecore.planning.draft_state import guided_of
from eecore.planning.row import Outcome
from eecore.scheduling.sequence import Sequence

# The purpose of a random number that draws a token.
DRAWS_TOKEN = 0
# The purpose of a random number that draws a draft: another number than the token's there.
DRAWS_DRAFT = 1

# Programs have memory for at least this many generated tokens: this limits their number.
MIN_GENERATED = 64

NO_TOKEN = "expected finite logits and confidences from the model, got NaN or infinity"


def needs_logits(sequence: Sequence) -> bool:
    """Whether a request's next tokens need logits in memory; the fused head makes all others."""
    sampling = sequence.sampling
    return (
        sampling.temperature > 0.0
        or sampling.repetition_penalty != 1.0
        or sampling.counts_tokens
        or bool(sampling.biases)
        or bool(sampling.logprobs)
        or sequence.is_masked
    )


def follows_text(sequence: Sequence) -> bool:
    """Whether a request's text so far changes its next logits."""
    sampling = sequence.sampling
    return sampling.repetition_penalty != 1.0 or sampling.counts_tokens or sequence.is_masked


@dataclass(frozen=True)
class HeadSizes:
    """The heads that the rows of a program need, and the sizes of their memory."""

    greedy: bool = True
    """Whether some rows use the fused head."""
    logits: bool = False
    """Whether some rows need logits."""
    seen: int = 0
    """Maximum number of tokens that a repetition penalty counts."""
    generated: int = 0
    """Maximum number of tokens that a presence or frequency penalty counts."""
    biases: int = 0
    """Maximum number of tokens of a row whose logits are biased."""
    masks: tuple[int, int] = (0, 0)
    """Masks of a request, one for each position, and int32 words of a mask; 0, 0 without guides."""
    top: int = 0
    """Maximum number of log-probabilities that a row asks for."""


def head_sizes(sequences: list[Sequence], positions: int = 1) -> HeadSizes:
    """The sizes that these requests need, rounded up, for at most ``positions`` of each."""
    needing = [s.sampling for s in sequences if needs_logits(s)]
    if not needing:
        return HeadSizes()
    masked = [s for s in sequences if s.is_masked]
    guides = [guided for guided in map(guided_of, masked) if guided is not None]
    words = max((guided.num_words for guided in guides), default=0)
    counted = [len(s.output_ids) for s in sequences if s.sampling.counts_tokens]
    return HeadSizes(
        greedy=len(needing) < len(sequences),
        logits=True,
        seen=_rounded(max(len(_seen(sequence)) for sequence in sequences)),
        generated=power_of_two(max(MIN_GENERATED, *counted)) if counted else 0,
        biases=_rounded(max(len(sampling.biases) for sampling in needing)),
        masks=(positions, words) if words else (0, 0),
        top=_rounded(max(sampling.logprobs or 0 for sampling in needing)),
    )


def _rounded(count: int) -> int:
    """The count rounded up to a power of two; 0 for 0."""
    return power_of_two(count) if count else 0


def _seen(sequence: Sequence) -> set[int]:
    """The tokens that a repetition penalty counts, the prompt included, as in transformers."""
    if sequence.sampling.repetition_penalty == 1.0:
        return set()
    return {*sequence.prompt_ids, *sequence.output_ids}


def sampling_fields(num_rows: int, sizes: HeadSizes, fresh: int = 0) -> dict[str, Field]:
    """Fields for the rows' settings; penalties count ``fresh`` tokens that the device adds."""
    if not sizes.logits:
        return {}
    row = (num_rows,)
    fields: dict[str, Field] = {
        "temperature": (torch.float32, row),
        "top_k": (torch.int32, row),
        "top_p": (torch.float32, row),
        "min_p": (torch.float32, row),
        "repetition_penalty": (torch.float32, row),
        "seed": (torch.int64, row),
        "seen": (torch.int64, (num_rows, sizes.seen + fresh if sizes.seen else 0)),
    }
    if sizes.generated:
        fields["presence_penalty"] = fields["frequency_penalty"] = (torch.float32, row)
        fields["generated"] = (torch.int64, (num_rows, sizes.generated + fresh))
    if sizes.biases:
        fields["bias_ids"] = (torch.int64, (num_rows, sizes.biases))
        fields["bias"] = (torch.float32, (num_rows, sizes.biases))
    if any(sizes.masks):
        fields["allowed"] = (torch.int32, (num_rows, *sizes.masks))
    return fields


def sampling_rows(tensors: dict[str, Tensor]) -> ops.SamplingRows:
    """The rows' settings, by the fields on the device."""
    names = ops.SamplingRows._fields
    return ops.SamplingRows(**{name: tensors[name] for name in names if name in tensors})


def write_sampling(
    host: HostSide, sequences: list[Sequence], drafts: Ordered[Ordered[int]] = ()
) -> None:
    """Write each row's settings, and the masks of allowed tokens after each of its drafts."""
    settings = [sequence.sampling for sequence in sequences]
    count = len(settings)
    names = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"]
    if "generated" in host.arrays:
        names += ["presence_penalty", "frequency_penalty"]
    host.write(**{name: [getattr(s, name) for s in settings] for name in names})
    host.arrays["seed"][:count] = np.array([s.seed or 0 for s in settings], dtype=np.uint64).view(
        np.int64
    )
    if host.arrays["seen"].shape[1]:
        _write_ids(host.arrays["seen"], (sorted(_seen(s)) for s in sequences))
    if "generated" in host.arrays:
        _write_ids(
            host.arrays["generated"],
            (s.output_ids if s.sampling.counts_tokens else [] for s in sequences),
        )
    if "bias" in host.arrays:
        _write_ids(host.arrays["bias_ids"], ([token for token, _ in s.biases] for s in settings))
        for row, setting in zip(host.arrays["bias"], settings, strict=False):
            row[: len(setting.biases)] = [bias for _, bias in setting.biases]
    if "allowed" in host.arrays:
        _write_masks(host.arrays["allowed"], sequences, drafts or [()] * count)


def _write_masks(rows: Array, sequences: list[Sequence], drafts: Ordered[Ordered[int]]) -> None:
    """Write each request's masks, one more than it has drafts; all bits set without a guide."""
    for masks, sequence, own in zip(rows, sequences, drafts, strict=False):
        guided = guided_of(sequence)
        if guided is None:
            masks[: len(own) + 1] = -1
        else:
            guided.write_masks(masks, sequence.output_ids, own)


def _write_ids(rows: Array, ids: Iterable[list[int]]) -> None:
    """Write each request's ids into its row, followed by -1."""
    for row, own in zip(rows, ids, strict=False):
        row[:] = -1
        row[: len(own)] = own


def add_logprobs(outcome: Outcome, got: Cells, at: int) -> None:
    """Add the log-probabilities of one more token to the outcome of a request that asks for them.

    Args:
        at: the token's row in the results ``got``.
    """
    asked = outcome.sequence.sampling.logprobs
    ids, values = (numbers_of(got, name, at)[:asked] for name in ("top_ids", "top_logprobs"))
    best = zip(ids, values, strict=True)
    outcome.logprobs.append(got["logprob"][at])
    outcome.top_logprobs.append({token: value for token, value in best if value > -math.inf})
