"""The tables of full-depth decoding, from its JSON alone."""

from __future__ import annotations

from typing import Any

from bench.harness.machine import in_words
from bench.harness.rows import find, unique
from eecore.lab.evaluation.tables import markdown_table

BITS = ("f32", "bf16", "int8", "int4")


def short(result: dict[str, Any]) -> str:
    """The table of one sequence on one thread: engines by model and bits."""
    rows = result["rows"]
    models, engines = unique(rows, "model"), unique(rows, "engine")
    head = ["tokens/s", *(f"{model} {bits}" for model in models for bits in BITS)]
    lines = []
    for engine in engines:
        cells = [
            find(rows, model=model, bits=bits, engine=engine, threads=1, batch=1)
            for model in models
            for bits in BITS
        ]
        speeds = ("" if cell is None else f"{cell['tokens_per_s_best']:.0f}" for cell in cells)
        lines.append([engine, *speeds])
    return f"{markdown_table(head, lines, text_columns=1)}\n\n{about(result)}"


def about(result: dict[str, Any]) -> str:
    """A sentence on the measurement and the machine."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    reads = ", ".join(
        f"{best_ceiling(result, threads) / 1e9:.1f} GB/s on {threads}"
        for threads in sorted(unique(result["ceilings"], "threads"))
    )
    return (
        f"One sequence, one thread, {result['tokens']} greedy tokens after a prompt of one; best "
        f"of {result['rounds']} rounds in turns. In eecore and in llama.cpp int8 is Q8_0, int4 is "
        f"Q4_1 with Q5_1 for keys and Q8_0 for values and the head. {in_words(result)}, "
        f"{versions}. Memory reads at {reads} thread(s). `python -m bench decode`"
    )


def best_ceiling(result: dict[str, Any], threads: int) -> float:
    return max(c["dram_read"] for c in result["ceilings"] if c["threads"] == threads)


def full(result: dict[str, Any]) -> str:
    """The table of every setting, with shares of the read ceiling, ratios and notes."""
    head = ["model", "bits", "engine"]
    rows = result["rows"]
    settings = [(t, b) for t in unique(rows, "threads") for b in unique(rows, "batch")]
    for threads, batch in settings:
        head += [f"{threads} thr. x {batch} seq.", "of ceiling", "eecore is"]
    lines = []
    for model in unique(rows, "model"):
        for bits in BITS:
            for engine in unique(rows, "engine"):
                where = {"model": model, "bits": bits, "engine": engine}
                cells = []
                for threads, batch in settings:
                    cells += figures(result, {**where, "threads": threads, "batch": batch})
                if any(cells):
                    lines.append([model, bits, engine, *cells])
    about = (
        "tokens/s of all sequences together, best round (32 tokens for each of several "
        "sequences); of ceiling: the rate of reading the weights over the read bandwidth measured "
        "in the same rounds (above 1 if a large L3 holds some of the weights); eecore is: its "
        "speed-up at equal bits. `python -m bench decode`"
    )
    return "\n\n".join([about, markdown_table(head, lines, text_columns=3), notes(result)])


def figures(result: dict[str, Any], where: dict[str, Any]) -> list[str]:
    """Cells of one setting: tokens/s, share of the read ceiling, eecore's speed-up."""
    found, ratio = find(result["rows"], **where), find(result["ratios"], **where)
    if found is None:
        return ["", "", ""]
    return [
        f"{found['tokens_per_s_best']:.1f}",
        f"{found['share_of_read_ceiling']:.2f}",
        "" if ratio is None else f"{ratio['of_best']:.2f}x",
    ]


def notes(result: dict[str, Any]) -> str:
    """Notes: agreement of texts, and what was left out."""
    lines = [
        f"- {entry['model']}, float32: of {entry['of']} greedy {entry['unit']}, the first "
        f"{entry['same']} of eecore and {entry['engine']} are the same"
        for entry in result["agreement"]
    ]
    lines += [
        f"- left out: {entry['engine']} {entry.get('bits', '')}: {entry['reason']}"
        for entry in result["left_out"]
    ]
    return "\n".join(lines)
