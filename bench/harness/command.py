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
    """Of ``python -m bench NAME``, with the options that most have.

    Args:
        name: of the benchmark.
        about: the docstring of its module, shown as it is.
        batches: default of ``--batches``; None leaves the option out, here and below.
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
        made.add_argument("--rounds", type=int, default=rounds, help="in which all take turns")
    if threads is not None:
        made.add_argument("--threads", type=int, default=threads)
    made.add_argument("--dry-run", action="store_true", help="print the tables, write nothing")
    made.add_argument(
        "--replace",
        action="store_true",
        help="in place of all kept figures, also where cases were left out or settings differ",
    )
    made.add_argument(
        "--json", type=Path, metavar="FILE", help="figures into this file, tables nowhere"
    )
    return made


def say(what: Any) -> None:
    """One line about how the run goes."""
    print(what, file=sys.stderr, flush=True)
