"""Replayed rounds of ``Auto``: the recording, and the figures of a batch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import eecore
from bench.exits import late as bench_late
from bench.exits import replay as bench_replay
from bench.harness.replay import Answer, RoundTimes, new_planner, play
from eecore.planning.proposal import MAX_AHEAD, NOTHING, Proposal
from head_packs import write_pack
from tiny_models import random_prompts, write_model

REQUESTS = (1, 2, 4, 8)
AGREEMENT = (0.7, 0.7, 0.7)


def times(row: float, *, step: float = 0.05) -> RoundTimes:
    """Times of rounds in which each further draft costs ``step`` of a round."""
    return RoundTimes(
        dict.fromkeys(REQUESTS, 1.0),
        {n: {0: 1.0, 32: 1.0 + 32 * row} for n in REQUESTS},
        dict.fromkeys(REQUESTS, step),
        dict.fromkeys(REQUESTS, 0.02),
    )


def answers(count: int, *, right: float, sure: bool = True, length: int = 96) -> list[Answer]:
    """Answers of random tokens; a share ``right`` of the drafts is right, likelier if ``sure``."""
    chance, found = random.Random(4), []
    for _ in range(count):
        tokens = [chance.randrange(1, 1 << 20) for _ in range(length)]
        drafts = []
        for at in range(1, length):
            drafted, probabilities = [], []
            for token in tokens[at : at + MAX_AHEAD]:
                is_right = chance.random() < right
                drafted.append(token if is_right else 0)
                probabilities.append(0.95 if is_right or not sure else 0.15)
            drafts.append(Proposal(drafted, "head", probabilities))
        found.append(Answer([7, 8, 9], tokens, drafts))
    return found


def speedup(
    its: list[Answer], costs: RoundTimes, batch: int, *, turns: int = 3, noise: float = 0.03
) -> float:
    """The speed-up over full depth of one planner that keeps learning."""
    planner, chance, full, auto = new_planner(24, AGREEMENT), random.Random(1), 0.0, 0.0
    for _ in range(turns):
        for i in range(0, len(its), batch):
            played = play(
                *(planner, its[i : i + batch], costs),
                max_tokens=80,
                noise=noise,
                chance=chance,
            )
            full, auto = full + played.full, auto + played.auto
    return full / auto


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_drafts_that_stand_are_worth_their_rows(batch: int) -> None:
    assert speedup(answers(16, right=0.9), times(0.01), batch) > 1.4


@pytest.mark.parametrize("batch", [4, 8])
def test_the_last_of_a_batch_gains_though_drafts_stand_for_half_of_it(batch: int) -> None:
    """Rows go to the requests that they have not helped yet."""
    some, others = answers(16, right=0.9), answers(16, right=0.3)
    mixed = [answer for pair in zip(some, others, strict=True) for answer in pair]
    assert speedup(mixed, times(0.35 / batch), batch) > 1.0


@pytest.mark.parametrize("batch", [1, 4, 8])
@pytest.mark.parametrize("row", [0.02, 0.1])
@pytest.mark.parametrize("sure", [True, False])
def test_drafts_that_never_stand_cost_little(batch: int, row: float, sure: bool) -> None:
    assert speedup(answers(16, right=0.0, sure=sure), times(row), batch) > 0.97


@pytest.mark.parametrize("right", [0.3, 0.6, 0.9])
def test_rows_that_cost_more_than_drafts_bring_are_left_alone(right: float) -> None:
    assert speedup(answers(16, right=right), times(0.15), 8) > 0.97


def test_full_depth_takes_as_long_as_the_longest_answer() -> None:
    its = answers(2, right=0.0)
    short = Answer(its[0].prompt, its[0].tokens[:11], its[0].drafts[:10])
    costs = RoundTimes({1: 1.0, 2: 3.0}, {1: {0: 1.0}}, {1: 0.0}, {1: 0.0})
    played = play(new_planner(24, AGREEMENT), [its[1], short], costs, max_tokens=31)
    assert played.full == pytest.approx(10 * 3.0 + 20 * 1.0)


def test_between_measured_rounds_is_a_straight_line_and_beyond_one_as_steep() -> None:
    costs = RoundTimes(
        {1: 1.0, 4: 4.0},
        {1: {0: 1.0, 4: 3.0, 8: 2.0, 12: 8.0}},
        {1: 0.1},
        {1: 0.2},
    )
    assert costs.full(2) == pytest.approx(2.0)
    assert costs.full(6) == pytest.approx(6.0)
    assert costs.given(1, 2) == pytest.approx(2.0)
    assert costs.given(3, 8) == pytest.approx(3.0)  # no faster than with fewer
    assert costs.given(1, 16) == pytest.approx(8.0 + 4 * 5.0 / 8)
    assert (costs.step(9), costs.choosing(9)) == (0.1, 0.2)


def test_an_answer_says_what_is_drafted_and_what_stands() -> None:
    drafts = [Proposal([4, 5, 6], "head", [0.9, 0.5, 0.9]), NOTHING]
    answer = Answer([1, 2], [3, 4, 5, 7], drafts)
    assert answer.after(1, 8, [0.4] * 8).tokens == [4, 5, 6]
    assert answer.after(1, 8, [0.4, 0.6, 0.4]).tokens == [4, 5]
    assert answer.after(1, 1, [0.4] * 8).tokens == [4]
    assert answer.after(2, 8, [0.4] * 8).tokens == answer.after(9, 8, [0.4] * 8).tokens == []
    assert answer.num_accepted(1, [4, 5, 6]) == 2
    assert answer.num_accepted(3, [7, 7]) == 1


@pytest.fixture
def model(tmp_path: Path) -> eecore.Model:
    directory = write_model(tmp_path)
    write_pack(directory / "exits", eecore.load(directory, device="cpu"))
    return eecore.load(directory, device="cpu", kv_cache_tokens=4096)


def test_what_a_head_drafts_is_recorded_after_every_token(model: eecore.Model) -> None:
    prompts = random_prompts(6, 5, 9)
    recorded = bench_replay.answers_of(model, prompts, 20)
    expected = eecore.generate(model, prompts, exit=eecore.Full(), max_tokens=20, ignore_eos=True)
    assert [answer.tokens for answer in recorded] == [output.token_ids for output in expected]
    for answer, prompt in zip(recorded, prompts, strict=True):
        assert list(answer.prompt) == prompt
        assert answer.drafts[0] == NOTHING  # no head drafts right after the prompt
        rounds = [each for each in answer.drafts[1:] if each.tokens]
        assert len(rounds) >= 16
        assert all(0.0 <= p <= 1.0 for each in rounds for p in each.scores)
        assert max(len(each.tokens) for each in rounds) == MAX_AHEAD


def test_rounds_of_all_sorts_are_timed_and_played(model: eecore.Model) -> None:
    costs = bench_replay.times_of(model, random_prompts(6, 5))
    for requests in (1, 3, 8):
        assert costs.full(requests) > 0.0
        assert costs.choosing(requests) > 0.0
        assert costs.given(requests, 32) >= costs.given(requests, 0) > 0.0
    best, what = bench_replay.best_same(answers(8, right=0.9), times(0.01), 4, 40, 24)
    assert best > 1.5
    assert " @ " in what


def test_drafts_of_a_round_in_flight_go_on_after_what_it_verifies() -> None:
    repeated = [5, 6, 7, 8, 9, 10, 11, 12] * 6
    answer = Answer([1, 2, 3, *repeated[:8]], repeated, ())
    known, late = (bench_late.replayed(answer, 4, late=late) for late in (False, True))
    assert known.accepted == late.accepted == known.drafted == late.drafted  # all drafts are right
    assert known.rounds + known.accepted == late.rounds + late.accepted == len(repeated) - 1
    # Where the repetition begins again at another place, the round in flight was guessed wrongly.
    broken = Answer(answer.prompt, [*repeated[:20], *repeated[:20]], ())
    known, late = (bench_late.replayed(broken, 4, late=late) for late in (False, True))
    assert late.accepted < known.accepted
    assert late.rounds > known.rounds


def test_answers_that_are_replayed_are_those_of_full_depth(model: eecore.Model) -> None:
    prompts = random_prompts(6, 5)
    answers = bench_late.answers_of(model, prompts, 12)
    expected = eecore.generate(model, prompts, exit="full", max_tokens=12)
    assert [list(each.tokens) for each in answers] == [each.token_ids for each in expected]
    rows = bench_late.rows_of("chat", answers, model.config.num_layers)
    assert [row["late"] for row in rows] == [False, True]
    assert all(row["tokens_per_round"] >= 1.0 for row in rows)
