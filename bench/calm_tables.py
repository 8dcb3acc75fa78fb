"""The page of bench_calm.py, from its JSON and the tables of the evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from decode_tables import markdown


def full(result: dict[str, Any], evaluation: str) -> str:
    """What was measured on what, the evaluation, and full depth beside other engines."""
    parts = [f"# Confident exit: {result['model']}", about(result), evaluation, shares(result)]
    if result["full_depth"] is not None:
        parts += ["## Full depth, beside other engines", engines(result["full_depth"])]
        parts.append(notes(result))
    return "\n\n".join(part for part in parts if part)


def about(result: dict[str, Any]) -> str:
    versions = {"torch": result["torch"]}
    if result["full_depth"] is not None:
        versions |= result["full_depth"]["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"Model {result['model_sha256'][:12]} on {result['data']}, {result['dtype']}, "
        f"{result['threads']} thread(s). {result['cpu']}, "
        f"{result['cpu_capability']} kernels, {named}. `python bench/bench_calm.py`"
    )


BOUNDS = {"share_of_ideal": "the ideal", "share_of_cut": "a model cut at the mean depth"}


def confident_speeds(result: dict[str, Any], kind: str, bound: str) -> Iterator[tuple[float, str]]:
    """Share of a bound and name of each confident exit; ``kind`` is throughput or latency."""
    for row in result["evaluation"]["rows"]:
        speed = row[kind]
        if row["settings"] is None or speed is None or speed[bound] is None:
            continue
        yield speed[bound], f"{row['technique']}, {row['batch']}, {row['batch_size']}"


def shares(result: dict[str, Any]) -> str:
    """The confident exits that are the furthest from what is ideal for their exit rate."""
    lines = []
    for kind in ("throughput", "latency"):
        for bound, words in BOUNDS.items():
            found = list(confident_speeds(result, kind, bound))
            if found:
                share, name = min(found)
                lines.append(f"- {kind}, lowest share of {words}: {share:.0%} ({name} a batch)")
    return "\n".join(lines)


def engines(full_depth: dict[str, Any]) -> str:
    head = ["engine", "batch", "tokens/s", "eecore is", "tokens of eecore"]
    lines = [
        [
            row["engine"],
            str(row["batch_size"]),
            f"{row['tokens_per_s_best']:.1f}",
            "" if row["engine"] == "eecore" else f"{row['eecore_is']:.2f}x",
            f"{row['same_tokens']:.1%}",
        ]
        for row in full_depth["rows"]
    ]
    return markdown(head, lines, text_columns=1)


def notes(result: dict[str, Any]) -> str:
    lines = [
        "- tokens/s: of the best round, prompts included; eecore is: times as fast, the median "
        "over batches in turns; tokens of eecore: share of examples with the same tokens"
    ]
    left_out = result["full_depth"]["left_out"]
    lines += [f"- left out: {name}: {reason}" for name, reason in left_out.items()]
    return "\n".join(lines)
