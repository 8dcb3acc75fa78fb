"""The draft heads that ship: whole, of different models, and as good as their cards say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from eecore.models.readers.head_file import SHIPPED, HeadFile, read_head_settings
from eecore.models.recurrent_head import head_floats

PACKS = sorted(SHIPPED.iterdir())
MAX_BYTES = {"smollm2-135m-instruct": 4_000_000, "qwen2.5-coder-0.5b-instruct": 8_000_000}
HELD_OUT = 0.05


def card_of(pack: Path) -> str:
    return (pack / "README.md").read_text(encoding="utf-8")


def shares_of(card: str, row: str) -> list[float]:
    """Numbers of a row of the table of agreement."""
    line = next(line for line in card.splitlines() if line.startswith(f"| {row} |"))
    return [float(share) for share in re.findall(r"([\d.]+) %", line)]


def test_each_is_of_a_model_of_its_own() -> None:
    digests = [read_head_settings(pack).digest for pack in PACKS]
    assert len(PACKS) >= 2
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("pack", PACKS, ids=lambda pack: pack.name)
def test_its_files_are_whole(pack: Path) -> None:
    settings = read_head_settings(pack)
    file = HeadFile(pack, settings)
    assert (file.vocabulary[1:] > file.vocabulary[:-1]).all()
    files = {path.name: path.stat().st_size for path in pack.iterdir()}
    assert files.keys() == {"README.md", "head.json", "head.safetensors"}
    assert sum(files.values()) <= MAX_BYTES[pack.name]


@pytest.mark.parametrize("pack", PACKS, ids=lambda pack: pack.name)
def test_its_card_says_what_it_is(pack: Path) -> None:
    card, about = card_of(pack), json.loads((pack / "head.json").read_text())
    agreement, training = about["agreement"], about["training"]
    for row, name in (("all answers", "by_position"), ("greedy ones", "by_position_greedy")):
        assert shares_of(card, row) == pytest.approx(
            [100 * share for share in agreement[name]], abs=0.0501
        )
    words = sum(
        int(n.replace(",", "")) for n in re.findall(r"\| (\d[\d,]*,\d{3}) \|$", card, re.MULTILINE)
    )
    assert f"{words:,} tokens of answers" in card
    assert training["tokens"] == pytest.approx((1 - HELD_OUT) * words, rel=0.01)
    assert re.search(rf"\b{training['steps']:,}|\b{training['steps']}\b", card)
    weights = sum(
        head_floats(tensor).numel()
        for tensor in HeadFile(pack, read_head_settings(pack)).tensors.values()
    )
    assert f"{weights / 1e6:.1f}M weights" in card
    size = (pack / "head.safetensors").stat().st_size
    assert f"({size / 1e6:.1f} MB in" in card


def test_the_manual_names_them_all() -> None:
    manual = Path(__file__).parents[2] / "docs" / "lab.md"
    if not manual.is_file():
        pytest.skip("there is no manual beside these tests")
    text = manual.read_text(encoding="utf-8")
    for pack in PACKS:
        first = shares_of(card_of(pack), "all answers")[0]
        assert re.search(rf"heads/{re.escape(pack.name)}/README\.md\).*\| {first:.0f} % \|", text)
