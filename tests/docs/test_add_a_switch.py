"""docs/extending/add-a-switch.md shows the current code, and names all places of the switch."""

from __future__ import annotations

import re
import textwrap

import pytest

import test_house
from cases import DECODER_LAYERS_CASES
from eecore.config import ModelConfig
from eecore.models.decoder import Multipliers

ROOT = test_house.ROOT
PAGE = ROOT / "docs" / "extending" / "add-a-switch.md"
SWITCH = "residual_multiplier"
FILE = re.compile(r"`((?:python|csrc|include|tests)/[\w/.]+\.\w+)`")
BLOCK = re.compile(r"^```(?:python|cpp)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def excerpts() -> list[tuple[str, str]]:
    """Each block of code with the file that the page named last before it."""
    text = PAGE.read_text()
    found = []
    for block in BLOCK.finditer(text):
        files = FILE.findall(text[: block.start()])
        found.append((files[-1], block[1]))
    return found


def lines_of(code: str) -> str:
    return "\n".join(line.strip() for line in textwrap.dedent(code).strip().splitlines())


@pytest.mark.parametrize(("file", "code"), excerpts())
def test_an_excerpt_stands_in_the_file_that_is_named_before_it(file: str, code: str) -> None:
    assert lines_of(code) in lines_of((ROOT / file).read_text())


def test_every_file_that_has_the_switch_is_named() -> None:
    named = set(FILE.findall(PAGE.read_text()))
    assert all((ROOT / file).is_file() for file in named)
    sources = [*ROOT.glob("csrc/**/*.*"), *ROOT.glob("include/**/*.*")]
    sources += ROOT.glob("python/eecore/**/*.py")
    have = {
        str(path.relative_to(ROOT))
        for path in sources
        if "readers" not in path.relative_to(ROOT).parts and SWITCH in path.read_text()
    }
    assert len(have) > 4
    assert have <= named


def test_the_switch_is_off_by_default_and_on_in_a_case() -> None:
    assert ModelConfig.__dataclass_fields__[SWITCH].default == 1.0
    assert Multipliers().residual == 1.0
    assert any(getattr(case, SWITCH) != 1.0 for case in DECODER_LAYERS_CASES)
