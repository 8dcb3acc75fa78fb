"""The table of fuzzed inputs in bench/RESULTS.md, from what campaigns and a soak have left.

python tests/fuzz/campaign.py --inputs 100000 --out bench/results/fuzz.json
python tests/fuzz/soak.py --out bench/results/soak.json
python bench/fuzz_table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness import insert

BENCH = Path(__file__).parent
FINDINGS = {
    "crash": "crashes",
    "hang": "hangs",
    "wrong": "wrong answers",
    "foreign": "errors that are not ours",
}


def campaign(rows: dict[str, dict[str, float]]) -> list[str]:
    """Markdown of inputs by class, and of all together."""
    total = {key: sum(row[key] for row in rows.values()) for key in next(iter(rows.values()), {})}
    lines = [
        f"| inputs | tried | served | refused | {' | '.join(FINDINGS.values())} | inputs/s |",
        f"|---|{'---:|' * (len(FINDINGS) + 4)}",
    ]
    for name, row in [*sorted(rows.items()), ("**all**", total)]:
        counts = [row[key] for key in ("inputs", "served", "refused", *FINDINGS)]
        rate = row["inputs"] / max(row["seconds"], 1e-9)
        lines.append(f"| {name} | {' | '.join(f'{n:,.0f}' for n in counts)} | {rate:.0f} |")
    return lines


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


def main() -> None:
    rows = json.loads((BENCH / "results" / "fuzz.json").read_text())
    about = (
        "Inputs are made from seeds and tried in child processes: refused means one of the errors "
        "that are promised. Findings were mended as they came; these figures are of seeds after "
        "the last mend. `make fuzz MINUTES=10` tries others."
    )
    text = ["", *campaign(rows), "", about]
    endurance = BENCH / "results" / "soak.json"
    if endurance.is_file():
        text += ["", soak(json.loads(endurance.read_text()))]
    insert(BENCH / "RESULTS.md", "fuzz", "\n".join([*text, ""]))


if __name__ == "__main__":
    main()
