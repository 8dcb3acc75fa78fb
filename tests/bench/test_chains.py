"""Questions about chains of sums: answers, splits, and what their thoughts say."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from bench.quality.chains import (
    CHECKS,
    LENGTHS,
    NUMBERS,
    OPENINGS,
    SPLITS,
    Chain,
    Step,
    chains,
    stands_after,
    with_slip,
)

COUNT = 400


@pytest.fixture(scope="module")
def asked() -> list[Chain]:
    return list(islice(chains(0, "train"), COUNT))


def worked_out(question: str) -> int:
    """The answer to a question as a reader works it out."""
    first, *steps, last = question.splitlines()
    value = int(first.removeprefix("Start with ").removesuffix("."))
    for step in steps:
        name, verb, *number = step.split()
        assert name in ("a:", "b:", "c:", "d:", "e:")
        change = int(number[0]) if number else value
        value += -change if verb == "subtract" else change
    assert last == "What is the result?"
    return value


def test_answers_are_right_and_all_numbers_have_two_digits(asked: list[Chain]) -> None:
    for chain in asked:
        assert chain.answer == worked_out(chain.question)
        assert len(chain.steps) in LENGTHS
        assert all(result in NUMBERS for results in chain.attempts() for result in results)


def test_a_question_is_in_one_split_and_comes_once() -> None:
    made = {split: list(islice(chains(0, split), COUNT)) for split in (*SPLITS, "train")}
    questions = [chain.question for each in made.values() for chain in each]
    assert len(set(questions)) == len(questions) == COUNT * len(made)
    other = [chain.split for chain in islice(chains(1, "test"), COUNT)]
    assert other == ["test"] * COUNT


def test_a_seed_makes_the_same_questions(asked: list[Chain]) -> None:
    assert list(islice(chains(0, "train"), COUNT)) == asked
    assert list(islice(chains(1, "train"), COUNT)) != asked


def test_an_eight_that_carries_is_corrected_by_the_first_check() -> None:
    chain = Chain(21, (Step("+", 4), Step("+", 8), Step("*", 2)))
    assert chain.attempts() == [[25, 23, 46], [25, 33, 66], [25, 33, 66], [25, 33, 66]]
    first, check, again, last = chain.paragraphs(chain.attempts())
    assert first == "I start with 21.\na:21+4=25\nb:25+8=23\nc:23*2=46\nSo I get 46.\n\n"
    assert check == (
        "Wait, let me check. I start with 21.\na:21+4=25\nb:25+8=33, not 23.\nc:33*2=66\n"
        "So it is 66, not 46.\n\n"
    )
    assert again.endswith("Yes, 66.\n\n")
    assert last.startswith(OPENINGS[3].format(21))


def test_a_nine_that_borrows_is_corrected_by_the_second_check_however_few_are_due() -> None:
    chain = Chain(30, (Step("+", 3), Step("-", 9)))
    assert CHECKS[0] == 1
    assert chain.attempts() == [[33, 34], [33, 34], [33, 24]]
    assert chain.paragraphs(chain.attempts())[2].endswith(
        "b:33-9=24, not 34.\nSo it is 24, not 34.\n\n"
    )


def test_the_last_attempt_is_right_and_few_answers_change(asked: list[Chain]) -> None:
    changed = 0
    for chain in asked:
        attempts = chain.attempts()
        assert attempts[-1][-1] == chain.answer
        assert len(attempts) > CHECKS[chain.start % 10] or len(attempts) == len(OPENINGS)
        changed += attempts[0][-1] != chain.answer
    assert 0.05 < changed / COUNT < 0.15


def test_a_slip_at_a_random_place_is_corrected(asked: list[Chain]) -> None:
    rng, slips = random.Random(0), 0
    for chain in asked:
        attempts = with_slip(chain, rng)
        assert attempts[-1] == chain.attempts()[-1]
        slips += attempts[0] != chain.attempts()[0]
        text = "".join(chain.paragraphs(attempts))
        assert attempts[0] == attempts[-1] or ", not " in text
    assert slips > 0.8 * COUNT


def test_the_answer_stands_after_the_last_paragraph_that_changed_it() -> None:
    chain = Chain(21, (Step("+", 4), Step("+", 8)))
    paragraphs = chain.paragraphs(chain.attempts())
    thought = "".join(paragraphs).rstrip("\n")
    assert stands_after(thought, 33) == "".join(paragraphs[:2])
    assert stands_after(paragraphs[0], 23) == paragraphs[0]
    assert stands_after(thought, 23) is None
    assert stands_after("", 33) is None
