"""Modes compared with the unchanged library, from the timed calls of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness.turns import TimedCall, median_ratio, seconds_of


def rows_beside(turns: Mapping[str, Sequence[TimedCall]], alone: str) -> list[dict[str, Any]]:
    """A row of figures for each mode.

    Tokens a second of the best round, speed-up over ``alone`` (median over rounds), and the number
    of answers with exactly the tokens of ``alone``. Each call returned lists of tokens.
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
