"""A failed iteration is run in parts until the requests that make it fail are known.

An iteration changes no sequence, so that any part of it can be run again. It is first run once more
as a whole: an error that does not recur then ends no request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from eecore.errors import EecoreError
from eecore.planning.row import Outcome
from eecore.scheduling.scheduler import Work

LOGGER = logging.getLogger("eecore")
MAX_DESCRIBED = 2000

Run = Callable[[list[Work]], list[Outcome]]
Failed = Callable[[str], None]
"""Called with a description of what has raised and is run again, inside the exception handler."""


def isolated(run: Run, works: list[Work], failed: Failed) -> list[Outcome]:
    """The outcomes that ``run`` gives for works, one for each, in order.

    A work that makes ``run`` raise even alone has an outcome with the error. An outcome that has an
    error already is kept. The remaining works have the outcomes of a run without the failed ones.
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
    """An error in words."""
    try:
        text = str(error)
    except Exception:
        text = "an error that cannot be shown"
    if not isinstance(error, EecoreError):
        text = f"{type(error).__name__}: {text}"
    return text[:MAX_DESCRIBED]


def _in_halves(run: Run, works: list[Work]) -> list[Outcome]:
    """The outcomes, from runs of as many works together as do not fail."""
    try:
        return run(works)
    except Exception as error:
        if len(works) == 1:
            sequence = works[0].sequence
            return [Outcome(sequence, sequence.num_computed, error=error)]
    middle = len(works) // 2
    return [*_in_halves(run, works[:middle]), *_in_halves(run, works[middle:])]
