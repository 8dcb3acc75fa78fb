"""The table of fuzzed inputs, from what campaigns and a soak have left.

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
    "foreign": "errors that are not ours",
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
    """What an engine that ran for long was like at the end."""
    return (
        f"A soak: {figures['steps']:,} steps of one engine, {figures['requests']:,} requests of "
        f"every policy over few pages, {figures['cancelled']:,} cancelled, "
        f"{figures['preemptions']:,} preemptions, {figures['tokens']:,} tokens, each request's "
        "those that it has alone. "
        f"{figures['lost_pages']} pages lost, {figures['pages_free_at_the_end']} free at the end; "
        f"resident memory {figures['rss_mb_at_first']:.1f} MB after the first samples, "
        f"{figures['rss_mb_at_the_end']:.1f} at the end, {figures['rss_growth_mb']:+.1f} between "
        "the first and the last third behind the warm-up. `make soak`"
    )


def markdown(result: Figures) -> str:
    """Both, and how they are meant."""
    about = (
        "Inputs are made from seeds and tried in child processes: refused means one of the errors "
        "that are promised. Findings were mended as they came; these figures are of seeds after "
        "the last mend. `make fuzz MINUTES=10` tries others."
    )
    text = [campaign(result), about]
    if SOAK.file.is_file():
        text.append(soak(SOAK.read()))
    return "\n\n".join(text)


SOAK = Report("soak")
REPORTS = (Report("fuzz", {"fuzz": markdown}),)
