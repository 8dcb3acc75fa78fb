"""Whose fault it is: an iteration that fails is run in parts until it is known who makes it fail.

An iteration changes no sequence, so that any part of it can be run again. What does not come back
harms nobody: an iteration is run once more as it is before it is taken apart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from eecore.errors import EecoreError
from eecore.planning.row import Outcome
from eecore.scheduling.scheduler import Work

__all__ = ["LOGGER", "described", "isolated"]

LOGGER = logging.getLogger("eecore")
MAX_DESCRIBED = 2000

Run = Callable[[list[Work]], list[Outcome]]
Failed = Callable[[str], None]
"""Told what has just raised and is done again, where the exception is caught."""


def isolated(run: Run, works: list[Work], failed: Failed) -> list[Outcome]:
    """What ``run`` makes of works, one outcome for each, in order.

    A work that makes it raise, alone too, has an outcome with the error; so has one whose outcome
    says so itself. The others have what a run without those gives.
    """
    try:
        outcomes = run(works)
    except Exception:
        failed(f"an iteration of {len(works)} requests failed: once more")
        outcomes = _in_halves(run, works)
    for outcome in outcomes:
        if outcome.error is not None:
            break
    else:
        return outcomes
    good = [work for work, outcome in zip(works, outcomes, strict=True) if outcome.error is None]
    if not good:
        return outcomes
    others = iter(isolated(run, good, failed))
    return [outcome if outcome.error is not None else next(others) for outcome in outcomes]


def described(error: BaseException) -> str:
    """An error in a sentence."""
    try:
        text = str(error)
    except Exception:
        text = "an error that cannot be shown"
    if not isinstance(error, EecoreError):
        text = f"{type(error).__name__}: {text}"
    return text[:MAX_DESCRIBED]


def _in_halves(run: Run, works: list[Work]) -> list[Outcome]:
    """The outcomes, of as many works together as do not fail."""
    try:
        return run(works)
    except Exception as error:
        if len(works) == 1:
            sequence = works[0].sequence
            return [Outcome(sequence, sequence.num_computed, error=error)]
    middle = len(works) // 2
    return [*_in_halves(run, works[:middle]), *_in_halves(run, works[middle:])]
