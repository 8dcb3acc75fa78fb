"""A fuzzing campaign: ``make fuzz MINUTES=10``, or ``python tests/fuzz/campaign.py ops files``.

Every finding is printed with its seed; ``--first SEED --inputs 1`` tries it again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import fuzzing


def main() -> int:
    """The command line; 1 when anything was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="CLASS", help="of inputs; all when none is named"
    )
    parser.add_argument("--inputs", type=int, help="of each class")
    parser.add_argument("--minutes", type=float, help="for all classes together")
    parser.add_argument(
        "--first", type=int, help="seed of the first input; of the clock if not said"
    )
    parser.add_argument("--out", type=Path, help="JSON file to which the figures are added")
    asked = parser.parse_args()
    unknown = sorted(set(asked.names) - set(fuzzing.classes()))
    if unknown:
        parser.error(f"expected classes of {', '.join(fuzzing.classes())}, got {unknown[0]}")
    names = asked.names or fuzzing.classes()
    if asked.inputs is None and asked.minutes is None:
        asked.minutes = 1.0
    first = time.time_ns() // 1000 if asked.first is None else asked.first
    seconds = None if asked.minutes is None else asked.minutes * 60 / len(names)
    found = False
    for name in names:
        tally = fuzzing.run(name, first=first, inputs=asked.inputs, seconds=seconds)
        row = tally.row()
        print(f"{name}: " + ", ".join(f"{value} {key}" for key, value in row.items()), flush=True)
        for finding in tally.findings:
            print(finding, flush=True)
        found |= bool(tally.findings)
        if asked.out is not None:
            add_row(asked.out, name, row)
    return int(found)


def add_row(path: Path, name: str, row: dict[str, int | float]) -> None:
    """Add the figures of a campaign to those of earlier ones."""
    rows = json.loads(path.read_text()) if path.exists() else {}
    before = rows.get(name, {})
    rows[name] = {key: round(before.get(key, 0) + value, 1) for key, value in row.items()}
    path.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
