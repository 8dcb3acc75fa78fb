"""scripts/new_user.py: what it takes from README; in the long suite the walk itself."""

from __future__ import annotations

import pytest

import new_user


def test_the_first_screen_is_what_is_run() -> None:
    """README shows these commands first, in this order."""
    found = new_user.first_screen((new_user.ROOT / "README.md").read_text())
    heads = [words[:2] for words in found]
    expected = [["make", "demo"], ["make", "test"], ["pip", "install"], ["pip", "install"]]
    assert heads == [*expected, ["eecore", "generate"], ["python", "-c"]]
    assert found[3] == ["pip", "install", "."]
    assert {"--depth", "--stats", "lock the front door"} <= set(found[4])


def test_an_index_that_is_not_reached_is_left_out() -> None:
    assert new_user.is_reached(["pip", "install", "."])
    assert not new_user.is_reached(["pip", "install", "torch", "--index-url", "http://[::]:9/"])


@pytest.mark.long
def test_the_walk_with_what_is_installed_and_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert new_user.main(["--built"]) == 0, capsys.readouterr()
