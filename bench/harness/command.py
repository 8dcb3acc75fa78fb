"""The command line that benchmarks share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def parser(
    name: str,
    about: str | None,
    *,
    batches: Sequence[int] | None = None,
    rounds: int | None = None,
    threads: int | None = None,
) -> argparse.ArgumentParser:
    """The parser of ``python -m bench NAME``, with the options that most benchmarks have.

    Args:
        name: the benchmark's name.
        about: the docstring of its module, shown unchanged.
        batches: default of ``--batches``; None leaves the option out, as for the next two.
        rounds: default of ``--rounds``.
        threads: default of ``--threads``.
    """
    made = argparse.ArgumentParser(
        f"python -m bench {name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if batches is not None:
        made.add_argument("--batches", type=int, nargs="+", default=list(batches), metavar="N")
    if rounds is not None:
        made.add_argument("--rounds", type=int, default=rounds, help="rounds of turns")
    if threads is not None:
        made.add_argument("--threads", type=int, default=threads)
    made.add_argument("--dry-run", action="store_true", help="print the tables, write nothing")
    made.add_argument(
        "--replace",
        action="store_true",
        help="replace all kept figures, even if cases were left out or settings differ",
    )
    made.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures to this file, and no tables"
    )
    return made


def say(what: Any) -> None:
    """Print a line about the progress of the run."""
    print(what, file=sys.stderr, flush=True)
