"""Taking turns: every run once in a round, so that a busy machine slows all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class TimedCall(NamedTuple):
    """The seconds and the result of one call."""

    seconds: float
    made: Any


def timed(run: Callable[[], Any]) -> TimedCall:
    began = time.perf_counter()
    made = run()
    return TimedCall(time.perf_counter() - began, made)


def take_turns(
    runs: Mapping[str, Callable[[], TimedCall]], rounds: int
) -> dict[str, list[TimedCall]]:
    """The calls of every run, one a round, after a round of warm-up."""
    turns: dict[str, list[TimedCall]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            turn = run()
            if number:
                turns[name].append(turn)
    return turns


AGAIN = 20
"""The number of calls in a row, of which the fastest counts."""


def in_turn_and_again(
    seconds: Callable[[int], float], count: int, rounds: int
) -> tuple[float, float]:
    """Seconds of a call when ``count`` items take turns, and of the first item again and again.

    Args:
        seconds: makes a call on item number i and returns its seconds.
        count: the number of items.
        rounds: rounds in which all items take turns; the fastest counts.
    """
    in_turn = min(sum(map(seconds, range(count))) for _ in range(rounds)) / count
    return in_turn, min(seconds(0) for _ in range(AGAIN))


def seconds_of(turns: Sequence[TimedCall]) -> list[float]:
    return [turn.seconds for turn in turns]


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Speed-up of ``ours`` over ``theirs``, from the seconds of both: median over rounds."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def rotated(these: Sequence[T], number: int) -> list[T]:
    """The items in another order, so that an item does not always follow the same one."""
    first = number % len(these)
    return [*these[first:], *these[:first]]


def batches_of(these: Sequence[T], size: int) -> list[list[T]]:
    """Groups of ``size`` items; the last may have fewer."""
    return [list(these[first : first + size]) for first in range(0, len(these), size)]
