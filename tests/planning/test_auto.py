"""Auto: the tokens of full depth, by whatever is fastest."""

from __future__ import annotations

import itertools
import json
import math
import operator
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eecore.planning.budget import IDLE_ALONE, Budget
from eecore.planning.chooser import FULL, MEASURE_AGAIN, Choice, Chooser
from eecore.planning.history import TRY_HEAD, FirstDrafts, HeadRounds, History, Odds
from eecore.planning.pass_times import (
    COST_AMONG_ROWS,
    FIRST_STEPS,
    ROW_COST,
    Pace,
    PassTimes,
    StepCost,
)
from eecore.planning.round_costs import HEAD_COST, RoundCosts

import eecore
from devices import load
from eecore import Auto, Full, SamplingParams
from eecore.planning.planner import MOST_COUNTED
from eecore.planning.proposal import NOTHING, Proposal
from tiny_models import random_prompts, write_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[7, 8, 9] * 5, *random_prompts(1, 23, 9, 31, seed=4), [3, 4, 5, 6, 3, 4]]
POLICIES = [
    Auto(),
    Auto(3, exit_layers=(1, 2)),
    Auto(5, exit_layers=(3,), lookup=False),
    Auto(lookup=False),
]


def tokens_of(model: eecore.Model, exit: Any, **settings: Any) -> list[list[int]]:
    settings = {"max_tokens": 40, "ignore_eos": True, **settings}
    return [o.token_ids for o in eecore.generate(model, PROMPTS, exit=exit, **settings)]


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_output_is_that_of_full(agreeing: eecore.Model, policy: Auto) -> None:
    expected = tokens_of(agreeing, Full())
    for _ in range(3):  # which does not do the same each time
        assert tokens_of(agreeing, policy) == expected
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        (alone,) = eecore.generate(agreeing, prompt, exit=policy, max_tokens=40, ignore_eos=True)
        assert alone.token_ids == tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_sampled_output_is_that_of_full(agreeing: eecore.Model, policy: Auto) -> None:
    """Though layers may draft for greedy requests."""
    sampling = [
        SamplingParams(max_tokens=30, ignore_eos=True, seed=i, temperature=0.7, top_k=9)
        for i in range(len(PROMPTS))
    ]
    expected, got = (
        [o.token_ids for o in eecore.generate(agreeing, PROMPTS, exit=p, sampling=sampling)]
        for p in (Full(), policy)
    )
    assert got == expected


class Machine:
    """A chooser that runs requests whose drafts stand by chance, on times of its own."""

    def __init__(self, pass_time: Callable[[int], float], stands: float, step: float = 0.0) -> None:
        self.pass_time, self.stands, self.step = pass_time, stands, step
        self.hopeless, self.match = 0, 3  # requests whose drafts never stand; found tokens
        self.others_wait = False
        self.chooser = Chooser(12, None)
        self.random = random.Random(3)

    def run(
        self, rounds: int, rows: int = 1, *, proposes: bool = True, layers: tuple[int, ...] = ()
    ) -> tuple[float, float]:
        """Seconds and tokens."""
        seconds = tokens = 0.0
        histories = [self.chooser.history() for _ in range(rows)]
        self.got = [0] * rows
        for _ in range(rounds):
            proposals = [Proposal(list(range(8)), self.match)] if proposes else []
            choice = self.chooser.choose(
                histories,
                [proposals] * rows,
                [8] * rows,
                exit_layers=layers,
                others_wait=self.others_wait,
            )
            drafted, layer = sum(choice.drafts), choice.exit_layer
            steps = max(choice.drafts) if choice.kind == "draft" else 0
            spent = self.pass_time(rows + drafted) * self.random.uniform(0.98, 1.02)
            spent += steps * self.step
            drafts = choice.drafts or (0,) * rows
            accepted = [self.standing(count, i) for i, count in enumerate(drafts)]
            got = [(history, 1 + stood) for history, stood in zip(histories, accepted, strict=True)]
            self.chooser.learn_leads(rows, got, spent, drafted=drafted, steps=steps, layer=layer)
            if choice.kind == "full":
                self.chooser.costs.learn_full(rows, spent)
            elif choice.kind == "given":
                self.chooser.costs.learn_given(rows, drafted, 0, spent)
            else:
                self.chooser.costs.learn_drafted(layer, rows, steps, spent)
            for i, (history, count, stood) in enumerate(
                zip(histories, drafts, accepted, strict=True)
            ):
                self.got[i] += 1 + stood
                given = Proposal(list(range(count)), self.match)
                self.chooser.learn_drafts(layer, history, given, count, stood)
            seconds += spent
            tokens += rows + sum(accepted)
        return seconds, tokens

    def standing(self, count: int, request: int) -> int:
        accepted = 0
        while accepted < count and self.random.random() < self.stands * (request >= self.hopeless):
            accepted += 1
        return accepted


def cheap_rows(rows: int) -> float:
    """Weights come from memory."""
    return 1.0 + 0.03 * rows


def dear_rows(rows: int) -> float:
    """Multiplying is what takes time."""
    return float(rows)


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("stands", [0.0, 0.02, 0.5, 0.95])
@pytest.mark.parametrize("pass_time", [cheap_rows, dear_rows])
@pytest.mark.parametrize("layers", [(), (3,)])
def test_never_much_slower_than_full_depth(
    pass_time: Callable[[int], float], stands: float, rows: int, layers: tuple[int, ...]
) -> None:
    machine = Machine(pass_time, stands, step=0.3 * pass_time(rows))
    machine.run(40, rows, layers=layers)  # until it knows
    seconds, tokens = machine.run(300, rows, layers=layers)
    full = tokens / rows * pass_time(rows)
    assert seconds < 1.03 * full


@pytest.mark.parametrize("hopeless", [1, 3, 7])
def test_no_request_waits_long_for_what_others_gain(hopeless: int) -> None:
    machine = Machine(cheap_rows, 0.8)
    machine.match = 8
    machine.run(40, 8)  # until it knows
    assert min(machine.got) > 50
    machine.hopeless = hopeless
    seconds, _ = machine.run(300, 8)
    assert all(seconds < 1.02 * got * cheap_rows(8) for got in machine.got)


