"""The table of fuzzed inputs, from the results of a campaign and a soak.

python tests/fuzz/campaign.py --inputs 100000 --out bench/results/fuzz.json
python tests/fuzz/soak.py --out bench/results/soak.json
python -m bench tables
"""

from __future__ import annotations

from bench.harness.results import Figures, Report
from bench.harness.rows import Columns, table_of

FINDINGS = {
    "crash": "crashes",
    "hang": "hangs",
    "wrong": "wrong answers",
    "foreign": "undocumented errors",
}
COUNTS = {"inputs": "tried", "served": "served", "refused": "refused", **FINDINGS}
SOAK = Report("soak")


def markdown(result: Figures) -> str:
    """Inputs by class, and of all together; the state of an engine at the end of a long run."""
    rows = [{"name": name, **row} for name, row in sorted(result.items())]
    total = {key: sum(row[key] for row in rows) for key in (*COUNTS, "seconds")}
    columns: Columns = (
        ("inputs", "{name}"),
        *((head, f"{{{key}:,.0f}}") for key, head in COUNTS.items()),
        ("inputs/s", lambda row: f"{row['inputs'] / max(row['seconds'], 1e-9):.0f}"),
    )
    soak = SOAK.read()
    return (
        f"{table_of(columns, [*rows, {'name': '**all**', **total}])}\n\n"
        "Inputs are made from seeds and tried in child processes; refused: with a documented "
        "error. `make fuzz MINUTES=10` tries other seeds.\n\n"
        f"A soak: {soak['steps']:,} steps of one engine, {soak['requests']:,} requests of "
        f"every policy over few pages, {soak['cancelled']:,} cancelled, "
        f"{soak['preemptions']:,} preemptions, {soak['tokens']:,} tokens, each request's "
        "the same as when it runs alone. "
        f"{soak['lost_pages']} pages lost, {soak['pages_free_at_the_end']} free at the end; "
        f"resident memory {soak['rss_mb_at_first']:.1f} MB after the first samples, "
        f"{soak['rss_mb_at_the_end']:.1f} at the end, {soak['rss_growth_mb']:+.1f} between "
        "the first and the last third after the warm-up. `make soak`"
    )


REPORTS = (Report("fuzz", {"fuzz": markdown}),)
