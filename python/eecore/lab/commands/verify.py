"""``eecore verify``: requests alone, and again in random company, compared to the bit."""

from __future__ import annotations

import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from warnings import catch_warnings, simplefilter

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from eecore.cli.failures import UsageError
from eecore.cli.loading import MODEL_HELP, check_path
from eecore.cli.options import EngineOptions, given_flags, takes_options
from eecore.files.builtin import BUILTIN
from eecore.files.texts import read_text

FOUND = 1
"""The exit code where texts differ."""
WIDTH = 100
"""Columns of the table where stdout is no terminal."""
PROMPTS = (
    "lock the front door",
    "turn the kitchen lights down to 20 percent and play some jazz in the living room",
    "The capital of France is",
    "What is the meaning of life? Answer in one sentence, then in three.",
    "def add(a, b):\n    return a + b\n\n\ndef multiply(a, b):\n",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55,",
    "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer the "
    "slings and arrows of outrageous fortune, or to take arms against a sea of troubles",
    "Write a letter to a friend who moved to another country. Tell about the weather, the garden, "
    "the neighbours and the dog, and ask when the next visit will be.",
    "A list of things to buy: apples, pears, bread, milk, apples, pears, bread, milk, apples,",
    '{"name": "Ada", "born": 1815, "works": [',
)
"""Prompts where none are given."""


@takes_options
def verify(
    loading: EngineOptions,
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help=MODEL_HELP, show_default=BUILTIN)
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests to compare.")] = 200,
    minutes: Annotated[
        float, typer.Option(min=0.0, help="End after so many minutes; 0: never.")
    ] = 5.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 32,
    prompts: Annotated[
        Path | None, typer.Option(help="A file with a prompt in each line.", show_default="some")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of all draws.", show_default="any")
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Compare texts of this OpenAI server instead, alone and 8 at once; MODEL is then "
            "the name that it knows.",
        ),
    ] = None,
) -> int:
    """Show that no text hangs on its company.

    Each request runs alone, then among others: in batches, chunks, few pages, cancels, prompts that
    begin alike, threads and streams at random, in every mode. Lossless modes are held against full
    depth. Exit code 1: a text or a log-probability differs.
    """
    lines = PROMPTS if prompts is None else tuple(filter(None, read_text(prompts).splitlines()))
    if not lines:
        raise UsageError(f"--prompts: expected a prompt in each line, got none in {prompts}")
    seed = random.getrandbits(32) if seed is None else seed
    ends = time.monotonic() + 60.0 * minutes if minutes else float("inf")
    if server is not None:
        for flag in given_flags(loading):
            if flag != "--debug":
                raise UsageError(f"{flag}: expected none with --server, which has its own")
        return _verify_server(server, model, lines, requests, max_tokens, seed, ends)
    loaded = loading.load(check_path(BUILTIN if model is None else model))

    from eecore.exits import Full
    from eecore.lab.evaluation.same_text import verify as compare

    config = loaded.network.config
    most = config.max_position // 2
    if loaded.tokenizer is None:
        raise UsageError("MODEL: expected one with a tokenizer, got none")
    tokens = [loaded.tokenizer.encode(line)[:most] for line in lines]
    with Progress(console=Console(stderr=True), transient=True) as bar, catch_warnings():
        simplefilter("ignore")  # on modes that promise nothing for this model
        task = bar.add_task("comparing", total=requests)

        def goes_on(done: int, found: int) -> bool:
            bar.update(task, completed=done, description=f"comparing, {found} differ")
            return time.monotonic() < ends

        tallies, differences = compare(
            loaded,
            tokens,
            requests=requests,
            max_tokens=min(max_tokens, most),
            seed=seed,
            goes_on=goes_on,
        )
    rows = {mode: asdict(tally) for mode, tally in tallies.items()}
    _show(rows)
    print(f"{loaded.shared_engine().engine.fingerprint(Full())}, seed {seed}")
    for difference in differences[:10]:
        print(difference)
    return FOUND if differences else 0


def _verify_server(
    url: str,
    model: str | None,
    lines: tuple[str, ...],
    requests: int,
    max_tokens: int,
    seed: int,
    ends: float,
) -> int:
    from eecore.lab.evaluation.same_text_of_servers import verify_server

    rows, examples = verify_server(
        url, lines, model=model, requests=requests, max_tokens=max_tokens, seed=seed, ends=ends
    )
    _show(rows)
    for example in examples[:10]:
        print(example)
    return FOUND if examples else 0


def _show(rows: dict[str, dict[str, Any]]) -> None:
    """A table with a row for each mode."""
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in next(iter(rows.values())):
        table.add_column(name.replace("_", " "), justify="right")
    for mode, row in rows.items():
        table.add_row(mode, *(f"{value:,}" for value in row.values()))
    Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH).print(table)