def test_where_others_wait_it_is_what_all_gain_that_counts() -> None:
    machine = Machine(cheap_rows, 0.8)
    machine.match, machine.others_wait = 8, True
    machine.run(40, 8)
    machine.hopeless = 1
    seconds, tokens = machine.run(300, 8)
    assert tokens / 8 * cheap_rows(8) > 1.4 * seconds


def test_the_engine_says_whether_others_wait(agreeing: eecore.Model) -> None:
    seen = set()
    engine = agreeing.engine(eecore.EngineConfig(kv_cache_tokens=512, max_num_seqs=2))
    for prompt in PROMPTS[:3]:
        engine.add_request(prompt, exit=Auto(), sampling=SamplingParams(max_tokens=6))
    while engine.has_unfinished:
        engine.step()
        seen.add((len(engine.scheduler.running), engine.iterations.planner.others_wait))
    assert (2, True) in seen
    assert (1, False) in seen


class HeadMachine:
    """A chooser whose requests have a draft head, sure of some drafts, which then stand."""

    def __init__(
        self, pass_time: Callable[[int], float], sure: float, step: float, believes: float = 0.9
    ) -> None:
        self.pass_time, self.sure, self.step, self.believes = pass_time, sure, step, believes
        self.chooser = Chooser(12, None, [0.5, 0.4, 0.3])
        self.random = random.Random(5)

    def drafted(self, choice: Choice) -> Proposal:
        """What it makes behind a round; each draft is one it is sure of, or the last one."""
        probabilities: list[float] = []
        while len(probabilities) < choice.ahead:
            is_sure = self.random.random() < self.sure
            probabilities.append(self.believes if is_sure else 0.1)
            if probabilities[-1] < choice.ahead_thresholds[len(probabilities) - 1]:
                break
        return Proposal(list(range(len(probabilities))), 0, probabilities)

    def run(self, rounds: int, rows: int = 1) -> tuple[float, float]:
        """Seconds and tokens."""
        seconds = tokens = 0.0
        histories = [self.chooser.history() for _ in range(rows)]
        ahead = [NOTHING] * rows
        for _ in range(rounds):
            proposals = [[each] if each.tokens else [] for each in ahead]
            choice = self.chooser.choose(histories, proposals, [8] * rows, can_draft_ahead=True)
            count = sum(choice.drafts)
            spent = self.pass_time(rows + count) * self.random.uniform(0.98, 1.02)
            tokens += rows
            had, ahead = ahead, [NOTHING] * rows
            if choice.kind == "full":
                self.chooser.costs.learn_full(rows, spent)
            else:
                if choice.ahead:
                    ahead = [self.drafted(choice) for _ in range(rows)]
                    for history, made in zip(histories, ahead, strict=True):
                        self.chooser.learn_first_draft(history, made.probabilities[0])
                steps = max(len(each.tokens) for each in ahead)
                spent += steps * self.step
                self.chooser.costs.learn_given(rows, count, steps, spent)
                for i, history in enumerate(histories):
                    accepted = 0
                    given = choice.given[i]
                    while accepted < len(given.tokens):
                        if given.probabilities[accepted] < 0.5 or self.random.random() > 0.9:
                            break
                        accepted += 1
                    tokens += accepted
                    drafts = len(given.tokens)
                    self.chooser.learn_drafts(0, history, given, drafts, accepted)
                    if choice.ahead and had[i].tokens:
                        ahead_steps = len(ahead[i].tokens)
                        self.chooser.learn_ahead(history, rows, drafts, accepted, ahead_steps)
            seconds += spent
        return seconds, tokens


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("sure", [0.0, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("pass_time", [cheap_rows, dear_rows])
def test_a_head_never_costs_much(pass_time: Callable[[int], float], sure: float, rows: int) -> None:
    machine = HeadMachine(pass_time, sure, step=0.08 * pass_time(rows))
    machine.run(100, rows)
    seconds, tokens = machine.run(400, rows)
    assert seconds < 1.02 * tokens / rows * pass_time(rows)


@pytest.mark.parametrize(("sure", "gain"), [(0.5, 1.3), (0.8, 1.8)])
def test_a_head_that_is_sure_and_right_is_used(sure: float, gain: float) -> None:
    machine = HeadMachine(cheap_rows, sure, step=0.08)
    machine.run(40)
    seconds, tokens = machine.run(400)
    assert tokens * cheap_rows(1) / seconds > gain


def test_a_head_that_believes_what_is_wrong_is_found_out() -> None:
    machine = HeadMachine(cheap_rows, 0.9, step=0.08, believes=0.45)  # which never stands
    machine.run(100)
    seconds, tokens = machine.run(400)
    assert seconds < 1.02 * tokens * cheap_rows(1)


@pytest.mark.parametrize(("row_cost", "tried"), [(0.03, TRY_HEAD), (0.9, 0)])
@pytest.mark.parametrize("rows", [3, 4])
def test_a_head_that_lost_is_tried_again_for_other_texts(
    rows: int, row_cost: float, tried: int
) -> None:
    """A step at a time, a few times; not for one new request among others, nor where rows are dear
    and no usual head could pay.
    """

    def pass_time(count: int) -> float:
        return 1.0 + row_cost * (count - 1)

    machine = HeadMachine(pass_time, 0.0, step=0.05)
    for requests in (1, 16):
        machine.run(30, requests)  # so that it is known what a row takes
    machine.run(400, rows)
    chooser, known = machine.chooser, machine.chooser.history()
    known.trials = 0
    for fresh, expected in ((rows, tried), (1, 0)):
        histories = [chooser.history() for _ in range(fresh)] + [known] * (rows - fresh)
        tries = 0
        for _ in range(8):
            choice = chooser.choose(histories, [[]] * rows, [8] * rows, can_draft_ahead=True)
            assert choice.ahead <= 1
            tries += choice.ahead
        assert tries == expected


@pytest.mark.parametrize("rows", [1, 8])
def test_few_drafts_show_what_more_rows_take(rows: int) -> None:
    chooser, proposal = Chooser(12, None), Proposal(list(range(64)), 8)
    for _ in range(2):
        chooser.costs.learn_full(rows, 1.0)
    chooser.costs.learn_full(32 * rows, 1.1)
    histories = [chooser.history() for _ in range(rows)]
    for history in histories:
        for _ in range(64):
            chooser.learn_drafts(0, history, proposal, 64, 64)

    def drafted() -> int:
        return sum(chooser.choose(histories, [[proposal]] * rows, [64] * rows).drafts)

    counts = [drafted()]
    for _ in range(3):
        chooser.costs.learn_given(rows, counts[-1], 0, 1.0 + 0.001 * counts[-1])
        counts.append(drafted())
    assert counts[0] == 4
    for before, after in itertools.pairwise(counts):
        assert after == 2 * before + rows


def test_of_several_requests_few_drafts_show_what_more_rows_take() -> None:
    chooser, proposal = Chooser(12, None), Proposal([1, 2, 3], 8)
    for _ in range(2):
        chooser.costs.learn_full(8, 1.0)
    histories = [chooser.history() for _ in range(8)]

    def drafted() -> int:
        return sum(chooser.choose(histories, [[proposal]] * 8, [8] * 8).drafts)

    assert drafted() == 4
    chooser.costs.learn_given(8, 4, 0, 1.1)
    assert drafted() == 16
    chooser.costs.learn_given(8, 16, 0, 1.3)
    assert drafted() == 24


@pytest.mark.parametrize(("first", "ahead"), [(0.95, 1), (0.15, 0)])
def test_one_step_of_a_head_is_tried_where_it_is_sure(first: float, ahead: int) -> None:
    """Whatever rounds of more steps came to, which were not worth it."""
    chooser = Chooser(12, None, (0.7, 0.7, 0.7))
    for _ in range(2):
        chooser.costs.learn_full(8, 1.0)
    chooser.costs.learn_given(8, 4, 0, 1.2)
    histories = [chooser.history() for _ in range(8)]
    for history in histories:
        history.trials = 0
        for _ in range(30):
            chooser.learn_ahead(history, 8, 8, 1, 8)
            chooser.learn_first_draft(history, first)
    choice = chooser.choose(histories, [[]] * 8, [8] * 8, can_draft_ahead=True)
    assert choice.ahead == ahead


def test_a_head_drafts_for_those_that_are_behind_or_not_at_all() -> None:
    """Unless others wait for these to end."""
    chooser = Chooser(12, None, (0.7, 0.7, 0.7))
    for _ in range(2):
        chooser.costs.learn_full(8, 1.0)
    chooser.costs.learn_given(8, 4, 0, 1.1)
    histories = [chooser.history() for _ in range(8)]
    for history in histories:
        for _ in range(60):
            chooser.learn_ahead(history, 8, 1, 0, 1)
            chooser.learn_first_draft(history, 0.95)

    def ahead(*, others_wait: bool = False) -> int:
        none: list[list[Proposal]] = [[]] * 8
        more = {"can_draft_ahead": True, "others_wait": others_wait}
        return chooser.choose(histories, none, [8] * 8, **more).ahead

    assert ahead() == 1
    late = histories[0]
    late.lead, late.trials = -8.0, 0
    for history in histories[1:]:
        history.lead, history.trials = 4.0, 0
    for _ in range(300):
        late.add_first_draft(0.05)
    assert ahead() == 0
    assert ahead(others_wait=True) == 1
    for _ in range(300):
        late.add_first_draft(0.95)
    assert ahead() == 1


def test_rows_go_to_those_that_are_behind() -> None:
    """As long as their drafts are nearly as likely."""
    chooser = Chooser(12, None)
    for rows in (8, 32):
        for _ in range(2):
            chooser.costs.learn_full(rows, rows / 8)  # a row more is dear
    for drafted in (4, 8):
        chooser.costs.learn_given(8, drafted, 0, 1.0 + 0.11 * drafted)
    histories = [chooser.history() for _ in range(8)]
    proposals = [[Proposal([1], 0, [0.95])] for _ in range(8)]

    def drafts() -> tuple[int, ...]:
        return chooser.choose(histories, proposals, [8] * 8).drafts

    assert drafts() == ()  # it hardly pays
    for history in histories[2:]:
        history.lead = 6.0
    assert drafts() == (1, 1, 0, 0, 0, 0, 0, 0)
    proposals[0] = [Proposal([1], 0, [0.05])]
    assert drafts() == (0, 1, 0, 0, 0, 0, 0, 0)


def test_how_sure_a_head_was_of_late_counts_more() -> None:
    drafts = FirstDrafts([0.1] * 10)
    assert drafts.shares == pytest.approx([0.1] * 10)
    for _ in range(2000):  # counts are made smaller once in a while
        drafts.add(0.31)
    for _ in range(23):
        drafts.add(1.0)
    shares = drafts.shares
    assert sum(shares) == pytest.approx(1.0)
    assert shares[9] == pytest.approx(1.0 - 0.97**23)
    assert shares[3] == pytest.approx(0.97**23)


def test_of_a_head_s_first_draft_what_is_worth_its_row() -> None:
    chooser = Chooser(12, None)
    history = chooser.history()
    assert history.first_draft(0.0) == pytest.approx((0.5, 1.0))
    gain, tried = history.first_draft(0.6)  # what is nearer to certain than that
    assert (gain, tried) == pytest.approx((0.1 * (0.65 + 0.75 + 0.85 + 0.95), 0.4))
    for _ in range(300):
        chooser.learn_first_draft(history, 0.97)
    assert history.first_draft(0.6) == pytest.approx((0.95, 1.0), abs=0.01)
    assert chooser.history().first_draft(0.6) == pytest.approx((0.95, 1.0), abs=0.01)


@pytest.mark.parametrize(("stands", "gain"), [(0.5, 1.4), (0.95, 3.0)])
def test_drafts_that_stand_are_made(stands: float, gain: float) -> None:
    machine = Machine(cheap_rows, stands)
    machine.run(40)
    seconds, tokens = machine.run(300)
    assert tokens * cheap_rows(1) / seconds > gain


def test_layers_draft_where_they_are_cheap_and_right() -> None:
    machine = Machine(cheap_rows, 0.9, step=0.2)
    machine.run(60, proposes=False, layers=(2,))
    seconds, tokens = machine.run(300, proposes=False, layers=(2,))
    assert tokens * cheap_rows(1) / seconds > 1.5
    machine.chooser.costs.learn_full(1, cheap_rows(1))
    choice = machine.chooser.choose([machine.chooser.history()], [[]], [8], exit_layers=(2, 11))
    assert (choice.kind, choice.exit_layer) == ("draft", 2)


def test_more_rows_have_fewer_drafts() -> None:
    """A row more costs little of a pass of one, and much of a pass of many."""

    def pass_time(rows: int) -> float:
        return max(1.0, rows / 8)

    drafts = []
    for rows in (1, 4, 16):
        machine = Machine(pass_time, 0.7)
        machine.run(80, rows)
        machine.chooser.costs.learn_full(rows, pass_time(rows))
        proposal = Proposal(list(range(8)), 3)
        choice = machine.chooser.choose(
            [machine.chooser.history()] * rows, [[proposal]] * rows, [8] * rows
        )
        drafts.append(sum(choice.drafts) / rows)
    assert drafts[0] > drafts[1] > drafts[2]


def test_verifying_for_several_says_nothing_of_one() -> None:
    """Five rows of four requests read the keys of four texts."""
    chooser, proposal = Chooser(12, None), Proposal(list(range(4)), 8)
    for rows, seconds in ((1, 1.0), (4, 1.3)):
        for _ in range(2):
            chooser.costs.learn_full(rows, seconds)
    for _ in range(7):
        chooser.costs.learn_given(4, 1, 0, 9.0)
    choice = chooser.choose([chooser.history()], [[proposal]], [8])
    assert choice.drafts == (4,)
    choice = chooser.choose([chooser.history() for _ in range(4)], [[proposal]] * 4, [8] * 4)
    assert choice == FULL


def test_full_depth_is_measured_first_and_now_and_then() -> None:
    machine = Machine(cheap_rows, 0.99)
    history, proposal = machine.chooser.history(), Proposal([1, 2, 3], 8)

    def kind() -> str:
        return machine.chooser.choose([history], [[proposal]], [8]).kind

    for _ in range(2):
        assert kind() == "full"
        machine.chooser.costs.learn_full(1, 1.0)
    rounds, most = MEASURE_AGAIN
    for _ in range(8):
        for _ in range(rounds):
            assert kind() == "given"
            machine.chooser.costs.learn_given(1, 3, 0, 1.1)
        assert kind() == "full"
        machine.chooser.costs.learn_full(1, 1.0)
        rounds = min(2 * rounds, most)
    assert rounds == most
    assert kind() == "given"
    # Of four rows nothing is known, of two what lies between.
    assert machine.chooser.choose([history] * 4, [[proposal]] * 4, [8] * 4) == FULL
    machine.chooser.costs.learn_full(4, 1.3)
    machine.chooser.costs.learn_full(4, 1.3)
    assert machine.chooser.choose([history] * 2, [[proposal]] * 2, [8] * 2).kind == "given"


@pytest.mark.parametrize("tried", [0.0, 1.0, 1.5, 2.0, 8.0])
def test_what_a_head_had_tried_may_be_a_whole_number_of_drafts(tried: float) -> None:
    chooser = Chooser(12, None, (0.9, 0.8, 0.7))
    for _ in range(2):
        chooser.costs.learn_full(1, 1.0)
    history = chooser.history()
    history.rounds[1] = HeadRounds(0.9 * tried, tried, 1.0)
    choice = chooser.choose([history], [[]], [8], can_draft_ahead=True)
    assert choice.ahead >= 1


def test_where_a_head_hardly_drafts_says_nothing_of_a_request_alone() -> None:
    """In a batch, where rows are dear, rounds of trials come to less than they would alone."""
    chooser = Chooser(12, None, (0.7, 0.7, 0.7))
    for rows in (1, 8):
        for _ in range(2):
            chooser.costs.learn_full(rows, 1.0)

    def choice(histories: list[History]) -> Choice:
        rows = len(histories)
        return chooser.choose(histories, [[]] * rows, [8] * rows, can_draft_ahead=True)

    batch = [chooser.history() for _ in range(8)]
    for _ in range(100):
        for history in batch:
            chooser.learn_ahead(history, 8, 0, 0, 1)
    assert choice([chooser.history() for _ in range(8)]).ahead <= 1
    assert choice([chooser.history()]).ahead > 1
    assert choice(batch[:1]).ahead > 1  # the last of the batch


def looked_at(budget: Budget, rounds: int, gained: float) -> int:
    """Rounds in which somebody looked, each of which gains so much."""
    looks = 0
    for _ in range(rounds):
        if budget.is_spent:
            budget.rested()
        else:
            looks += 1
            budget.looked(gained)
    return looks


def test_a_spent_budget_leaves_room_to_get_back_what_was_spent() -> None:
    """A head's drafts cost the round that makes them and are worth something in the next one."""
    budget = Budget(is_alone=True)
    for _ in range(3):
        budget.looked(-1.0)
    assert budget.is_spent
    while budget.is_spent:
        budget.rested()
    rested = 0
    for turn in range(200):
        if budget.is_spent:
            budget.rested()
            rested += 1
        else:
            budget.looked(-0.3 if turn % 2 == 0 else 0.6)
    assert rested == 0


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("lost", [0.0, 0.3, 3.0])
def test_how_long_a_budget_stays_spent_is_known(is_alone: bool, lost: float) -> None:
    """And it is the same whether it is told of each round, or of many at once."""
    each, at_once = Budget(is_alone=is_alone), Budget(is_alone=is_alone)
    for budget in (each, at_once):
        assert budget.rests == 0
        while not budget.is_spent:
            budget.looked(-lost, found=False)
    rests = at_once.rests
    assert rests > 0
    for left in range(rests, 1, -1):
        assert each.is_spent
        assert abs(each.rests - left) <= 1  # sums of many are rounded
        each.rested()
    for _ in range(2):
        each.rested()
    at_once.rested(rests + 1)
    assert not each.is_spent
    assert not at_once.is_spent
    assert each.rests == at_once.rests == 0


@pytest.mark.parametrize("lost", [0.005, 0.02, 0.1, 0.5, 3.0])
def test_what_choosing_costs_is_a_hundredth(lost: float) -> None:
    rounds = 5000
    looks = looked_at(Budget(is_alone=True), rounds, -lost)
    assert looks == rounds if lost < 0.01 else looks > 0
    assert looks * lost <= 0.01 * rounds + 2.0 + lost  # what it begins with, and a debt


def test_what_drafts_gain_may_be_spent_on_trying() -> None:
    budget = Budget(is_alone=True)
    assert looked_at(budget, 1000, 0.3) == 1000
    assert 40 <= looked_at(budget, 100, -0.1) < 60  # no more than four rounds of it
    while not budget.is_spent:
        budget.looked(-0.1)
    budget.looked(-0.5)
    budget.welcome(1.0)  # another request, another text
    assert not budget.is_spent
    assert looked_at(budget, 4, -0.05) == 4


@pytest.mark.parametrize("is_alone", [True, False])
def test_many_short_texts_that_gain_nothing_lose_little(is_alone: bool) -> None:
    """Each is another one; all of them together show that trying is not worth it."""
    budget, lost, rounds = Budget(is_alone=is_alone), 0.0, 0
    for _ in range(200):
        budget.welcome(1.0)
        for _ in range(10):
            rounds += 1
            if budget.is_spent:
                budget.rested()
            else:
                budget.looked(-0.3)
                lost += 0.3
    assert lost < 0.02 * rounds + 3.0


def test_texts_that_gain_pay_for_those_that_do_not() -> None:
    budget = Budget(is_alone=False)
    for _ in range(20):
        budget.looked(1.0)
    for _ in range(4):  # no debt of one is that of the next
        budget.welcome(1.0)
        assert not budget.is_spent
        while not budget.is_spent:
            budget.looked(-0.5)


def test_looks_that_find_nothing_become_rare() -> None:
    budget, looks = Budget(is_alone=True), []
    for number in range(400):
        if budget.is_spent:
            budget.rested()
        else:
            looks.append(number)
            budget.looked(0.0, found=number == 300)
    gaps = [later - one for one, later in itertools.pairwise(looks)]
    assert gaps[:8] == [1] * 8
    assert gaps[8:14] == [2, 3, 5, 9, 9, 9]
    assert gaps[-1] == 9
    budget.welcome(1.0)  # another text
    assert not budget.is_spent
    budget.looked(0.0, found=False)
    assert not budget.is_spent
    while not budget.is_spent:
        budget.looked(0.0, found=False)
    for _ in range(IDLE_ALONE[-1]):
        budget.rested()
    assert not budget.is_spent
    budget.looked(0.0, found=True)
    assert not budget.is_spent


def test_a_run_of_drafts_counts_as_one_by_one() -> None:
    run, single = Odds(0.3), Odds(0.3)
    for stood, refused in ((3, True), (0, True), (5, False), (0, False), (1, True)):
        run.add_run(stood, refused=refused)
        for each in [True] * stood + [False] * refused:
            single.add(each)
        assert run.share == pytest.approx(single.share)


def test_a_round_that_was_disturbed_loses_what_a_slow_one_does() -> None:
    """No more than half of what was to be expected, however many drafts it verifies."""
    chooser = Chooser(12, None)
    for _ in range(2):
        chooser.costs.learn_full(8, 1.0)
    assert chooser.gained(8, 8, 50.0) == -0.5
    for _ in range(2):
        chooser.costs.learn_given(8, 24, 0, 4.0)
    assert chooser.gained(8, 8, 5.0, drafted=24) == -4.0
    assert chooser.gained(8, 8, 50.0, drafted=24) == -5.0


def test_a_look_that_was_disturbed_counts_as_a_slow_one() -> None:
    chooser = Chooser(12, None)
    assert chooser.costs.learn_look(8, 0.25) == 0.25
    assert chooser.costs.learn_look(8, 0.25) == 0.25
    assert chooser.costs.learn_look(8, 50.0) == 0.5
    assert chooser.costs.learn_look(1, 50.0) == 50.0  # of one request nothing was known


@pytest.mark.parametrize("layer", [3, 9])
def test_what_a_layer_drafts_is_verified_by_those_above(layer: int) -> None:
    """Rows are as dear as passes of fewer have shown."""
    chooser, count = Chooser(12, None), 4
    for rows in (1, 8):
        for _ in range(2):
            chooser.costs.learn_full(rows, float(rows))
    above = 1 - layer / 12
    base, step = chooser.costs.layer(layer, (8, 8.0))
    expected = 1.0 + above * count + count * (layer / 12 + HEAD_COST)
    assert base + count * step == pytest.approx(expected)


def test_what_rows_take_beyond_those_that_were_measured() -> None:
    times = PassTimes()
    assert times.row_seconds is None
    times.add(2, 1.0)
    times.add(4, 1.2)
    assert times.row_seconds is None  # they are too near
    times.add(8, 1.6)
    assert times.row_seconds == pytest.approx(0.1)
    assert times.of(16, (8, 1.6)) == pytest.approx(1.6 + 8 * COST_AMONG_ROWS * 1.6)
    assert PassTimes().of(16, (8, 1.6), times) == pytest.approx(2.4)


def test_as_many_rows_take_as_long_for_more_requests_unless_they_were_measured() -> None:
    of_more = PassTimes()
    for rows, seconds in ((1, 1.0), (8, 1.7), (12, 2.5)):
        for _ in range(2):
            of_more.add(rows, seconds)
    times, anchor = PassTimes(), (4, 1.3)
    assert times.of(8, anchor, of_more) == pytest.approx(1.7)
    assert times.of(10, anchor, of_more) == pytest.approx(2.1)
    beyond = 2.5 + 2 * (2.5 - 1.3) / 8  # as from 4 to 12
    assert times.of(14, anchor, of_more) == pytest.approx(beyond)
    times.add(8, 1.5)
    assert times.of(8, anchor, of_more) == pytest.approx(1.5)
    assert times.of(12, anchor, of_more) == pytest.approx(2.5)


def test_the_first_rounds_soon_outweigh_what_was_expected() -> None:
    cost = StepCost(0.1, 2.0)
    for _ in range(6):
        cost.add(FIRST_STEPS, 4.0)
    assert 3.4 < cost.round(FIRST_STEPS) < 4.0


def test_one_request_and_several_have_budgets_of_their_own() -> None:
    chooser = Chooser(12, None)
    assert chooser.gained(8, 12, 1.0) == 0.0  # nothing is known of full depth
    for _ in range(2):
        chooser.costs.learn_full(8, 1.0)
    assert chooser.gained(8, 12, 1.0) == 0.5
    for _ in range(2):
        chooser.budget(8).looked(chooser.gained(8, 8, 9.0))
    assert chooser.budget(8).is_spent
    assert chooser.budget(2).is_spent  # what is left of a batch pays for it, too
    assert not chooser.budget(1).is_spent


def test_what_was_learnt_stays_with_the_model(agreeing: eecore.Model) -> None:
    agreeing.network.learnt.clear()
    for _ in range(2):
        eecore.generate(agreeing, PROMPTS, exit=Auto(), max_tokens=24)
    (chooser,) = agreeing.network.learnt.values()
    assert isinstance(chooser, Chooser)
    threads = torch.get_num_threads()
    assert chooser.costs.full(len(PROMPTS)) is not None
    torch.set_num_threads(threads + 1)
    try:
        eecore.generate(agreeing, PROMPTS, exit=Auto(), max_tokens=8)
        assert len(agreeing.network.learnt) == 2  # other passes, other times
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("layers", [(), (3,)])
def test_on_a_busy_machine_drafts_that_pay_are_made(layers: tuple[int, ...]) -> None:
    """One pass of ten takes up to twenty times as long, by no fault of its own."""
    machine = Machine(cheap_rows, 0.9, step=0.05)
    busy = random.Random(4)

    def disturbed(count: int) -> float:
        return cheap_rows(count) * (busy.uniform(1.0, 20.0) if busy.random() < 0.1 else 1.0)

    machine.pass_time = disturbed
    machine.run(60, proposes=not layers, layers=layers)
    machine.pass_time = cheap_rows
    seconds, tokens = machine.run(60, proposes=not layers, layers=layers)
    assert seconds < 0.4 * tokens * cheap_rows(1)


def test_a_first_measurement_that_was_disturbed_is_not_the_last() -> None:
    chooser = Chooser(12, None)
    for _ in range(2):
        chooser.costs.learn_full(1, 1.0)
    proposal = [Proposal(list(range(4)), 5)]
    drafted = chooser.choose([chooser.history()], [proposal], [4])
    assert drafted.kind == "given"
    chooser.costs.learn_given(1, sum(drafted.drafts), 0, 500.0)
    assert chooser.choose([chooser.history()], [proposal], [4]).kind == "given"


def test_what_turns_out_dear_is_not_done_again() -> None:
    """A row more than eight takes another kernel."""

    def pass_time(rows: int) -> float:
        return 1.0 if rows <= 8 else 2.0

    machine = Machine(pass_time, 0.6)
    machine.run(40, 8)
    seconds, tokens = machine.run(200, 8)
    assert seconds < 1.03 * tokens / 8
    # Full depth of more requests says what verifying as many rows takes at least.
    chooser = Chooser(12, None)
    for _ in range(2):
        chooser.costs.learn_full(8, 1.0)
        chooser.costs.learn_full(9, 2.0)
    proposal = Proposal([1, 2], 3)
    assert chooser.choose([chooser.history()] * 8, [[proposal]] * 8, [8] * 8) == FULL


def test_steps_that_do_not_go_on_count_where_none_does() -> None:
    """They are slower, as rows are written anew."""
    chooser, proposal = Chooser(12, None), Proposal([1] * 8, 8)

    def kind() -> str:
        return chooser.choose([chooser.history()], [[proposal]], [8]).kind

    for _ in range(2):
        chooser.costs.learn_full(1, 5.0, steady=0)
        chooser.costs.learn_full(1, 1.0)
    assert chooser.choose([chooser.history()], [[]], [8]) == FULL
    assert kind() == "given"
    other = Chooser(12, None)
    for count in range(4):
        assert other.choose([other.history()], [[proposal]], [8]) == FULL, count
        other.costs.learn_full(1, 1.0, steady=0)
    assert other.choose([other.history()], [[proposal]], [8]).kind == "given"


def test_nothing_is_chosen_where_nothing_can_be() -> None:
    chooser = Chooser(12, None)
    for _ in range(2):
        chooser.costs.learn_full(1, 1.0)
    assert chooser.choose([chooser.history()], [[]], [8]) == FULL
    assert chooser.choose([chooser.history()], [[]], [0], exit_layers=(3,)) == FULL


def test_a_request_has_odds_of_its_own() -> None:
    """That of another whose drafts never stand is expected to fail, until it does not."""
    chooser = Chooser(12, None)
    one, other = chooser.history(), chooser.history()
    proposal = Proposal([1, 2, 3], 4)
    for _ in range(60):
        chooser.learn_drafts(0, one, proposal, 3, 0)
        chooser.learn_drafts(0, other, proposal, 3, 3)
    for _ in range(2):
        chooser.costs.learn_full(2, 1.0)
    chooser.costs.learn_given(2, 3, 0, 1.1)
    choice = chooser.choose([one, other], [[proposal], [proposal]], [8, 8])
    assert choice.kind == "given"
    assert choice.drafts[0] == 0
    assert choice.drafts[1] == 3


@pytest.mark.parametrize("match", [1, 7, 8, 9, 30])
def test_each_draft_that_was_looked_up_has_one_chance(match: int) -> None:
    """However long the n-gram is: those of many tokens count as one kind."""
    history = Chooser(12, None).history()
    for count in (1, 3, 20):
        chances = history.chances(Proposal(list(range(count)), match))
        assert len(chances) == count
        shares = [history.share(("looked up", min(match + k, 8))) for k in range(count)]
        assert chances == pytest.approx(list(itertools.accumulate(shares, operator.mul)))


def test_times_between_and_beyond_measured_ones() -> None:
    times = PassTimes()
    anchor = 2, 10.0
    assert times.of(2, anchor) == 10.0
    assert times.of(3, (1, 10.0)) == pytest.approx(10.0 + 2 * ROW_COST * 10.0)
    assert times.of(6, anchor) == pytest.approx(10.0 + 4 * COST_AMONG_ROWS * 10.0)
    times.add(6, 20.0)
    assert times.of(4, anchor) == pytest.approx(15.0)
    assert times.of(6, anchor) == 20.0
    assert times.of(8, anchor) == pytest.approx(20.0 + 2 * (20.0 - 10.0) / 4)
    times.add(6, 500.0)  # a disturbance
    assert 20.0 < times.of(6, anchor) < 1.5 * 20.0
    assert times.near(4) is None
    times.add(2, 10.0)
    assert times.near(2) is None  # once is not enough
    assert times.near(4) == pytest.approx((10.0 + times.of(6, anchor)) / 2)
    times.add(2, 10.0)
    assert times.near(2) == pytest.approx(10.0)
    for _ in range(20):
        times.add(6, 16.0)
        times.add(2, 10.0)
    assert times.of(6, anchor) == pytest.approx(16.0, rel=0.02)


def test_a_first_pass_that_was_disturbed_is_forgotten_by_the_next() -> None:
    pace = Pace()
    times = PassTimes(pace)
    times.add(1, 1.0)
    times.add(3, 500.0)
    times.add(3, 1.2)
    assert times.of(3, (1, 1.0)) == pytest.approx(1.2)
    assert pace.now == 1.0


def test_a_pass_tells_of_all_that_the_machine_is_slower() -> None:
    """Or that the text is longer: others are taken to be as much slower."""
    pace = Pace()
    full, verify = PassTimes(pace), PassTimes(pace)
    for _ in range(100):
        full.add(1, 1.0)
        verify.add(3, 1.2)
    for slower in (1.4, 0.7, 1.0):
        for _ in range(60):
            verify.add(3, 1.2 * slower)
        assert verify.of(3, (1, 1.0)) == pytest.approx(1.2 * slower, rel=0.02)
        assert full.near(1) == pytest.approx(slower, rel=0.08)


def test_what_a_pass_takes_beside_others_is_learnt_where_they_take_turns() -> None:
    pace = Pace()
    full, verify = PassTimes(pace), PassTimes(pace)
    drift = random.Random(2)
    seconds = 1.0
    for _ in range(300):
        seconds *= drift.uniform(0.95, 1.05)
        full.add(1, seconds)
        verify.add(3, 1.3 * seconds)
    now = full.near(1)
    assert now is not None
    assert verify.of(3, (1, now)) / now == pytest.approx(1.3, rel=0.05)


@pytest.mark.parametrize("stands", [0.05, 0.8])
def test_a_machine_whose_speed_changes(stands: float) -> None:
    """By half within two hundred passes: drafts are made where they pay, and only there."""
    machine, passes = Machine(cheap_rows, stands), 0

    def drifting(count: int) -> float:
        nonlocal passes
        passes += 1
        return cheap_rows(count) * (1.25 + 0.25 * math.sin(passes / 32))

    machine.pass_time = drifting
    machine.run(100)
    slower = 1.25 * cheap_rows(1)  # on average
    seconds, tokens = machine.run(800)
    speedup = tokens * slower / seconds
    assert speedup > (0.97 if stands < 0.5 else 2.5)


def test_full_depth_behind_drafts_counts_when_it_has_settled() -> None:
    """A machine that had less to do is slower for a few passes."""
    chooser = Chooser(12, None)
    for _ in range(2):
        chooser.costs.learn_full(1, 1.0)
    for _ in range(20):
        chooser.costs.learn_given(1, 3, 0, 1.2)
        chooser.costs.learn_full(1, 1.3, steady=0)
        chooser.costs.learn_full(1, 1.2)
        chooser.costs.learn_full(1, 1.1)
    assert chooser.costs.full(1) == pytest.approx(1.0, rel=0.01)
    for _ in range(20):
        chooser.costs.learn_full(1, 1.1)
    assert chooser.costs.full(1) == pytest.approx(1.1, rel=0.01)


def test_what_lies_between_rounds_speaks_for_drafts() -> None:
    """Of a model so small that the host takes as long as its passes."""
    choices = []
    for host in (0.0, 1.0):
        chooser = Chooser(12, [0.9] * 11 + [1.0])
        for _ in range(4):
            chooser.costs.learn_full(8, 1.0)
            chooser.costs.learn_between(8, host)
        for count, seconds in ((6, 4.6), (1, 2.0)) * 3:  # for up to four tokens of each request
            chooser.costs.learn_drafted(3, 8, count, seconds)
        histories = [chooser.history() for _ in range(8)]
        for i in range(60):
            for history in histories:
                chooser.learn_drafts(3, history, NOTHING, 6, 4, written=100 + i)
        choice = chooser.choose(histories, [[]] * 8, [6] * 8, written=[100] * 8, exit_layers=(3,))
        choices.append(choice.kind)
    assert choices == ["full", "draft"]


def test_what_lies_between_rounds_is_no_more_than_a_pass() -> None:
    chooser = Chooser(12, None)
    chooser.costs.learn_between(8, 5.0)  # nothing is known of full depth
    for _ in range(2):
        chooser.costs.learn_full(8, 1.0)
    assert chooser.gained(8, 12, 1.0) == 0.5
    chooser.costs.learn_between(8, 5.0)  # whoever takes the tokens takes his time
    assert chooser.gained(8, 12, 1.0) == pytest.approx(0.5)
    assert chooser.gained(8, 8, 1.5) == pytest.approx(-0.25)


@pytest.mark.parametrize("step", [0.03, 0.2])
def test_a_steps_cost_is_told_apart_from_the_rounds(step: float) -> None:
    cost = StepCost()
    for steps in [1, 2, 5, 1, 3, 8] * 40:
        cost.add(steps, 1.15 + step * steps)
    assert cost.step == pytest.approx(step, rel=0.05)
    for _ in range(200):  # of one number of steps nothing new follows
        cost.add(1, 1.15 + step)
    assert cost.step == pytest.approx(step, rel=0.05)


def test_a_round_of_few_steps_is_never_taken_to_be_nothing() -> None:
    cost = StepCost()
    for steps, passes in [(8, 4.0), (7, 0.1)] * 40:  # disturbed: a step looks very dear
        cost.add(steps, passes)
    assert cost.round(1) >= 0.5


def about(directory: Path, **fields: Any) -> None:
    content = {"num_layers": 4, "held_out": {"agreement": [0.2, 0.9, 0.95, 1.0]}, **fields}
    (directory / "exits.json").write_text(json.dumps(content))


def test_a_model_says_how_its_exits_agree(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    source = load(directory, kv_cache_tokens=256).network.source
    assert source is not None
    assert source.exit_agreement(4) is None
    about(directory)
    source = load(directory, kv_cache_tokens=256).network.source
    assert source is not None
    assert source.exit_agreement(4) == (0.2, 0.9, 0.95, 1.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"held_out": {"agreement": [0.2, 0.9]}}, "held_out.agreement: expected 4 numbers"),
        ({"held_out": {"agreement": [0.2, 0.9, 2.0, 1]}}, "held_out.agreement: expected a list of"),
        ({"held_out": {}}, "held_out.agreement: expected a list"),
        ({"num_layers": "4"}, "num_layers: expected an integer"),
        (
            {"num_layers": 12, "held_out": {"agreement": [0.9] * 11 + [1.0]}},
            r"num_layers: expected an integer.*4.*got 12",
        ),
    ],
)
def test_a_file_that_says_nonsense_costs_speed_alone(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    directory = write_model(tmp_path)
    expected = tokens_of(load(directory, kv_cache_tokens=1024), Full())
    about(directory, **fields)
    with pytest.warns(UserWarning, match=message):
        assert tokens_of(load(directory, kv_cache_tokens=1024), Auto()) == expected


def test_rounds_without_a_look_are_learnt_of_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them are counted, in few steps; requests that end or come change nothing in that."""
    model = load(write_model(tmp_path / "model"), kv_cache_tokens=1024)
    learnt, counted = [], []
    rested, looked, learn = Budget.rested, Budget.looked, RoundCosts.learn_full

    def learn_full(self: RoundCosts, rows: int, seconds: float, *, steady: int = 1) -> None:
        learnt.append(steady)
        learn(self, rows, seconds, steady=steady)

    def rests(self: Budget, rounds: int = 1) -> None:
        counted.append(rounds)
        rested(self, rounds)

    monkeypatch.setattr(RoundCosts, "learn_full", learn_full)
    monkeypatch.setattr(Budget, "rested", rests)
    # A look always finds nothing, and costs more than there is.
    monkeypatch.setattr(Budget, "looked", lambda self, *_, **__: looked(self, -3.0, found=False))
    prompts = random_prompts(5, 9, 14)
    settings = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (60, 41, 90)]
    outputs = eecore.generate(model, prompts, sampling=settings, exit=Auto())
    assert [len(output.token_ids) for output in outputs] == [60, 41, 90]
    assert max(counted) == MOST_COUNTED
    assert 60 <= sum(counted) <= 89
    assert len(learnt) <= 40
    monkeypatch.undo()
    expected = eecore.generate(model, prompts, sampling=settings, exit=Full())
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]


def test_measuring_full_depth_is_no_look_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else was asked for, so that nothing follows for when to ask again."""
    model = load(write_model(tmp_path / "model"), kv_cache_tokens=1024)
    looked, founds = Budget.looked, []

    def note(self: Budget, gained: float, *, found: bool = True) -> None:
        founds.append(found)
        looked(self, gained, found=found)

    monkeypatch.setattr(Budget, "looked", note)
    monkeypatch.setattr(RoundCosts, "is_full_due", lambda *_: True)
    setting = SamplingParams(max_tokens=40, ignore_eos=True)
    eecore.generate(model, random_prompts(5), sampling=setting, exit=Auto())
    assert any(founds)
    assert all(founds[founds.index(True) :])  # before it is known there is nothing to choose from
    founds.clear()
    monkeypatch.setattr(Chooser, "choose", lambda *_, **__: FULL)
    model = load(tmp_path / "model", kv_cache_tokens=1024)  # of which nothing is known
    eecore.generate(model, random_prompts(5), sampling=setting, exit=Auto())
    assert founds
    assert not any(founds)


def test_knowledge_is_of_requests_not_of_time() -> None:
    """What is new begins with what was seen of others."""
    chooser = Chooser(12, None)
    history, proposal = chooser.history(), Proposal([1, 2, 3], 3)
    for _ in range(50):
        chooser.learn_drafts(0, history, proposal, 3, 3)
    new: History = chooser.history()
    assert new.share(("looked up", 3)) > 0.9
    assert new.share(("headed", 3)) == pytest.approx(0.35)
