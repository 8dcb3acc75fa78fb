"""Taking turns: every run once in a round, so that a busy machine slows all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import eecore

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


def decoding_seconds(outputs: Sequence[eecore.Output]) -> float:
    """Seconds from the first token of a batch's last prompt to the end of its last request."""
    stats = [output.stats for output in outputs]
    return max(s.total_s for s in stats) - max(s.time_to_first_token_s for s in stats)


def rows_beside(turns: Mapping[str, Sequence[TimedCall]], alone: str) -> list[dict[str, Any]]:
    """A row of figures for each mode, compared with the mode ``alone``.

    Tokens a second of the best round, speed-up over ``alone`` (median over rounds), and the number
    of answers with exactly its tokens. Each call returned lists of tokens.
    """
    own = turns[alone]
    rows = []
    for name, its in turns.items():
        seconds, answers = seconds_of(its), its[-1].made
        row: dict[str, Any] = {"mode": name, "of": len(answers)}
        row["same"] = sum(a == b for a, b in zip(answers, own[-1].made, strict=True))
        row["tokens_per_s"] = sum(map(len, answers)) / min(seconds)
        row["speedup"] = median_ratio(seconds, seconds_of(own))
        rows.append(row)
    return rows
