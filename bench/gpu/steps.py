"""Adds how gpu.sh's steps ended to the JSON and the table of the ops, and prints both tables.
Of a step that is there already the later outcome stays.

python -m bench.gpu.steps STEPS.tsv RESULT.json RESULT.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(steps_file: str, json_file: str, markdown_file: str) -> None:
    fields = ("step", "outcome", "seconds", "summary")
    lines = Path(steps_file).read_text().splitlines()
    steps = [dict(zip(fields, line.split("\t"), strict=True)) for line in lines]
    result_file, table_file = Path(json_file), Path(markdown_file)
    result = json.loads(result_file.read_text()) if result_file.exists() else {}
    known = {step["step"]: step for step in [*result.get("steps", []), *steps]}
    result_file.write_text(json.dumps({**result, "steps": [*known.values()]}, indent=1) + "\n")
    head = "| step | outcome | s | |"
    rows = [head, "|---|---|---:|---|"]
    rows += [f"| {' | '.join(step.values())} |" for step in known.values()]
    table = table_file.read_text() if table_file.exists() else ""
    table_file.write_text(table.partition(head)[0].rstrip() + "\n\n" + "\n".join(rows) + "\n")
    print(table_file.read_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
