"""Log-probabilities of prompts in OpenAI's format and in vLLM's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from eecore.output import PromptLogprob
from eecore.serving.offsets import TextOffsets
from eecore.serving.served import ServedModel

MIN_LOGPROB = -9999.0
"""Written for minus infinity, which JSON cannot express."""

Entries = Sequence[PromptLogprob | None]


def finite(logprob: float) -> float:
    """A log-probability that JSON can express."""
    return max(logprob, MIN_LOGPROB) if not math.isnan(logprob) else MIN_LOGPROB


def tops_by_text(
    served: ServedModel, text: str, logprob: float, top: Mapping[int, float]
) -> dict[str, float]:
    """The most probable tokens by their texts, best first, and the token itself. Of several tokens
    with one text, as parts of characters have, the most probable one counts.
    """
    found: dict[str, float] = {}
    for token, value in top.items():
        found.setdefault(served.token_text(token), finite(value))
    found.setdefault(text, logprob)
    return found


def echoed(
    served: ServedModel, token_ids: Sequence[int], entries: Entries, text: str, num_top: int
) -> dict[str, Any]:
    """The log-probabilities of a prompt that a completion begins with.

    Args:
        entries: one for each token, None for the first.
        text: the prompt as it is shown.
        num_top: how many of the most probable tokens to list.
    """
    texts = [served.token_text(token) for token in token_ids]
    logprobs = [None if entry is None else finite(entry.logprob) for entry in entries]
    tops = [
        None
        if entry is None
        else tops_by_text(served, own, finite(entry.logprob), _first(entry, num_top))
        for own, entry in zip(texts, entries, strict=True)
    ]
    return {
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": tops if num_top else None,
        "text_offset": list(map(TextOffsets(served, text=text).add, token_ids)),
    }


def in_vllms_words(
    served: ServedModel, entries: Entries, num_top: int
) -> list[dict[str, Any] | None]:
    """In vLLM's format: for each position its token and the most probable ones, by id; None for the
    first.
    """
    return [None if entry is None else _ranked(served, entry, num_top) for entry in entries]


def _ranked(served: ServedModel, entry: PromptLogprob, num_top: int) -> dict[str, Any]:
    best = enumerate(_first(entry, num_top).items(), 1)
    ranked = {
        entry.token_id: (entry.logprob, entry.rank),
        **{token: (logprob, rank) for rank, (token, logprob) in best},
    }
    return {
        str(token): {
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": served.token_text(token),
        }
        for token, (logprob, rank) in ranked.items()
    }


def _first(entry: PromptLogprob, num_top: int) -> dict[int, float]:
    return dict(list(entry.top_logprobs.items())[:num_top])
