"""Rules of fields: values they keep, values they refuse, and their help."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pytest

from eecore import SamplingParams
from eecore.exit_text import MODES
from eecore.values import FLAG, check_fields, choice, help_of, real, reals, rules_of, whole


@dataclass(frozen=True)
class Settings:
    """Some settings.

    Args:
        count: how many, of ``things``. More on a second
            line.
        share: how much;
            the rest is lost.
        kind: one of two.
    """

    count: Annotated[int, whole(1, 9)] = 1
    share: Annotated[float | None, real(0.0, 1.0)] = None
    kind: Annotated[str, choice("a", "b")] = "a"
    grid: Annotated[tuple[float, ...], reals(0.0, 1.0, most=2)] = ()
    quick: Annotated[bool, FLAG] = True
    free: Any = None

    def __post_init__(self) -> None:
        check_fields(self, ValueError, "settings.")


def test_plain_values_are_kept() -> None:
    made = Settings(np.int8(3), np.float32(0.5), grid=[0, 1], quick=np.bool_(False))  # type: ignore
    assert made == Settings(3, 0.5, grid=(0.0, 1.0), quick=False)
    assert [type(each) for each in (made.count, made.share, made.quick)] == [int, float, bool]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 0}, "settings.count: expected a whole number, 1..9, got 0"),
        ({"count": None}, "settings.count: expected a whole number, 1..9, got None"),
        ({"share": 2}, "settings.share: expected None or 0..1, got 2"),
        ({"kind": "c"}, "settings.kind: expected a or b, got 'c'"),
        ({"grid": [0, 0, 0]}, "settings.grid: expected at most 2 numbers, 0..1, got [0, 0, 0]"),
        ({"quick": 1}, "settings.quick: expected True or False, got 1"),
    ],
)
def test_others_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Settings(**settings)


def test_help_is_the_first_sentence_and_the_range() -> None:
    assert help_of(Settings, "count") == "How many, of things (a whole number, 1..9)"
    assert help_of(Settings, "share") == "How much; the rest is lost (0..1)"
    assert help_of(Settings, "kind") == "One of two (a or b)"


@pytest.mark.parametrize("kind", [SamplingParams, *(mode.policy for mode in MODES.values())])
def test_every_setting_is_described(kind: type) -> None:
    assert all(help_of(kind, name)[:1].isalpha() for name in rules_of(kind))
