"""What bench_intents.py makes of its parses: figures per mode, and the tables, from its JSON alone.

Speed is milliseconds per new token: of everything, the prompt included, and of decoding alone,
which is everything after the step that gave the first new tokens. A speed-up is a ratio of two
modes' milliseconds on the same chunk of utterances in the same round; the median of these ratios.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from decode_tables import markdown, unique

if TYPE_CHECKING:
    from intent_modes import Mode
    from intent_peers import Parse

Pace = Callable[[Iterable["Parse"]], float]
OWN_GROUPS = ("full", "fixed", "speculative", "without reuse", "confident")
INT8_GROUPS = ("int8 full", "int8 speculative", "int8 without reuse")
TRANSFORMERS_GROUPS = ("transformers", "assisted")


# Figures


def ms_per_token(parses: Iterable[Parse]) -> float:
    """All time over all new tokens; NaN without tokens."""
    made = list(parses)
    return _ms(sum(p.seconds for p in made), sum(len(p.tokens) for p in made))


def decode_ms_per_token(parses: Iterable[Parse]) -> float:
    """Time after the first step over the tokens after it; NaN where that step made all."""
    made = list(parses)
    return _ms(
        sum(p.seconds - p.first_seconds for p in made),
        sum(len(p.tokens) - p.first_tokens for p in made),
    )


def _ms(seconds: float, tokens: int) -> float:
    return 1e3 * seconds / tokens if tokens else math.nan


def speed_up(mode: Mode, other: Mode, pace: Pace) -> dict[str, float] | None:
    """How many times as fast as another mode: median over chunks, and of all chunks together."""
    pairs = zip(mode.chunks, other.chunks, strict=True)
    ratios = [pace(theirs) / pace(own) for own, theirs in pairs]
    known = [ratio for ratio in ratios if not math.isnan(ratio)]
    if not known:
        return None
    return {"median": statistics.median(known), "total": pace(_all(other)) / pace(_all(mode))}


def _all(mode: Mode) -> list[Parse]:
    return [parse for chunk in mode.chunks for parse in chunk]


def fastest(modes: Iterable[Mode]) -> Mode | None:
    """By milliseconds per token, the prompt included."""
    return min(modes, key=lambda mode: ms_per_token(_all(mode)), default=None)


def full_depth(mode: Mode, modes: Sequence[Mode]) -> Mode | None:
    """Eecore's own in equal weights for its modes, transformers' generate for the peers."""
    own = {**dict.fromkeys(OWN_GROUPS, "full"), **dict.fromkeys(INT8_GROUPS, "int8 full")}
    group = own.get(mode.group, "transformers")
    return next((other for other in modes if other.group == group), None)


def figures(mode: Mode, modes: Sequence[Mode]) -> dict[str, Any]:
    """Speeds and shares of one mode, against full depth and each peer's fastest mode."""
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
    for prefix, pace in (("", ms_per_token), ("decode_", decode_ms_per_token)):
        ms = pace(parses)
        found[f"{prefix}ms_per_token"] = None if math.isnan(ms) else ms
        for name, other in compared.items():
            ratio = None if other is None else speed_up(mode, other, pace)
            found[f"{prefix}speed_to_{name}"] = ratio
    found["chunk_ms_per_token"] = [round(ms_per_token(chunk), 4) for chunk in mode.chunks]
    return found


def _same_as(mode: Mode, modes: Sequence[Mode], group: str) -> float | None:
    other = next((other for other in modes if other.group == group), None)
    return None if other is None else same_tokens(mode, other)


def same_tokens(mode: Mode, other: Mode) -> float:
    """Share of utterances for which two modes gave the same tokens."""
    pairs = list(zip(_all(mode), _all(other), strict=True))
    return sum(one.tokens == two.tokens for one, two in pairs) / len(pairs)


def reuse(modes: Sequence[Mode]) -> list[dict[str, Any]]:
    """Each self-speculation beside itself without reuse, and the share of a token's time saved."""
    rows = []
    for mode, without in pairwise(modes):
        if not without.group.endswith("without reuse"):
            continue
        row: dict[str, Any] = {"name": mode.name}
        for prefix, pace in (("", ms_per_token), ("decode_", decode_ms_per_token)):
            ratio = speed_up(mode, without, pace)
            row[f"{prefix}ms_per_token"] = None if ratio is None else pace(_all(mode))
            row[f"{prefix}ms_without"] = None if ratio is None else pace(_all(without))
            row[f"{prefix}saved"] = (
                None if ratio is None else {name: 1 - 1 / value for name, value in ratio.items()}
            )
        rows.append(row)
    return rows


# Tables


