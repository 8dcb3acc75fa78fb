"""Similarities of a generated text to a reference, from 0 to 1."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from eecore.errors import RequestError

Similarity = Callable[[str, str], float]
"""The similarity of a generated text to a reference."""


def exact_match(text: str, reference: str) -> float:
    """1 where the texts are equal up to white space around them, else 0."""
    return float(text.strip() == reference.strip())


@functools.cache
def _scorer(kind: str) -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise RequestError(
            f"{kind}: expected the package rouge-score, got none "
            "(pip install '.[evaluate]' in a clone)"
        ) from None
    return RougeScorer([kind])


def rouge(kind: str, text: str, reference: str) -> float:
    """ROUGE F1 (Lin 2004) over lower-cased words; 1 for equal texts, also without words.

    Args:
        kind: ``rougeL``, ``rouge2`` or ``rouge1``.
    """
    scorer = _scorer(kind)
    if text.strip() == reference.strip():
        return 1.0
    return float(scorer.score(reference, text)[kind].fmeasure)


SIMILARITIES: dict[str, Similarity] = {
    "rougeL": functools.partial(rouge, "rougeL"),
    "rouge2": functools.partial(rouge, "rouge2"),
    "exact": exact_match,
}
