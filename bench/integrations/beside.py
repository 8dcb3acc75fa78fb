"""Modes beside a library as it is, from the turns of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness.turns import Turn, median_ratio, seconds_of


def rows_beside(turns: Mapping[str, Sequence[Turn]], alone: str) -> list[dict[str, Any]]:
    """A row of figures for each mode.

    Tokens a second of the best round, how many times as fast as ``alone`` (median over rounds), and
    how many of its answers are token by token those of ``alone``. A turn has made lists of tokens.
    """
    own = turns[alone]
    rows = []
    for name, its in turns.items():
        seconds, answers = seconds_of(its), its[-1].made
        rows.append(
            {
                "mode": name,
                "same": sum(a == b for a, b in zip(answers, own[-1].made, strict=True)),
                "of": len(answers),
                "tokens_per_s": sum(map(len, answers)) / min(seconds),
                "speedup": median_ratio(seconds, seconds_of(own)),
            }
        )
    return rows
