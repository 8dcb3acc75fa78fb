"""Held-out utterances to a smart home, for the intent model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.harness.places import ROOT

DATA = ROOT / "build" / "intents"
LONGEST_PARSE = 96  # tokens


def utterances(count: int, folder: Path = DATA) -> list[dict[str, str]]:
    """The first utterances of the held-out split; makes the data if it is missing."""
    file = folder / "test.jsonl"
    if not file.is_file():
        script = ROOT / "scripts" / "intents" / "make_data.py"
        done = subprocess.run([sys.executable, script, folder], capture_output=True, text=True)
        if done.returncode:
            why = (done.stderr.strip() or "no reason").splitlines()[-1]
            hint = "making it needs pip install '.[intents]'"
            raise SystemExit(f"{file}: expected a file, got nothing; {hint}: {why}")
    records = [json.loads(line) for line in file.read_text().splitlines()[:count]]
    if len(records) < count:
        raise SystemExit(f"--count: expected at most {len(records)} with {file}, got {count}")
    return records
