"""The program's side of a :class:`bench.harness.processes.Process`: lines of JSON on stdout.

This module also runs in the environments of peers, so it imports only the standard library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib import metadata
from typing import Any


def answering() -> Callable[[dict[str, Any]], None]:
    """A function that prints an answer; from now on all other output goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=answers, flush=True)

    return answer


def version_of(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
