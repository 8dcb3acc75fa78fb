"""All tables and the plot again, from the committed figures: nothing is measured.

python -m bench tables

Writes the marked sections of bench/RESULTS.md and bench/results/*.md, the one table of README.md,
and bench/results/decode.svg, which README.md shows.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Sequence

from bench.decode import plot
from bench.harness.places import RESULTS
from bench.harness.results import Report

WITH_REPORTS = (
    "overview",
    "decode.decode",
    "decode.gguf",
    "decode.prefill",
    "depth.depth",
    "depth.loops",
    "exits.modes",
    "exits.checks",
    "exits.drafts",
    "exits.auto",
    "exits.replay",
    "intents.intents",
    "calm.calm",
    "quality.weights",
    "quality.quality",
    "integrations.transformers",
    "integrations.vllm",
    "serving.serve",
    "serving.soak",
    "ops.table",
    "ops.attention",
    "fuzz.tables",
    "gpu.gpu",
    "gpu.decode",
)


def reports() -> Iterator[Report]:
    """The reports of all benchmarks."""
    for module in WITH_REPORTS:
        yield from importlib.import_module(f"bench.{module}").REPORTS


def main(words: Sequence[str]) -> None:
    argparse.ArgumentParser(
        "python -m bench tables", description=__doc__.partition("\n")[0]
    ).parse_args(words)
    kept = {}
    for report in reports():
        kept[report.name] = report.read()
        report.write_tables(kept[report.name])
    plot.draw(kept["decode"], kept["depth"], RESULTS / "decode.svg")