def full(result: dict[str, Any]) -> str:
    """Every mode, what reuse saves, and what was measured on what."""
    head = ["mode", "exact match", "drafts accepted", "mean exit layer", "ms/token", "decoding"]
    head += ["to own full depth", "decoding", "to transformers' best", "decoding"]
    head += ["tokens of `Full()`"]
    lines = [
        [
            row["name"],
            _share(row["exact_match"]),
            _share(row["acceptance"]),
            _number(row["mean_exit_layer"], 1),
            _number(row["ms_per_token"]),
            _number(row["decode_ms_per_token"]),
            _times(row["speed_to_full"]),
            _times(row["decode_speed_to_full"]),
            _times(row["speed_to_transformers"]),
            _times(row["decode_speed_to_transformers"]),
            _share(row["same_as_full"]),
        ]
        for row in result["modes"]
        if not row["group"].endswith("without reuse")
    ]
    parts = [markdown(head, lines, text_columns=1), notes(result)]
    if result["reuse"]:
        parts += [_reuse_table(result["reuse"]), REUSE_ABOUT]
    return "\n\n".join([*parts, about(result)])


def short(result: dict[str, Any]) -> str:
    """Full depth and the fastest mode of each kind, ours and the peers'."""
    head = ["mode", "exact match", "ms/token", "to own full depth", "to transformers' best"]
    rows = [row for row in result["modes"] if row["group"] in SHORT_GROUPS]
    chosen = [
        min((row for row in rows if row["group"] == group), key=lambda row: row["ms_per_token"])
        for group in unique(rows, "group")
    ]
    lines = [
        [
            row["name"],
            _share(row["exact_match"]),
            _number(row["ms_per_token"]),
            _times(row["speed_to_full"]),
            _times(row["speed_to_transformers"]),
        ]
        for row in chosen
    ]
    return "\n\n".join([SHORT_LEAD, markdown(head, lines, text_columns=1), about(result)])


SHORT_GROUPS = (
    *("full", "speculative", "confident", "int8 full", "int8 speculative"),
    *("transformers", "assisted", "economize"),
)
SHORT_LEAD = (
    "On a model trained for early exit, which parses what somebody says to a home "
    "(`scripts/intents/`); of each kind of mode the fastest:"
)
REUSE_ABOUT = (
    "Self-speculation against itself without reuse: the same drafts, but verification runs every "
    "position through all layers again. Saved: share of a token's time, median over chunks."
)


def _reuse_table(rows: list[dict[str, Any]]) -> str:
    head = ["mode", "ms/token without reuse", "with", "saved", "decoding without", "with", "saved"]
    lines = []
    for row in rows:
        cells = [row["name"]]
        for prefix in ("", "decode_"):
            saved = row[f"{prefix}saved"]
            cells += [
                _number(row[f"{prefix}ms_without"]),
                _number(row[f"{prefix}ms_per_token"]),
                "" if saved is None else _share(saved["median"]),
            ]
        lines.append(cells)
    return markdown(head, lines, text_columns=1)


def notes(result: dict[str, Any]) -> str:
    """How the figures are meant, where peers differ, and what could not be measured."""
    lines = [
        "- decoding: after the step that gave the first new tokens; the other columns count the "
        "prompt in",
        "- own full depth: `Full()` for eecore's modes, transformers' `generate` for the peers",
    ]
    if result["peers"] is not None:
        tried = result["peers"]["ms_per_token_tried"]
        compared = ", ".join(
            f"{min(ms.values()):.2f} ms/token in {dtype}" for dtype, ms in tried.items()
        )
        lines.append(
            f"- the peers run in {result['peers']['dtype']}, `Full()` in {result['dtype']}; "
            f"transformers' fastest mode on the first utterances: {compared}"
        )
    lines += [
        f"- {row['name']}: tokens of transformers' `generate` on "
        f"{_share(row['same_as_transformers'])} of the utterances"
        for row in result["modes"]
        if row["group"] in ("assisted", "economize") and row["same_as_transformers"] < 1
    ]
    lines += [
        f"- {row['name']} is {_times(row['speed_to_economize'])} as fast as economize's fastest "
        f"drafts, {_times(row['decode_speed_to_economize'])} in decoding"
        for row in result["modes"]
        if row["group"] == "speculative" and row["speed_to_economize"] is not None
    ]
    lines += [f"- {kind}: {contract}" for kind, contract in result["contracts"].items()]
    lines += [f"- left out: {name}: {reason}" for name, reason in result["left_out"].items()]
    return "\n".join(lines)


def about(result: dict[str, Any]) -> str:
    """What was measured, and on what."""
    versions = {"torch": result["torch"]}
    if result["peers"] is not None:
        versions |= result["peers"]["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    count = result["utterances"]
    return (
        f"{count} held-out utterances of {result['prompt_tokens'] / count:.1f} tokens one after "
        f"the other, {result['modes'][0]['tokens'] / count / result['rounds']:.1f} greedy tokens "
        f"each, {result['threads']} thread(s). Speed-ups: medians of {result['rounds']} round(s) "
        f"of chunks of {result['chunk']}, in turns. Model {result['model_sha256'][:12]}, "
        f"{result['num_layers']} layers. {result['weights']} {result['cpu']}, "
        f"{result['cpu_capability']} kernels, {named}. "
        f"`python bench/bench_intents.py --count {count}`"
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _times(ratio: dict[str, float] | None) -> str:
    return "" if ratio is None else f"{ratio['median']:.2f}x"
