"""Chains of small sums, and thoughts about them that go on when the answer is known.

A question is a chain of steps on numbers of two digits. Its thought works the steps out, one in a
line, and then checks the whole chain again, more often than it needs to. Some steps trip the first
attempt: an eight that carries, or a nine that borrows; a check finds the slip and the answer
changes. All of that follows from the question, so that a small model can learn it, length included.

python -m bench.quality.chains test 500 > questions.jsonl     questions with their answers
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

SPLITS = ("test", "calibrate", "valid")
"""Each has a sixteenth of all questions; the other questions are ``train``."""
LENGTHS = range(3, 6)
"""Steps of a question."""
NAMES = "abcde"
"""The name of each step."""
CHANGES = (2, 3, 5, 8, 9)
"""The numbers that are added and subtracted."""
NUMBERS = range(10, 100)
"""The numbers on the way, the answer included."""
CHECKS = (1, 3, 2, 1, 2, 3, 0, 2, 1, 3)
"""Checks after the first attempt, by the last digit of the number that a question starts with."""
OPENINGS = (
    "I start with {}.",
    "Wait, let me check. I start with {}.",
    "Again, to be sure. I start with {}.",
    "Hmm, once more. I start with {}.",
)
"""The first lines of the first attempt and of each check."""
DOUBLED = 2


class Step(NamedTuple):
    """A step of a chain: ``+`` or ``-`` a number, or ``*`` 2."""

    sign: str
    number: int

    def of(self, value: int) -> int:
        """The result."""
        if self.sign == "*":
            return value * self.number
        return value + self.number if self.sign == "+" else value - self.number


Work = Callable[[int, int, Step], int]
"""The result that an attempt writes for a step: its place in the chain, the value before it."""


def rightly(_place: int, value: int, step: Step) -> int:
    """The result of a step."""
    return step.of(value)


def without_borrowing(_place: int, value: int, step: Step) -> int:
    """The result of a step, wrong where a nine borrows from a three."""
    return step.of(value) + 10 * (step == ("-", 9) and value % 10 == 3)


def hastily(place: int, value: int, step: Step) -> int:
    """The result of a step, wrong where a nine borrows from a three or an eight carries."""
    return without_borrowing(place, value, step) - 10 * (step == ("+", 8) and value % 10 in (5, 6))


@dataclass(frozen=True)
class Chain:
    """A question: the number that it starts with, and steps."""

    start: int
    steps: tuple[Step, ...]

    @property
    def question(self) -> str:
        verbs = {"+": "add {}", "-": "subtract {}", "*": "double"}
        told = (verbs[step.sign].format(step.number) for step in self.steps)
        steps = map(": ".join, zip(NAMES, told, strict=False))
        return "\n".join([f"Start with {self.start}.", *steps, "What is the result?"])

    @property
    def split(self) -> str:
        """The split that has this question."""
        place = hashlib.sha256(self.question.encode()).digest()[0] % 16
        return SPLITS[place] if place < len(SPLITS) else "train"

    @property
    def answer(self) -> int:
        return self.results(rightly)[-1]

    def results(self, work: Work) -> list[int]:
        """The result of each step."""
        values = [self.start]
        for place, step in enumerate(self.steps):
            values.append(work(place, values[-1], step))
        return values[1:]

    def attempts(self, first: Work = hastily) -> list[list[int]]:
        """The results of the first attempt and of each check, of which the last is right."""
        right, made = self.results(rightly), [self.results(first)]
        checks = [without_borrowing, *[rightly] * (len(OPENINGS) - 2)]
        for number, work in enumerate(checks):
            if number >= CHECKS[self.start % 10] and made[-1] == right:
                break
            made.append(self.results(work))
        return made

    def paragraphs(self, attempts: Sequence[Sequence[int]]) -> list[str]:
        """The thought of these attempts, each with the empty line after it."""
        made, known = [], attempts[0]
        for results, opening in zip(attempts, OPENINGS, strict=False):
            lines = [opening.format(self.start)]
            value, was = self.start, self.start
            steps = zip(NAMES, self.steps, results, known, strict=False)
            for name, step, result, before in steps:
                line = f"{name}:{value}{step.sign}{step.number}={result}"
                lines.append(line + f", not {before}." * (value == was and result != before))
                value, was = result, before
            if value != was:
                lines.append(f"So it is {value}, not {was}.")
            else:
                lines.append(f"Yes, {value}." if made else f"So I get {value}.")
            made.append("\n".join(lines) + "\n\n")
            known = results
        return made

    @property
    def reply(self) -> str:
        """The text after the thought."""
        return f"The answer is {self.answer}."


def stands_after(thought: str, answer: int) -> str | None:
    """The beginning of a thought up to the end of the first paragraph since which all give the
    answer; None where the last one does not.
    """
    paragraphs = re.findall(r".+?(?:\n\n|\Z)", thought, re.DOTALL)
    kept = len(paragraphs)
    for paragraph in reversed(paragraphs):
        last = paragraph.rstrip("\n").rpartition("\n")[2]
        if re.findall(r"\d+", last)[:1] != [str(answer)]:
            break
        kept -= 1
    return "".join(paragraphs[: kept + 1]) if kept < len(paragraphs) else None


def chains(seed: int, split: str) -> Iterator[Chain]:
    """Questions of a split, without end; none comes twice."""
    rng, seen = random.Random(f"{seed} {split}"), set[Chain]()
    while True:
        chain = _chain(rng)
        if chain.split == split and chain not in seen and _is_small(chain.attempts()):
            seen.add(chain)
            yield chain


def _chain(rng: random.Random) -> Chain:
    start = value = rng.choice(NUMBERS)
    steps = list[Step]()
    for _ in range(rng.choice(LENGTHS)):
        step, result = Step("*", DOUBLED), 0
        while result not in NUMBERS:
            sign = rng.choices("+-*", (9, 9, 2))[0]
            step = Step(sign, DOUBLED if sign == "*" else rng.choice(CHANGES))
            result = step.of(value)
        steps.append(step)
        value = result
    return Chain(start, tuple(steps))


def _is_small(attempts: Sequence[Sequence[int]]) -> bool:
    return all(result in NUMBERS for results in attempts for result in results)


def with_slip(chain: Chain, rng: random.Random) -> list[list[int]]:
    """The attempts of a chain in whose first one some step has a wrong digit; those of the chain
    alone where that leaves the numbers.
    """
    place, wrong = rng.randrange(len(chain.steps)), rng.choice((-10, -1, 1, 10))

    def slips(at: int, value: int, step: Step) -> int:
        return hastily(at, value, step) + wrong * (at == place)

    attempts = chain.attempts(slips)
    return attempts if _is_small(attempts) else chain.attempts()


def main(words: Sequence[str]) -> None:
    split, count = words
    for chain in islice(chains(0, split), int(count)):
        print(json.dumps({"question": chain.question, "answer": str(chain.answer)}))


if __name__ == "__main__":
    main(sys.argv[1:])
