"""The tables of the intent model, from its JSON alone."""

from __future__ import annotations

from typing import Any

from bench.harness.machine import in_words
from bench.harness.rows import unique
from eecore.lab.evaluation.tables import markdown_table


def full(result: dict[str, Any]) -> str:
    """The tables of every mode and of reuse, with the conditions of the measurement."""
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
    parts = [markdown_table(head, lines, text_columns=1), notes(result)]
    if result["reuse"]:
        parts += [_reuse_table(result["reuse"]), REUSE_ABOUT]
    return "\n\n".join([*parts, about(result)])


def short(result: dict[str, Any]) -> str:
    """Full depth and the fastest mode of each kind, of eecore and of the peers."""
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
    command = f"`python -m bench intents --count {result['utterances']}`"
    return f"{SHORT_LEAD}\n\n{markdown_table(head, lines)}\n\n{command}"


SHORT_GROUPS = (
    *("full", "speculative", "confident", "int8 full", "int8 speculative"),
    *("transformers", "assisted", "economize"),
)
SHORT_LEAD = (
    "On a model trained for early exit, which parses utterances to a smart home "
    "(`scripts/intents/`); the fastest mode of each kind:"
)
REUSE_ABOUT = (
    "Self-speculation with and without reuse: the same drafts, but without reuse verification "
    "runs every position through all layers again. Saved: share of a token's time, median over "
    "chunks."
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
    return markdown_table(head, lines, text_columns=1)


def notes(result: dict[str, Any]) -> str:
    """Notes: how to read the figures, where peers differ, and what was left out."""
    lines = [
        "- decoding: after the step that gave the first new tokens; the other columns include the "
        "prompt",
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
    """A sentence on the measurement and the machine."""
    versions = {} if result["peers"] is None else result["peers"]["versions"]
    named = "".join(f", {name} {version}" for name, version in versions.items() if version)
    count = result["utterances"]
    return (
        f"{count} held-out utterances of {result['prompt_tokens'] / count:.1f} tokens one after "
        f"the other, {result['modes'][0]['tokens'] / count / result['rounds']:.1f} greedy tokens "
        f"each, {result['threads']} thread(s). Speed-ups: medians of {result['rounds']} round(s) "
        f"of chunks of {result['chunk']}, in turns. Model {result['model_sha256'][:12]}, "
        f"{result['num_layers']} layers. {result['weights']} {in_words(result)}{named}. "
        f"`python -m bench intents --count {count}`"
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _times(ratio: dict[str, float] | None) -> str:
    return "" if ratio is None else f"{ratio['median']:.2f}x"
