"""The tables of saved layers, from their JSON alone."""

from __future__ import annotations

from bench.harness.machine import in_words
from bench.harness.rows import Row, find, is_at, unique
from eecore.lab.evaluation.tables import markdown_table


def full(result: Row) -> str:
    """The tables of every mode, the host's share and mixed batches, with notes."""
    rows = result["modes"]
    parts = []
    for names in sets_of_modes(rows):
        models = {row["model"] for row in rows if row["mode"] == names[-1]}
        chosen = [row for row in rows if row["model"] in models]
        parts.append(speed_table(chosen, names, rows))
    parts += [SPEEDS_ABOUT, host_table(result["hosts"]), HOST_ABOUT]
    parts += [mix_table(result["mixes"]), MIX_ABOUT, sources(result), about(result)]
    return "\n\n".join(parts)


def short(result: Row) -> str:
    """The table of softmax exits and the longest drafts, on the fewest threads."""
    rows = result["modes"]
    threads = min(row["threads"] for row in rows)
    batches = unique(rows, "batch")
    head = ["model", "weights"]
    for batch in batches:
        head += [f"exits, batch {batch}", f"drafts, batch {batch}"]
    lines = []
    for model, weights in dict.fromkeys((row["model"], row["weights"]) for row in rows):
        where = {"model": model, "weights": weights, "threads": threads}
        line = [model, weights]
        for batch in batches:
            of_batch = [row for row in rows if is_at(row, {**where, "batch": batch})]
            exits = [row for row in of_batch if row["mode"].startswith("softmax, each")]
            drafts = [row for row in of_batch if row["acceptance"] is not None]
            line += [cell(found[-1]) if found else "" for found in (exits, drafts)]
        lines.append(line)
    table = markdown_table(head, lines, text_columns=2)
    return f"{SHORT_LEAD}\n\n{table}\n\n`python -m bench depth`"


SHORT_LEAD = (
    "The time that saved layers save: decoding steps of `ConfidentExit` (softmax, each row exits "
    "alone) and `SelfSpeculative` as a speed-up over `Full()`; in brackets the share of the "
    "predicted speed-up: that of a model cut at the mean depth, with checks and filling, or of "
    "the passes of drafts and verification alone."
)
SPEEDS_ABOUT = (
    "Speed-up of decoding over `Full()`; in brackets, predicted over measured time. The first "
    "prediction is a model cut at the mean depth (on the line through `Full()` and two "
    "`FixedExit`), plus checks and filling timed as single ops; the second, after the slash, if "
    "rows exit one by one, is each layer's time for the rows still in flight. Weights are read "
    "once for many rows, so rows that exit alone save little where memory is the bound. The "
    "prediction of self-speculation is its own passes at the measured acceptance rate. The first "
    "models exit and draft as they were trained to; the other models are forced to exit at the "
    "layer named, after a check that no row passes, and what their layers after L/4 add is damped "
    "so that drafts are accepted."
)
HOST_ABOUT = (
    "The fastest step of `Full()`, and the time of the same kernels back to back "
    "(`decoder_layers` over all layers, `exit_confidence_softmax`); host: the difference, and its "
    "share of the step."
)
MIX_ABOUT = (
    "Milliseconds of a step of requests that decode at full depth, and the factor by which the "
    "step is longer: if a prompt of 64 tokens arrives in every step, if one of the requests "
    "samples, and if the batch has `Full()`, `FixedExit(L/2)`, softmax exits and self-speculation "
    "(in brackets, per token)."
)


def sets_of_modes(rows: list[Row]) -> list[list[str]]:
    """The modes of each kind of model, full depth left out."""
    by_model: dict[str, list[str]] = {}
    for row in rows:
        names = by_model.setdefault(row["model"], [])
        if row["mode"] not in (*names, "Full()"):
            names.append(row["mode"])
    return [list(names) for names in dict.fromkeys(map(tuple, by_model.values()))]


