"""The synopsis task: its data from apt's lists, and their split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

import make_synopses
from make_synopses import LONGEST, SPLITS, Description, make_splits, read_lists, shortened

LONG = "It parses the moon. " * 5
LIST = f"""\
Package: libmoon-dev
Description-md5: d943033bedada21853d2ae54a2578a7b
Description-en: parser of moons
 It parses the moon, every
 crater of it.
 .
 Also:
  * seas

Package: lib-moon
Description-en: moons
 {LONG}

"""


@pytest.fixture
def lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    reader = tmp_path / "cat"
    reader.write_text('#!/bin/sh\nexec cat "$2"\n')
    reader.chmod(0o755)
    monkeypatch.setattr(make_synopses, "CAT", str(reader))
    folder = tmp_path / "lists"
    folder.mkdir()
    (folder / "debian_main_i18n_Translation-en").write_text(LIST)
    return folder


def test_lines_become_a_text(lists: Path) -> None:
    first, second = read_lists(sorted(lists.iterdir()))
    text = "It parses the moon, every crater of it. Also: * seas"
    assert first == Description("libmoon-dev", text, "parser of moons")
    assert second.text == LONG.strip()
    assert (first.family, second.family) == ("moon", "lib-moon")


def test_long_texts_end_with_a_sentence() -> None:
    text = shortened(" ".join(["Eight words make a sentence of this text."] * 30))
    assert LONGEST - 45 < len(text) <= LONGEST
    assert text.endswith(" of this text.")
    words = shortened("word " * 300)
    assert len(words) <= LONGEST
    assert set(words.split()) == {"word"}


def test_kin_and_copies_stay_on_one_side() -> None:
    packages = [
        Description(f"lib{name}-{part}", f"{LONG}{name} {part * (name != 'copy')}", f"say {name}")
        for name in ("copy", *(f"n{chr(97 + i)}" for i in range(20)))
        for part in ("dev", "doc", "data")
    ]
    hidden = Description("x", f"{LONG} The Last Word.", "the last word")  # in the text already
    short = Description("y", "too short", "why")
    splits = make_splits(iter([*packages, hidden, short]), seed=1, each=6)
    assert list(splits) == list(SPLITS)
    everything = [one for split in splits.values() for one in split]
    assert len(everything) == 61
    assert hidden not in everything
    assert short not in everything
    families = [{one.family for one in split} for split in splits.values()]
    assert sum(map(len, families)) == len(set().union(*families)) == 21
    assert all(6 <= len(splits[name]) <= 8 for name in SPLITS[1:])
    assert make_splits(iter(packages[::-1]), seed=1, each=6) == make_splits(
        iter(packages), seed=1, each=6
    )


def test_the_command(lists: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_synopses.main(tmp_path / "out", lists=lists, tests=10, seed=0)
    assert capsys.readouterr().out == "train: 0, valid: 1, test: 0\n"
    record = json.loads((tmp_path / "out" / "valid.jsonl").read_text())
    assert record == {"input": LONG.strip(), "target": "moons", "package": "lib-moon"}
    with pytest.raises(typer.BadParameter, match=r"expected \*_Translation-en\* in .*, got none"):
        make_synopses.main(tmp_path / "out", lists=tmp_path, tests=10, seed=0)
