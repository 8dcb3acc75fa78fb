"""Pairs of a long and a one-line description from Debian's package descriptions.

    sudo apt-get -o Acquire::Languages=en update
    python scripts/synopsis/make_synopses.py data/synopsis

Writes train.jsonl, valid.jsonl and test.jsonl of {"input", "target", "package"}, and counts.json.
Packages whose names begin alike (libfoo-dev, libfoo-doc) are in one file, as their texts are
similar; duplicate descriptions are dropped. The same lists and seed write the same files. Needs:
pip install '.[synopsis]'.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from debian.deb822 import Deb822

LISTS = Path("/var/lib/apt/lists")
CAT = "/usr/lib/apt/apt-helper"  # apt's own way to read its lists, compressed or not
SPLITS = ("train", "valid", "test")
SHORTEST = 60  # characters of a description; shorter ones are dropped
LONGEST = 600  # characters of a description, of which the first sentences are kept
LONGEST_SYNOPSIS = 100  # characters of a synopsis


@dataclass(frozen=True)
class Description:
    """A package with its long and its one-line description."""

    package: str
    text: str
    synopsis: str

    @property
    def family(self) -> str:
        """The beginning that the names of related packages share."""
        return re.split(r"[-.+\d]", self.package.removeprefix("lib"))[0] or self.package


def read_lists(paths: Sequence[Path]) -> Iterator[Description]:
    """Every package in apt's lists of descriptions."""
    for path in paths:
        content = subprocess.run([CAT, "cat-file", str(path)], check=True, capture_output=True)
        for entry in Deb822.iter_paragraphs(content.stdout.decode().splitlines()):
            synopsis, _, body = entry["Description-en"].partition("\n")
            yield Description(entry["Package"], shortened(body), " ".join(synopsis.split()))


def shortened(body: str) -> str:
    """The text of a description up to the last sentence that ends within LONGEST characters."""
    lines = ("" if line.strip() == "." else line.strip() for line in body.splitlines())
    text = " ".join(" ".join(lines).split())
    if len(text) <= LONGEST:
        return text
    cut = text[:LONGEST]
    end = max(cut.rfind(". "), cut.rfind("! "), cut.rfind("? "))
    return cut[: end + 1] if end >= SHORTEST else cut.rpartition(" ")[0]


def make_splits(
    descriptions: Iterator[Description], seed: int, each: int
) -> dict[str, list[Description]]:
    """The splits: families of ``each`` packages for valid and test, all others for train."""
    kept: dict[str, Description] = {}
    for one in sorted(descriptions, key=lambda one: one.package):
        fits = len(one.text) >= SHORTEST and 0 < len(one.synopsis) <= LONGEST_SYNOPSIS
        if fits and one.synopsis.lower() not in one.text.lower():
            kept.setdefault(one.text, one)
    families: dict[str, list[Description]] = {}
    for one in kept.values():
        families.setdefault(one.family, []).append(one)
    splits: dict[str, list[Description]] = {name: [] for name in SPLITS}
    for family in random.Random(seed).sample(sorted(families), len(families)):
        name = next((name for name in SPLITS[1:] if len(splits[name]) < each), "train")
        splits[name] += families[family]
    for name, packages in splits.items():
        random.Random(f"{seed} {name}").shuffle(packages)
    return splits


def write(splits: dict[str, list[Description]], folder: Path) -> dict[str, int]:
    """Write every split and counts.json, which is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, packages in splits.items():
        with (folder / f"{name}.jsonl").open("w") as file:
            for one in packages:
                record = {"input": one.text, "target": one.synopsis, "package": one.package}
                file.write(json.dumps(record) + "\n")
    counts = {name: len(packages) for name, packages in splits.items()}
    (folder / "counts.json").write_text(json.dumps(counts, indent=2) + "\n")
    return counts


def main(
    folder: Annotated[Path, typer.Argument(help="Where to write.")],
    lists: Annotated[Path, typer.Option(help="The directory of apt's lists.")] = LISTS,
    tests: Annotated[int, typer.Option(min=10, help="Packages of valid and of test.")] = 1500,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Write the splits of apt's descriptions."""
    paths = sorted(lists.glob("*_Translation-en*"))
    if not paths:
        raise typer.BadParameter(
            f"--lists: expected *_Translation-en* in {lists}, got none: "
            "apt-get -o Acquire::Languages=en update"
        )
    counts = write(make_splits(read_lists(paths), seed, tests), folder)
    print(", ".join(f"{name}: {count}" for name, count in counts.items()))


if __name__ == "__main__":
    typer.run(main)
