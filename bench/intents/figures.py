"""Figures of the intent model's modes: speeds, speed-ups, acceptance rates.

Speed is milliseconds per new token: of the whole request, prompt included, and of decoding alone,
which begins after the step that gave the first new tokens. A speed-up is the median of the ratios
of two modes' milliseconds on the same chunk of utterances in the same round.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.decode.one_by_one import Decode
from bench.decode.parses import Parse

Measure = Callable[[Iterable[Parse]], float]
OWN_GROUPS = ("full", "fixed", "speculative", "without reuse", "confident")
INT8_GROUPS = ("int8 full", "int8 speculative", "int8 without reuse")
TRANSFORMERS_GROUPS = ("transformers", "assisted")


@dataclass
class Mode:
    """One row of the table."""

    name: str
    group: str
    """Chooses the modes that it is compared with: see :func:`figures`."""
    decode: Decode
    chunks: list[list[Parse]] = field(default_factory=list)
    """One entry for each round and chunk of utterances, in order."""


def ms_per_token(parses: Iterable[Parse]) -> float:
    """Milliseconds over new tokens, summed over all parses; NaN without tokens."""
    made = list(parses)
    return _ms(sum(p.seconds for p in made), sum(len(p.tokens) for p in made))


def decode_ms_per_token(parses: Iterable[Parse]) -> float:
    """Milliseconds after the first step over the tokens after it; NaN if there are none."""
    made = list(parses)
    return _ms(
        sum(p.seconds - p.first_seconds for p in made),
        sum(len(p.tokens) - p.first_tokens for p in made),
    )


def _ms(seconds: float, tokens: int) -> float:
    return 1e3 * seconds / tokens if tokens else math.nan


def speed_up(mode: Mode, other: Mode, measure: Measure) -> dict[str, float] | None:
    """Speed-up over another mode: the median over chunks, and of all chunks together."""
    pairs = zip(mode.chunks, other.chunks, strict=True)
    ratios = [measure(theirs) / measure(own) for own, theirs in pairs]
    known = [ratio for ratio in ratios if not math.isnan(ratio)]
    if not known:
        return None
    return {"median": statistics.median(known), "total": measure(_all(other)) / measure(_all(mode))}


def _all(mode: Mode) -> list[Parse]:
    return [parse for chunk in mode.chunks for parse in chunk]


def fastest(modes: Iterable[Mode]) -> Mode | None:
    """The mode with the fewest milliseconds per token, the prompt included."""
    return min(modes, key=lambda mode: ms_per_token(_all(mode)), default=None)


def full_depth(mode: Mode, modes: Sequence[Mode]) -> Mode | None:
    """The reference of a mode: eecore's Full() with equal weights, or transformers' generate."""
    own = {**dict.fromkeys(OWN_GROUPS, "full"), **dict.fromkeys(INT8_GROUPS, "int8 full")}
    group = own.get(mode.group, "transformers")
    return next((other for other in modes if other.group == group), None)


def figures(mode: Mode, modes: Sequence[Mode]) -> dict[str, Any]:
    """Speeds and shares of one mode, compared with full depth and each peer's fastest mode."""
    compared = {
        "full": full_depth(mode, modes),
        "transformers": fastest(other for other in modes if other.group in TRANSFORMERS_GROUPS),
        "economize": fastest(other for other in modes if other.group == "economize"),
    }
    parses = _all(mode)
    tokens = sum(len(parse.tokens) for parse in parses)
    drafted = sum(parse.drafted for parse in parses)
    depths = [parse.depth for parse in parses if parse.depth is not None]
    found: dict[str, Any] = {
        "acceptance": sum(parse.accepted for parse in parses) / drafted if drafted else None,
        "mean_exit_layer": sum(depths) / tokens if depths and tokens else None,
        "tokens": tokens,
        "same_as_full": same_tokens(mode, modes[0]),
        "same_as_transformers": _same_as(mode, modes, "transformers"),
    }
    for prefix, measure in (("", ms_per_token), ("decode_", decode_ms_per_token)):
        ms = measure(parses)
        found[f"{prefix}ms_per_token"] = None if math.isnan(ms) else ms
        for name, other in compared.items():
            ratio = None if other is None else speed_up(mode, other, measure)
            found[f"{prefix}speed_to_{name}"] = ratio
    found["chunk_ms_per_token"] = [round(ms_per_token(chunk), 4) for chunk in mode.chunks]
    return found


def _same_as(mode: Mode, modes: Sequence[Mode], group: str) -> float | None:
    other = next((other for other in modes if other.group == group), None)
    return None if other is None else same_tokens(mode, other)


def same_tokens(mode: Mode, other: Mode) -> float:
    """The share of utterances for which two modes gave the same tokens."""
    pairs = list(zip(_all(mode), _all(other), strict=True))
    return sum(one.tokens == two.tokens for one, two in pairs) / len(pairs)


def reuse(modes: Sequence[Mode]) -> list[dict[str, Any]]:
    """Each self-speculation compared with the same without reuse: the share of time saved."""
    rows = []
    for mode, without in pairwise(modes):
        if not without.group.endswith("without reuse"):
            continue
        row: dict[str, Any] = {"name": mode.name}
        for prefix, measure in (("", ms_per_token), ("decode_", decode_ms_per_token)):
            ratio = speed_up(mode, without, measure)
            row[f"{prefix}ms_per_token"] = None if ratio is None else measure(_all(mode))
            row[f"{prefix}ms_without"] = None if ratio is None else measure(_all(without))
            row[f"{prefix}saved"] = (
                None if ratio is None else {name: 1 - 1 / value for name, value in ratio.items()}
            )
        rows.append(row)
    return rows