def speed_table(chosen: list[Row], names: list[str], rows: list[Row]) -> str:
    """A table: a line for each model, weights, threads and batch; a column for each mode."""
    keys = ("model", "weights", "threads", "batch")
    lines = []
    for values in dict.fromkeys(tuple(row[key] for key in keys) for row in chosen):
        where = dict(zip(keys, values, strict=True))
        at_full = find(rows, **where, mode="Full()")
        assert at_full is not None
        found = [find(rows, **where, mode=name) for name in names]
        cells = ["" if row is None else cell(row, depth=True) for row in found]
        lines.append([*map(str, values), f"{at_full['token_ms']:.2f}", *cells])
    return markdown_table([*keys, "`Full()`, ms", *names], lines, text_columns=2)


def cell(row: Row, *, depth: bool = False) -> str:
    """A cell: speed-up, mean depth or acceptance rate, efficiencies."""
    text = f"{row['speed_up']:.2f}x"
    if depth and row["acceptance"] is not None:
        text += f" at {row['acceptance']:.0%}"
    elif depth and not row["mode"].startswith("Fixed"):
        text += f" at {row['mean_depth']:.1f}"
    shares = [row[name] for name in ("of_cut", "of_present") if row[name] is not None]
    return f"{text} ({' / '.join(f'{share:.0%}' for share in shares)})" if shares else text


def host_table(hosts: list[Row]) -> str:
    batches = unique(hosts, "batch")
    head = ["model", "weights", "threads"]
    for batch in batches:
        head += [f"step, batch {batch} (ms)", "kernels", "host (us)", "share"]
    lines = []
    for where in settings(hosts):
        line = [str(value) for value in where.values()]
        for batch in batches:
            row = find(hosts, **where, batch=batch)
            if row is None:
                line += [""] * 4
                continue
            share = row["host_us"] / 1e3 / row["step_ms"]
            line += [f"{row['step_ms']:.2f}", f"{row['kernels_ms']:.2f}"]
            line += [f"{row['host_us']:.0f}", f"{share:.1%}"]
        lines.append(line)
    return markdown_table(head, lines, text_columns=2)


def mix_table(mixes: list[Row]) -> str:
    names = unique(mixes, "mix")
    lines = []
    for where in settings(mixes):
        found = [find(mixes, **where, mix=name) for name in names]
        alone, *others = (row for row in found if row is not None)
        cells = [f"{row['ratio']:.2f}" for row in others]
        cells[-1] += f" ({others[-1]['token_ratio']:.2f})"
        line = [str(value) for value in where.values()]
        lines.append([*line, str(alone["batch"]), f"{alone['step_ms']:.2f}", *cells])
    return markdown_table(["model", "weights", "threads", "batch", *names], lines, text_columns=2)


def settings(rows: list[Row]) -> list[Row]:
    """Model, weights and threads of the rows, each once."""
    keys = ("model", "weights", "threads")
    values = dict.fromkeys(tuple(row[key] for key in keys) for row in rows)
    return [dict(zip(keys, each, strict=True)) for each in values]


def sources(result: Row) -> str:
    """A sentence on the models whose weights come from a cache, and from memory."""
    from_cache, from_memory = [], []
    for row in result["weights"]:
        kind = from_cache if row["from_cache"] else from_memory
        kind.append(f"{row['model']} {row['weights']} ({row['bytes'] / 1e6:.0f} MB)")
    parts = [
        f"{what}: {', '.join(names)}"
        for what, names in (("weights from a cache", from_cache), ("from memory", from_memory))
        if names
    ]
    return f"By the rate at which so many bytes are read: {'; '.join(parts)}."


def about(result: Row) -> str:
    """A sentence on the measurement and the machine."""
    amx = "with AMX" if result["has_amx"] else "without AMX"
    return (
        f"{result['steps']} decoding steps, each by the fastest of {result['rounds']} rounds in "
        f"turns. {in_words(result)}, {amx}. `python -m bench depth`"
    )
