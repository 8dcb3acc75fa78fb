"""The rule that ends a thought, and answers that are equal though they are written differently."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from eecore.errors import ExitError
from eecore.thought_stop import Probe, ThoughtStop, normalised


def probes_of(*answers: tuple[str, float]) -> list[Probe]:
    """Probes of a thought, 64 tokens apart."""
    return [Probe(64 * i, *each) for i, each in enumerate(answers, 1)]


def test_a_thought_ends_at_a_confident_probe() -> None:
    stop = ThoughtStop(0.8)
    assert stop.verdict([], None) is None
    assert stop.verdict(probes_of(("18", 0.79)), None) is None
    assert stop.verdict(probes_of(("18", 0.8)), None) == "confident"
    assert stop.verdict(probes_of(("17", 0.1), ("18", 0.8)), None) == "confident"
    assert stop.verdict(probes_of(("18", 0.9), ("17", 0.79)), None) is None


def test_agreeing_probes_need_less_confidence() -> None:
    stop = ThoughtStop(0.75)
    assert stop.verdict(probes_of(("18", 0.1), ("18", 0.5)), None) == "confident"
    assert stop.verdict(probes_of(("18", 0.74), ("18", 0.49)), None) is None
    assert stop.verdict(probes_of(("18", 0.1), ("18", 0.1), ("18", 0.25)), None) == "confident"
    assert stop.verdict(probes_of(("18", 0.1), ("17", 0.1), ("18", 0.5)), None) is None
    assert stop.verdict(probes_of(("18", 0.1), ("", 0.0), ("18", 0.5)), None) is None


def test_as_many_probes_as_asked_for_have_to_agree() -> None:
    stop = ThoughtStop(0.5, agreeing=2)
    assert stop.verdict(probes_of(("18", 1.0)), None) is None
    assert stop.verdict(probes_of(("17", 1.0), ("18", 1.0)), None) is None
    assert stop.verdict(probes_of(("18", 1.0), ("18", 1.0)), None) == "confident"


def test_the_highest_threshold_takes_certainty() -> None:
    stop = ThoughtStop(1.0)
    assert stop.verdict(probes_of(("18", 1.0)), None) == "confident"
    assert stop.verdict(probes_of(("18", math.nextafter(1.0, 0.0))), None) is None


def test_empty_answers_do_not_agree() -> None:
    assert ThoughtStop(0.0, agreeing=1).verdict(probes_of(("", 1.0), ("", 1.0)), None) is None


def test_a_confidence_that_is_no_number_is_none() -> None:
    stop = ThoughtStop(0.0)
    assert stop.verdict(probes_of(("18", math.nan)), None) is None
    assert stop.verdict(probes_of(("18", 1.0), ("18", math.nan)), None) is None


def test_a_thought_without_an_answer_late_in_its_budget_is_hopeless() -> None:
    stop = ThoughtStop(0.9, hopeless=0.75)
    nothing = probes_of(("", 0.0), ("", 0.0), ("", 0.0))
    assert stop.verdict(nothing, 256) == "hopeless"
    assert stop.verdict(nothing, 257) is None
    assert stop.verdict(nothing, None) is None
    assert stop.verdict(probes_of(("3", 0.1), ("", 0.0), ("", 0.0)), 256) is None
    assert ThoughtStop(0.9).verdict(nothing, 256) is None


def test_no_thought_ends_while_probes_are_recorded() -> None:
    stop = ThoughtStop(math.inf, agreeing=1, hopeless=0.0)
    assert stop.records
    assert not ThoughtStop(1.0).records
    assert stop.verdict(probes_of(("18", 1.0)), None) is None
    assert stop.verdict(probes_of(("", 0.0)), 64) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"threshold": 1.5}, "threshold: expected 0..1, or infinity, got 1.5"),
        ({"threshold": math.nan}, "threshold: expected 0..1, or infinity, got nan"),
        ({"threshold": True}, "threshold: expected 0..1, or infinity, got True"),
        ({"agreeing": 0}, "agreeing: expected a whole number, 1..64, got 0"),
        ({"every": 0}, "every: expected a whole number, 1..2147483647, got 0"),
        ({"stem": ""}, "stem: expected a text of 1 to 256 characters, got ''"),
        ({"hopeless": 1.5}, "hopeless: expected None or 0..1, got 1.5"),
        ({"max_answer": 257}, "max_answer: expected a whole number, 1..256, got 257"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ExitError, match=re.escape(f"ThoughtStop.{message}")):
        ThoughtStop(**{"threshold": 0.9, **wrong})


@pytest.mark.parametrize(
    ("texts", "answer"),
    [
        (["18", " 18.", "**18**", r"\boxed{18}", r"$\boxed{18}$.", "18.00", "+18", "18%"], "18"),
        ([" 18. She makes 18 dollars", "18.\nSo", "$18", r"\$18", r"18\%", "018"], "18"),
        (["1,250", "1250.0", r"\$1,\!250", r"1,250 \text{ cups}", r"1250\ \text{g}."], "1250"),
        (["-7.50", r"\boxed{-7.5}", "-7.5."], "-7.5"),
        (["0", "-0.0", "0.", "00"], "0"),
        ([".5", "0.50"], "0.5"),
        ([r"\dfrac{15}{8}", r"\boxed{\frac{15}{8}}", "15/8"], "15/8"),
        (["Paris", "**Paris**.", r"\text{Paris}", r"\boxed{\text{Paris}}", '"paris"'], "paris"),
        (["St. Paul", "st. paul."], "st. paul"),
        (["1,2,3"], "1,2,3"),
        (["20 cups"], "20 cups"),
        (["", " \n ", "**", r"\boxed{", "-.", "..."], ""),
    ],
)
def test_equal_answers_are_equal_texts(texts: list[str], answer: str) -> None:
    assert [normalised(text) for text in texts] == [answer] * len(texts)
    assert normalised(answer) == answer
