"""The other end of a :class:`bench.harness.processes.Process`: lines of JSON on stdout.

It runs in the environments of peers too, so it takes nothing but the standard library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib import metadata
from typing import Any


def answering() -> Callable[[dict[str, Any]], None]:
    """What answers; libraries print what they like, which goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=answers, flush=True)

    return answer


def version_of(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
