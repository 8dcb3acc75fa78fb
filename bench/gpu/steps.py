"""All tables of a run on a GPU, from its JSON files, on one page.

python -m bench.gpu.steps FOLDER DEVICE
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu import decode, gpu, kernels, peers


def steps_table(result: dict[str, Any]) -> str:
    """The table of the outcomes of steps."""
    lines = ["| step | outcome | s | |", "|---|---|---:|---|"]
    lines += [
        f"| {step['step']} | {step['outcome']} | {step['seconds']:.0f} | {step['summary']} |"
        for step in result["steps"]
    ]
    return "\n".join(lines)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "-steps": steps_table,
    "-decode": decode.table,
    "-peers": peers.table,
    "-kernels": kernels.table,
    "": gpu.table,
}


def main(folder: str, device: str) -> None:
    texts = []
    for suffix, table in TABLES.items():
        file = Path(folder) / f"gpu-{device}{suffix}.json"
        if file.exists():
            texts.append(table(json.loads(file.read_text())))
    page = "\n\n".join(texts) + "\n"
    (Path(folder) / f"gpu-{device}.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main(*sys.argv[1:])
