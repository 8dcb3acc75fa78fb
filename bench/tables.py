"""All tables and the plot again, from the committed figures: nothing is measured.

python -m bench tables

Writes the marked sections of bench/RESULTS.md and bench/results/*.md, the one table of README.md,
and bench/results/decode.svg, which README.md shows.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Sequence

from bench.__main__ import BENCHMARKS
from bench.decode import plot
from bench.harness.places import RESULTS
from bench.harness.results import Report


def reports() -> Iterator[Report]:
    """The reports of all benchmarks, and that of fuzzing."""
    for module in (*BENCHMARKS.values(), "bench.fuzz.tables"):
        yield from getattr(importlib.import_module(module), "REPORTS", ())


def main(words: Sequence[str]) -> None:
    argparse.ArgumentParser(
        "python -m bench tables", description=__doc__.partition("\n")[0]
    ).parse_args(words)
    kept = {}
    for report in reports():
        kept[report.name] = report.read()
        report.write_tables(kept[report.name])
    plot.draw(kept["decode"], kept["depth"], RESULTS / "decode.svg")
