"""Taking turns: everybody once a round, so that a busy machine slows all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Turn(NamedTuple):
    """What somebody made in one round."""

    seconds: float
    made: Any


def timed(run: Callable[[], Any]) -> Turn:
    began = time.perf_counter()
    made = run()
    return Turn(time.perf_counter() - began, made)


def take_turns(runs: Mapping[str, Callable[[], Turn]], rounds: int) -> dict[str, list[Turn]]:
    """The turns of everybody who is named, round by round; one round before them warms up."""
    turns: dict[str, list[Turn]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            turn = run()
            if number:
                turns[name].append(turn)
    return turns


AGAIN = 20
"""Calls in a row, of which the fastest counts."""


def in_turn_and_again(
    seconds: Callable[[int], float], count: int, rounds: int
) -> tuple[float, float]:
    """Seconds of one of so many things when all take turns, and of the first again and again.

    Args:
        seconds: what a call on thing number i takes, which it makes.
        count: of things.
        rounds: in which all take turns; the fastest counts.
    """
    in_turn = min(sum(map(seconds, range(count))) for _ in range(rounds)) / count
    return in_turn, min(seconds(0) for _ in range(AGAIN))


def seconds_of(turns: Sequence[Turn]) -> list[float]:
    return [turn.seconds for turn in turns]


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How many times as fast as somebody else, from the seconds of both: median over rounds."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def rotated(these: Sequence[T], number: int) -> list[T]:
    """The same in another order, so that nobody is always behind the same one."""
    first = number % len(these)
    return [*these[first:], *these[:first]]


def batches_of(these: Sequence[T], size: int) -> list[list[T]]:
    """In groups of so many; the last may have fewer."""
    return [list(these[first : first + size]) for first in range(0, len(these), size)]
