"""The rule that ends a thought once its answer stands.

A *probe* closes a thought on the side, asks for the answer in a few tokens, and leaves nothing in
the sequence. The rule reads a thought's probes, and nothing else. (Dynasor, Fu et al. 2024; DEER,
Yang et al. 2025; Conformal Thinking, arXiv 2602.03814.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import takewhile
from typing import Annotated, Literal, NamedTuple

from eecore.errors import ExitError
from eecore.values import Rule, as_real, check_fields, real, whole

Verdict = Literal["confident", "hopeless"]

MAX_AGREEING = 64
MAX_PROBE_TOKENS = 256
"""Tokens of a probed answer at most."""
MAX_STEM = 256
"""Characters of a stem at most."""


class Probe(NamedTuple):
    """A probe of a thought."""

    num_tokens: int
    """Tokens of the thought before the probe."""
    answer: str
    """The answer as :func:`normalised` writes it; empty where there is none."""
    confidence: float
    """Geometric mean of the probabilities of the answer's tokens."""


def _threshold(value: object) -> float | None:
    return math.inf if value == math.inf else as_real(value, 0.0, 1.0)


THRESHOLD = Rule(_threshold, "0..1, or infinity", float)
STEM = Rule(
    lambda value: str(value) if isinstance(value, str) and 0 < len(value) <= MAX_STEM else None,
    f"a text of 1 to {MAX_STEM} characters",
)


@dataclass(frozen=True)
class ThoughtStop:
    """End a thought as soon as its answer stands.

    One probe is enough where it is confident. The more probes in a row give the same answer, the
    less confident the last one has to be: n of them may leave n times the doubt of one.

    Args:
        threshold: the least confidence of a single probe: after n probes with the same answer the
            last one needs 1 - n (1 - threshold). Infinity: thoughts are probed, and end by
            themselves.
        agreeing: the fewest last probes that have to give the same answer.
        every: fewest tokens between two probes; a probe waits for the end of a paragraph, for as
            many tokens again at most.
        stem: the beginning of the answer that a probe asks for.
        max_answer: most tokens of a probed answer.
        hopeless: the share of a thought's budget after which it also ends where no probe gave an
            answer; None: it goes on, as many a thought finds its answer late.
        contract: the promise of outputs whose thoughts end by this rule.
    """

    threshold: Annotated[float, THRESHOLD]
    agreeing: Annotated[int, whole(1, MAX_AGREEING)] = 1
    every: Annotated[int, whole(1)] = 64
    stem: Annotated[str, STEM] = "The answer is"
    max_answer: Annotated[int, whole(1, MAX_PROBE_TOKENS)] = 16
    hopeless: Annotated[float | None, real(0.0, 1.0)] = None
    contract: str = "uncalibrated"

    def __post_init__(self) -> None:
        check_fields(self, ExitError, "ThoughtStop.")

    @property
    def records(self) -> bool:
        """Whether no thought ends by the rule, so that all of its probes are seen."""
        return self.threshold == math.inf

    def verdict(self, probes: Sequence[Probe], budget: int | None) -> Verdict | None:
        """Why a thought ends after these probes; None where it goes on.

        Args:
            probes: all probes of the thought so far.
            budget: tokens of the thought at most; None: no limit.
        """
        if self.records or not probes:
            return None
        last = probes[-1]
        run = sum(1 for _ in takewhile(lambda p: p.answer == last.answer, reversed(probes)))
        is_sure = 1.0 - last.confidence <= run * (1.0 - self.threshold)
        if last.answer and run >= self.agreeing and is_sure:
            return "confident"
        if self.hopeless is None or budget is None or any(probe.answer for probe in probes):
            return None
        return "hopeless" if probes[-1].num_tokens >= self.hopeless * budget else None


# Answers

# The end of the first sentence of an answer, but not of "St." or "e.g.".
SENTENCE_END = re.compile(r"(?:(?<=[\d)\]}*$%])|(?<=[^\W\d_]{3}))[.!?]\s")
_WRAPPED = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_UNIT = re.compile(r"(?<=\d)(?:\\[ ,;!]|\s|~)*\\(?:text|mathrm)\s*\{[^{}]*\}")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|[+-]?\.\d+", re.ASCII)


def normalised(text: str) -> str:
    """An answer in a form in which equal answers are equal texts; empty where there is none.

    It is the first sentence of the text, in lower case, without markdown, LaTeX around and within
    numbers, signs of currency and per cent, and points at its end. Equal numbers read the same:
    ``**1,250.00**.`` is ``1250``.
    """
    lines = text.strip().splitlines()
    kept = SENTENCE_END.split(lines[0], maxsplit=1)[0] if lines else ""
    kept = _UNIT.sub("", kept)
    for pattern, form in ((_WRAPPED, r"\1"), (_FRACTION, r"\1/\2"), (_WRAPPED, r"\1")):
        kept = pattern.sub(form, kept)
    kept = re.sub(r"\\[ ,;:!()\[\]]|\\left|\\right|\\boxed\s*\{|[$\u20ac\u00a3%*`]|__", "", kept)
    kept = " ".join(kept.replace("\\", "").split()).rstrip(" .,;:!?\"'\u201d").lower()
    kept = kept.lstrip("\"'\u201c :")
    if not NUMBER.fullmatch(kept):
        return kept if any(map(str.isalnum, kept)) else ""
    number = format(Decimal(kept.replace(",", "")), "f")
    number = number.rstrip("0").rstrip(".") if "." in number else number
    return "0" if number == "-0" else number.removeprefix("+")
