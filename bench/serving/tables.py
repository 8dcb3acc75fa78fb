"""The tables of the server, from their JSON alone: the cost of HTTP, and the soak."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from bench.harness.results import Figures, Report
from eecore.lab.evaluation.tables import markdown_table

ENGINE, SERVER = "engine alone", "eecore serve"
MAX_GROWTH_MB = 8.0
"""Allowed growth of resident memory after the warm-up, for the variation of allocators."""
WARM_MINUTES = 5.0
"""The growth of a shorter run is not judged: it is still warming up."""
GAUGES = ("requests_running", "requests_waiting", "requests_held", "kv_pages_used", "kv_pages")
GAUGES += ("kv_pages_cached",)


# What HTTP costs

SERVE_HEAD = (
    "model, exit, clients",
    "",
    "tokens/s",
    "of the engine",
    "first token, ms: p50",
    "p99",
    "between, ms: p50",
    "p99",
    "CPU µs/token",
)


def serve_table(result: Figures) -> str:
    """The table of the server's speed."""
    lines = []
    for row in result["rows"]:
        cpu = row["cpu_us_per_token"]
        how = "streamed" if row["streams"] else "whole"
        lines.append(
            [
                f"{row['model']}, {row['exit']}, {row['clients']}",
                f"{row['who']}, {how}",
                f"{row['tokens_per_s']:.0f}",
                "" if row["who"] == ENGINE else f"{row['of_engine']:.2f}",
                *_milliseconds(row["first_ms"]),
                *_milliseconds(row["gap_ms"]),
                "" if cpu is None else f"{cpu:.0f}",
            ]
        )
    left_out = "".join(f" {name} is left out: {why}." for name, why in result["left_out"].items())
    return f"{markdown_table(SERVE_HEAD, lines, text_columns=2)}\n\n{about_serve(result)}{left_out}"


def _milliseconds(found: list[float] | None) -> list[str]:
    return ["", ""] if found is None else [f"{value:.1f}" for value in found]


def about_serve(result: Figures) -> str:
    """A sentence on the measurement and the machine."""
    quick = "A quick run, whose times mean nothing. " if result["quick"] else ""
    versions = ", ".join(f"{name} {v or 'none'}" for name, v in result["versions"].items())
    return (
        f"{quick}The engine alone gets the same prompts from as many tasks, in the process of the "
        "clients; the server has a process of its own. Clients, server and engine share "
        f"{result['cores']} cores of {result['cpu']} ({result['cpu_capability']} kernels, "
        f"{result['threads']} thread(s)), so that clients take from the server's speed; CPU time "
        "is that of the process that answers, the model's work included. Medians of "
        f"{result['rounds']} round(s) in turns; p50 and p99 over all requests, and over all gaps "
        f"between parts of an answer. No prefix cache. {versions}. `{result['command']}`"
    )


# The soak


def faults(result: Figures) -> list[str]:
    """Messages of all checks that failed."""
    found = list(result["findings"])
    for name in GAUGES[:4]:
        if result["at_rest"][name]:
            found.append(f"{name}: expected 0 at rest, got {result['at_rest'][name]:g}")
    if result["minutes"] >= WARM_MINUTES and result["rss_growth_mb"] > MAX_GROWTH_MB:
        found.append(
            f"resident memory: expected at most {MAX_GROWTH_MB:g} MB more, got "
            f"{result['rss_growth_mb']:g}"
        )
    return found


OUTCOMES = {
    "answered": "answered",
    "refused": "refused, as expected",
    "busy": "429: no seat",
    "late": "504: too late",
    "left": "left by the client",
    "unexpected": "anything else",
}


def soak_table(result: Figures) -> str:
    """The table of requests by kind and outcome."""
    counts = {kind: Counter(row) for kind, row in result["counts"].items()}
    counts["**all**"] = sum(counts.values(), Counter())
    lines = [
        [kind, f"{sum(row.values()):,}", *(f"{row[name]:,}" for name in OUTCOMES)]
        for kind, row in counts.items()
    ]
    head = ["requests", "sent", *OUTCOMES.values()]
    return f"{markdown_table(head, lines, text_columns=1)}\n\n{about_soak(result)}"


def about_soak(result: Figures) -> str:
    """Sentences on the run, and on the state of the server at its end."""
    rest, found = result["at_rest"], faults(result)
    rises = sum(later > earlier for earlier, later in pairwise(result["rss_mb"]))
    return (
        f"{result['clients']} clients for {result['minutes']:g} minutes, each with its next "
        "request as soon as its last has ended, against `eecore serve` (intent, float32, "
        f"`{' '.join(result['options'])}`) on "
        f"{result['cores']} cores of {result['cpu']}. Greedy answers are compared with those of "
        f"the idle server. After the clients disconnected: {rest['requests_running']:g} running, "
        f"{rest['requests_waiting']:g} waiting, {rest['requests_held']:g} held, "
        f"{rest['kv_pages_used']:g} of {rest['kv_pages']:g} pages in use. Resident memory "
        f"{result['rss_mb_warm']:.1f} MB when warm, {result['rss_mb_at_the_end']:.1f} at the end, "
        f"{result['rss_growth_mb']:+.1f} between the first and the last third after the warm-up "
        f"(it rose between {rises} of {len(result['rss_mb']) - 1} samples). "
        f"{'Nothing else was found.' if not found else 'Found: ' + '; '.join(found) + '.'} "
        "`python -m bench soak-serve`"
    )


SERVE = Report(
    "serve",
    {"serve": serve_table},
    {"rows": ("model", "exit", "clients", "who", "streams")},
    ("command", "left_out"),
)
SOAK = Report(
    "soak_serve",
    {"soak_serve": soak_table},
    measured=(
        *("seed", "seconds", "counts", "findings", "at_rest"),
        *("rss_mb", "rss_mb_warm", "rss_mb_at_the_end", "rss_growth_mb"),
    ),
)
REPORTS = (SERVE, SOAK)
