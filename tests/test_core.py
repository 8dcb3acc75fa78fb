"""The core stands alone: it imports nothing of what is built on it, and four packages run it."""

from __future__ import annotations

import subprocess
import sys

from test_house import FLOORS, floor

CORE = (
    "ops",
    "exits",
    "exit_text",
    "calibration_file",
    "config",
    "guide",
    "output",
    "models",
    "scheduling",
    "planning",
    "decoding",
    "engine",
    "generation",
)
"""The floors of the core; what they look at below them is of the core, too."""
AROUND = {"cli", "console", "serving", "lab", "integrations", "calibration", "heads", "eecore"}

ALONE = """
import importlib.abc, importlib.metadata, re, sys

def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()

def needed(names):  # distributions, and what they require
    found, left = set(), list(names)
    while left:
        name = left.pop()
        if plain(name) not in found:
            found.add(plain(name))
            try:
                required = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue  # a requirement of another platform
            left += [re.match(r"[\\w.-]+", each)[0] for each in required if "extra ==" not in each]
    return found

# tokenizers requires huggingface_hub, for what no file on a disk needs.
allowed = needed(["torch"]) | {"eecore", "numpy", "safetensors", "tokenizers"}
homes = importlib.metadata.packages_distributions()
blocked = {top for top, its in homes.items() if not {plain(name) for name in its} & allowed}

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in blocked and not top.startswith("__editable"):
            raise ModuleNotFoundError(f"No module named {top!r}", name=top)

sys.meta_path.insert(0, Blocked())
import eecore
for exit in ("full", "confident:0.9", "speculative:3,6", "auto"):
    (output,) = eecore.generate(eecore.load(), "lock the front door", exit=exit)
    assert output.text == "[HassTurnOn [name front door]]", (exit, output.text)
print(*sorted({name.partition(".")[0] for name in sys.modules} & blocked))
print(*sorted(name for name in sys.modules if name.startswith("eecore.")))
"""


def test_the_core_runs_with_four_packages() -> None:
    run = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    blocked, loaded = run.stdout.splitlines()
    assert not blocked
    assert not {floor(name) for name in loaded.split()} & (AROUND - {"eecore"})


def test_the_core_looks_at_nothing_that_is_built_on_it() -> None:
    below: set[str] = set()
    for row, seen in FLOORS.items():
        if row in CORE:
            below |= {row, *seen.split()}
    assert not below & AROUND
