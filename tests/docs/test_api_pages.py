"""The contracts in docs/api.md and docs/ops are those of the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import pytest

import api_pages
import eecore
from eecore.values import whole

ROOT = api_pages.ROOT
NAMED = [(name, page) for page in api_pages.pages() for name in api_pages.marked(page)]
Count = Annotated[int, whole(1)]


@dataclass(frozen=True)
class Settings:
    """Some settings, as :func:`eecore.load` has them."""

    count: Count
    """How many, at least 1."""
    limit: Annotated[float | None, "a rule"] = None
    names: tuple[str, ...] = field(default_factory=tuple)
    _kept: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.count

    @contextmanager
    def held(self, word: str = "a", *, lines: bool = False) -> Iterator[None]:
        """Hold them; see :meth:`total`.

        Args:
            word: what is said,
                at length: twice.
            lines: whether ``word`` has some.

        Raises:
            ValueError: for another.
        """
        yield print(word, lines)

    @staticmethod
    async def of(*words: str, **others: int) -> Settings:
        """Made of words.

        Some are::

            Settings.of("a")
        """
        raise NotImplementedError(words, others)

    def silent(self) -> None:
        raise NotImplementedError


class Pair(NamedTuple):
    """Two numbers."""

    first: int
    """The :class:`Settings` come
    from it.
    """
    second: float = 1.5


def shown(monkeypatch: pytest.MonkeyPatch, thing: type) -> str:
    monkeypatch.setattr(api_pages, "exported", lambda _: thing)
    return api_pages.contract(f"eecore.{thing.__name__}", api_pages.API)


@pytest.mark.parametrize(("name", "page"), NAMED, ids=[name for name, _ in NAMED])
def test_a_contract_is_that_of_the_code(name: str, page: Path) -> None:
    written = f"<!-- {name} -->\n{api_pages.section(name, page)}\n<!-- end of {name} -->\n"
    assert page.read_text().count(written) == 1, "python scripts/api_pages.py writes it"


def test_a_contract_has_the_signature_and_every_argument() -> None:
    text = api_pages.contract("eecore.ops.accept_mask", api_pages.DOCS / "ops" / "accept_mask.md")
    assert "\naccept_mask(\n    confidence: Tensor,\n" in text
    assert "\n) -> AcceptMask\n```\n" in text
    assert "\n- `layer`: how many layers have run, 1..num_layers.\n" in text


def test_no_markup_of_docstrings_is_left() -> None:
    for page in api_pages.pages():
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert not re.findall(r":\w+:`|(?<!`)``(?!`)|::$|^:::", text, re.MULTILINE), page.name


def test_links_within_the_pages_lead_to_headings() -> None:
    headings = {
        page: {
            re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")
            for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
        }
        for page in api_pages.pages()
    }
    found = 0
    for page in headings:
        for target, anchor in re.findall(r"\]\(([\w./]*)#(eecore\w+)\)", page.read_text()):
            found += 1
            assert anchor in headings[(page.parent / target).resolve() if target else page]
    assert found > 50


def test_a_class_is_shown_with_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, Settings) == (
        "### eecore.Settings\n\n"
        "```py\n"
        "Settings(count: int, limit: float | None = None, names: tuple[str, ...] = ...)\n"
        "```\n\n"
        "Some settings, as [`eecore.load`](#eecoreload) has them.\n\n"
        "Fields:\n\n"
        "- `count`: How many, at least 1.\n\n"
        "#### Settings.total\n\n"
        "```py\ntotal: int\n```\n\n"
        "All of them.\n\n"
        "#### Settings.held\n\n"
        "```py\n"
        'held(word: str = "a", *, lines: bool = False) -> Iterator[None]\n'
        "```\n\n"
        "Hold them; see `total`.\n\n"
        "Arguments:\n\n"
        "- `word`: what is said, at length: twice.\n"
        "- `lines`: whether `word` has some.\n\n"
        "Errors:\n\n"
        "- `ValueError`: for another.\n\n"
        "#### Settings.of\n\n"
        "```py\n"
        "async Settings.of(*words: str, **others: int) -> Settings\n"
        "```\n\n"
        "Made of words.\n\nSome are:\n\n"
        '    Settings.of("a")'
    )


def test_a_named_tuple_is_shown_with_the_types_of_its_fields(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert shown(monkeypatch, Pair) == (
        "### eecore.Pair\n\n"
        "```py\nclass Pair(NamedTuple)\n```\n\n"
        "Two numbers.\n\n"
        "Fields:\n\n"
        "- `first: int`: The `Settings` come from it.\n"
        "- `second: float = 1.5`"
    )


def test_a_long_call_has_a_parameter_on_each_line() -> None:
    text = api_pages.call("load", eecore.load)
    assert text.splitlines()[:3] == ["load(", "    path: str | Path | None = None,", "    *,"]
    assert max(map(len, text.splitlines())) <= api_pages.WIDTH


@pytest.mark.parametrize("name", ["eecore.nothing", "eecore.ops.nothing", "eecore.ops"])
def test_a_name_that_is_not_exported_is_an_error(name: str) -> None:
    if name == "eecore.ops":  # a module, which has pages of its own
        assert name not in dict(NAMED)
        return
    with pytest.raises(ValueError, match=f"{name}: expected a name that eecore exports"):
        api_pages.exported(name)
