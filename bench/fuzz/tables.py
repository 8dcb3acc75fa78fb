"""The table of fuzzed inputs, from the results of a campaign and a soak.

python tests/fuzz/campaign.py --inputs 100000 --out bench/results/fuzz.json
python tests/fuzz/soak.py --out bench/results/soak.json
python -m bench tables
"""

from __future__ import annotations

from typing import Any

from bench.harness.results import Figures, Report
from eecore.lab.evaluation.tables import markdown_table

FINDINGS = {
    "crash": "crashes",
    "hang": "hangs",
    "wrong": "wrong answers",
    "foreign": "undocumented errors",
}


def campaign(rows: dict[str, dict[str, float]]) -> str:
    """A table of inputs by class, and of all together."""
    total = {key: sum(row[key] for row in rows.values()) for key in next(iter(rows.values()), {})}
    lines = []
    for name, row in [*sorted(rows.items()), ("**all**", total)]:
        counts = [f"{row[key]:,.0f}" for key in ("inputs", "served", "refused", *FINDINGS)]
        lines.append([name, *counts, f"{row['inputs'] / max(row['seconds'], 1e-9):.0f}"])
    head = ["inputs", "tried", "served", "refused", *FINDINGS.values(), "inputs/s"]
    return markdown_table(head, lines)


def soak(figures: dict[str, Any]) -> str:
    """The state of an engine at the end of a long run."""
    return (
        f"A soak: {figures['steps']:,} steps of one engine, {figures['requests']:,} requests of "
        f"every policy over few pages, {figures['cancelled']:,} cancelled, "
        f"{figures['preemptions']:,} preemptions, {figures['tokens']:,} tokens, each request's "
        "the same as when it runs alone. "
        f"{figures['lost_pages']} pages lost, {figures['pages_free_at_the_end']} free at the end; "
        f"resident memory {figures['rss_mb_at_first']:.1f} MB after the first samples, "
        f"{figures['rss_mb_at_the_end']:.1f} at the end, {figures['rss_growth_mb']:+.1f} between "
        "the first and the last third after the warm-up. `make soak`"
    )


def markdown(result: Figures) -> str:
    """Both tables, with a note on how to read them."""
    about = (
        "Inputs are made from seeds and tried in child processes; refused: with a documented "
        "error. `make fuzz MINUTES=10` tries other seeds."
    )
    text = [campaign(result), about]
    if SOAK.file.is_file():
        text.append(soak(SOAK.read()))
    return "\n\n".join(text)


SOAK = Report("soak")
REPORTS = (Report("fuzz", {"fuzz": markdown}),)
