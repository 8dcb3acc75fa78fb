"""The page of one T5, from its JSON alone, and its two figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.harness.machine import in_words
from bench.harness.places import PAGES, RESULTS
from bench.harness.results import Figures, Report
from eecore.files.whole import write_text
from eecore.lab.evaluation.calm_report import CalmReport, CalmRow, Speed
from eecore.lab.evaluation.tables import markdown_table


@dataclass(frozen=True)
class Page(Report):
    """A page and two figures in build/bench; a page of bench/results may show an excerpt."""

    def text(self, figures: Figures) -> str:
        return full(figures)

    def write_tables(self, figures: Figures) -> None:
        super().write_tables(figures)
        PAGES.mkdir(parents=True, exist_ok=True)
        write_text(PAGES / f"{self.name}.md", full(figures) + "\n")
        report_of(figures).plot(PAGES / self.name)


def report_of(result: Figures) -> CalmReport:
    """The evaluation, from its recorded figures."""
    kept = result["evaluation"]

    def speed(figures: dict[str, Any] | None) -> Speed | None:
        return None if figures is None else Speed(**figures)

    rows = [
        CalmRow(**{**row, "throughput": speed(row["throughput"]), "latency": speed(row["latency"])})
        for row in kept["rows"]
    ]
    return CalmReport(**{**kept, "rows": tuple(rows)})


def full(result: Figures) -> str:
    """What was measured on what, the evaluation, and full depth beside other engines."""
    parts = [f"# Confident exit: {result['model']}", about(result)]
    parts += [report_of(result).markdown(), shares(result)]
    if result["full_depth"] is not None:
        parts += ["## Full depth, beside other engines", engines(result["full_depth"])]
        parts.append(notes(result))
    return "\n\n".join(part for part in parts if part)


def excerpt(result: Figures) -> str:
    """Quality by measure and exit, and full depth beside other engines."""
    report = report_of(result)
    parts = [report.quality()]
    if result["full_depth"] is not None:
        parts += [engines(result["full_depth"]), notes(result)]
    return "\n\n".join([*parts, f"{report.about()} {about(result)}"])


def about(result: Figures) -> str:
    versions = {} if result["full_depth"] is None else result["full_depth"]["versions"]
    named = "".join(f", {name} {version}" for name, version in versions.items())
    return (
        f"Model {result['model_sha256'][:12]} on {result['data']}, {result['dtype']}, "
        f"{result['threads']} thread(s). {in_words(result)}{named}. `python -m bench calm`"
    )


BOUNDS = {"share_of_ideal": "the ideal", "share_of_cut": "a model cut at the mean depth"}


def confident_speeds(result: Figures, kind: str, bound: str) -> Iterator[tuple[float, str]]:
    """(share of a bound, name) of each confident exit; ``kind`` is throughput or latency."""
    for row in result["evaluation"]["rows"]:
        speed = row[kind]
        if row["settings"] is None or speed is None or speed[bound] is None:
            continue
        yield speed[bound], f"{row['technique']}, {row['batch']}, {row['batch_size']}"


def shares(result: Figures) -> str:
    """The confident exits that are furthest from the ideal speed for their exit rate."""
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
    return markdown_table(head, lines, text_columns=1)


def notes(result: Figures) -> str:
    lines = [
        "- tokens/s: of the best round, prompts included; eecore is: times as fast, the median "
        "over batches in turns; tokens of eecore: share of examples with the same tokens"
    ]
    left_out = result["full_depth"]["left_out"]
    lines += [f"- left out: {name}: {reason}" for name, reason in left_out.items()]
    return "\n".join(lines)


EXCERPTS = ("calm-intents",)
"""The models whose figures bench/results/tasks.md shows."""


def page_of(name: str) -> Page:
    """The report of a model."""
    return Page(
        name,
        {name: excerpt} if name in EXCERPTS else {},
        cases={
            "evaluation.rows": ("technique", "batch", "batch_size"),
            "full_depth.rows": ("engine", "batch_size"),
        },
        measured=("evaluation.batch_sizes", "full_depth.left_out"),
    )


REPORTS = tuple(page_of(file.stem) for file in sorted(RESULTS.glob("calm-*.json")))
