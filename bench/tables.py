"""All tables and the plot again, from the committed figures: nothing is measured.

python -m bench tables

Writes the marked sections of bench/RESULTS.md and bench/results/*.md, the one table of README.md,
and bench/results/decode.svg, which README.md shows; the pages of the T5s go into build/bench.
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
    "decode.load",
    "depth.depth",
    "depth.loops",
    "exits.modes",
    "exits.checks",
    "exits.drafts",
    "exits.draft_peers",
    "exits.auto",
    "exits.replay",
    "exits.late",
    "exits.trees",
    "intents.intents",
    "calm.tables",
    "quality.weights",
    "quality.cache",
    "quality.quality",
    "quality.gemma",
    "integrations.transformers",
    "integrations.vllm",
    "serving.tables",
    "ops.table",
    "ops.attention",
    "ops.products",
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
