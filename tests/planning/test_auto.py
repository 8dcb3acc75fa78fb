"""Auto: the tokens of full depth, by the fastest mode."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import eecore
from devices import load
from eecore import Auto, ConfidentExit, Full, SamplingParams
from eecore.models import Network
from eecore.planning import auto as auto_module
from eecore.planning.auto import HOLD_ROUNDS, MAX_WAIT, Chooser, best_exit_layers
from eecore.planning.costs import Costs, Curve
from eecore.planning.draft_state import DraftState, draft_state
from eecore.planning.odds import Odds, count_drafts
from eecore.planning.planner import Planner
from eecore.planning.proposal import Ahead, Drafts, Proposal
from eecore.planning.route import make_route
from eecore.planning.row import Outcome, Row
from eecore.planning.sources import HEAD
from eecore.scheduling.scheduler import Work
from eecore.scheduling.sequence import Counters, Sequence
from tiny_models import random_prompts, write_model

pytestmark = pytest.mark.usefixtures("one_thread")

WRONG = -1  # no token of a text

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


class Model(SimpleNamespace):
    """The attributes of a model that a planner reads; no weights."""

    __hash__ = object.__hash__


class Machine:
    """Plans rounds of requests whose drafts are accepted by chance, and takes its own times.

    Args:
        pass_time: of a pass, by its rows.
        text: how often drafts are accepted that are looked up; None: no text repeats itself.
        layers: how often drafts of layer 3 are accepted; None: no layer drafts.
        sure: how often a draft head is sure of a draft; None: there is no head.
        believes: the probability that it gives to drafts that it is sure of.
        step: what a step of a head or a layer takes.
    """

    def __init__(
        self,
        pass_time: Callable[[int], float],
        *,
        text: float | None = None,
        layers: float | None = None,
        sure: float | None = None,
        believes: float = 0.9,
        step: float = 0.0,
    ) -> None:
        self.pass_time, self.step = pass_time, step
        self.text, self.layers, self.sure, self.believes = text, layers, sure, believes
        self.chance = random.Random(3)
        head = None
        if sure is not None:
            head = Model(agreement=(0.5, 0.4), num_at_once=0, keys=None, know=lambda _: None)
        config = SimpleNamespace(num_layers=12, exit_layers=range(1, 13))
        model = Model(config=config, draft_head=head, source=None, learnt={})
        self.planner = Planner(cast(Network, model))
        self.policy = Auto(10, exit_layers=() if layers is None else (3,), lookup=text is not None)
        source = SimpleNamespace(name="text", propose=self.propose)
        self.sources: list[Any] = [HEAD, source] if text is not None else [HEAD]
        self.hopeless = 0  # first requests whose drafts are never accepted
        self.others_wait = False
        self.rows: list[Row] = []
        self.timed = self.at_full_depth = 0.0

    def requests(self, count: int) -> list[Sequence]:
        sampling = SamplingParams(max_tokens=100_000, ignore_eos=True)
        made = []
        for i in range(count):
            prompt = list(range(24))
            made.append(Sequence(str(i), prompt, sampling, self.policy, i, frozenset()))
            draft_state(made[-1], range(1, 13)).sources = self.sources
            self.get(made[-1], 1)
        return made

    def get(self, request: Sequence, count: int) -> list[int]:
        """The next tokens of a request."""
        first = request.num_tokens
        tokens = list(range(first, first + count))
        request.output_ids += tokens
        return tokens

    def run(self, rounds: int, requests: int | list[Sequence] = 1) -> tuple[float, float]:
        """Run rounds; returns their seconds, and those of full depth for as many tokens."""
        running = self.requests(requests) if isinstance(requests, int) else requests
        seconds = tokens = 0.0
        first = [len(each.output_ids) for each in running]
        for number in range(rounds):
            took = self.round(running, is_first=number == 0)
            seconds += took
        self.got = [len(e.output_ids) - n for e, n in zip(running, first, strict=True)]
        tokens = sum(self.got) / len(running)
        return seconds, tokens * self.pass_time(len(running))

    def round(self, running: list[Sequence], *, is_first: bool = False) -> float:
        works = [Work(e, 1, 0 if e.is_resting else e.max_drafts) for e in running]
        self.rows = rows = self.planner.plan(works, others_wait=self.others_wait)
        outcomes, verified, steps = [], 0, 0
        for i, row in enumerate(rows):
            path, drafted = row.route.path, len(row.given.tokens)
            if path is not None and not path.is_given:
                drafted = row.work.max_drafts
                steps = max(steps, drafted)
            accepted = 0
            while accepted < drafted and i >= self.hopeless and self.accepts(row, accepted):
                accepted += 1
            verified += drafted
            tokens = self.get(row.sequence, accepted + 1)
            counters = Counters(drafted=drafted, accepted=accepted)
            outcome = Outcome(row.sequence, 0, tokens, counters=counters)
            if row.ahead:
                outcome.ahead = self.ahead(row)
                steps = max(steps, len(outcome.ahead.tokens))
            outcomes.append(outcome)
        took = self.pass_time(len(rows) + verified) + steps * self.step
        took *= self.chance.uniform(0.98, 1.02)
        # Tokens count once the round has been learnt of.
        for outcome in outcomes:
            del outcome.sequence.output_ids[-len(outcome.token_ids) :]
        self.planner.learn(rows, outcomes, None if is_first else took)
        for outcome in outcomes:
            self.timed += outcome.seconds
            self.at_full_depth += len(outcome.token_ids) * outcome.full_depth_s
            outcome.sequence.output_ids += outcome.token_ids
            outcome.sequence.draft.ahead = outcome.ahead
        return took

    def accepts(self, row: Row, place: int) -> bool:
        if row.given.source:
            return row.given.tokens[place] == row.sequence.num_tokens + place
        return self.chance.random() < (self.layers or 0.0)

    def propose(self, sequence: Sequence, draft: DraftState, most: int) -> Drafts:
        """The drafts of the text."""
        del draft
        first, share = sequence.num_tokens, self.text or 0.0
        if int(sequence.request_id) < self.hopeless:
            share = 0.0
        places = range(first, first + most)
        tokens = [place if self.chance.random() < share else WRONG for place in places]
        return tokens, (0.65,) * len(tokens)

    def ahead(self, row: Row) -> Ahead:
        tokens: list[int] = []
        probabilities: list[float] = []
        request = row.sequence
        while len(probabilities) < row.ahead:
            is_sure = self.chance.random() < (self.sure or 0.0)
            is_right = is_sure and self.believes >= 0.5 and self.chance.random() < 0.9
            tokens.append(request.num_tokens + len(tokens) if is_right else WRONG)
            probabilities.append(self.believes if is_sure else 0.1)
            if probabilities[-1] < row.ahead_thresholds[len(probabilities) - 1]:
                break
        return Ahead(request.num_tokens, request.output_ids[-1], tokens, probabilities)


def cheap_rows(rows: int) -> float:
    """Times of a pass that is bound by reading weights."""
    return 1.0 + 0.03 * rows


def dear_rows(rows: int) -> float:
    """Times of a pass that is bound by arithmetic."""
    return float(rows)


@pytest.mark.parametrize("requests", [1, 4, 16])
@pytest.mark.parametrize("accepted", [0.0, 0.02, 0.5, 0.95])
@pytest.mark.parametrize("pass_time", [cheap_rows, dear_rows])
@pytest.mark.parametrize("source", ["text", "layers", "sure"])
def test_never_much_slower_than_full_depth(
    pass_time: Callable[[int], float], accepted: float, requests: int, source: str
) -> None:
    step = pass_time(requests) * (0.08 if source == "sure" else 0.3)
    machine = Machine(pass_time, step=step, **{source: accepted})
    machine.run(100, requests)  # until it knows
    seconds, full = machine.run(400, requests)
    assert seconds < 1.03 * full


@pytest.mark.parametrize(
    ("fields", "gain"),
    [
        ({"text": 0.5}, 1.4),
        ({"text": 0.95}, 3.0),
        ({"layers": 0.9, "step": 0.2}, 1.5),
        ({"sure": 0.5, "step": 0.08}, 1.25),
        ({"sure": 0.8, "step": 0.08}, 1.6),
    ],
)
def test_drafts_that_pay_are_made(fields: dict[str, float], gain: float) -> None:
    machine = Machine(cheap_rows, **cast(Any, fields))
    machine.run(60)
    seconds, full = machine.run(400)
    assert full > gain * seconds


@pytest.mark.parametrize("requests", [1, 4])
def test_rounds_say_what_full_depth_would_have_taken(requests: int) -> None:
    """Every request of the batch waits for the whole round, at full depth too."""
    machine = Machine(cheap_rows, text=0.7)
    machine.run(200, requests)
    machine.timed = machine.at_full_depth = 0.0
    seconds, full = machine.run(400, requests)
    assert machine.timed == pytest.approx(requests * seconds, rel=0.01)  # all but the first
    assert machine.at_full_depth == pytest.approx(requests * full, rel=0.05)


def test_a_head_that_believes_what_is_wrong_is_found_out() -> None:
    machine = Machine(cheap_rows, sure=0.9, believes=0.45, step=0.08)  # never accepted
    machine.run(100)
    seconds, full = machine.run(400)
    assert seconds < 1.03 * full


def test_more_requests_have_fewer_drafts_each() -> None:
    """A further row costs little in a pass of one, and much in a pass of many."""
    drafts = []
    for requests in (1, 4, 16):
        machine = Machine(lambda rows: max(1.0, rows / 8), text=0.7)
        running = machine.requests(requests)
        machine.run(100, running)
        verified = 0
        for _ in range(50):
            machine.round(running)
            verified += sum(len(row.given.tokens) for row in machine.rows)
        drafts.append(verified / requests)
    assert drafts[0] > drafts[1] > drafts[2]


@pytest.mark.parametrize("hopeless", [1, 7])
def test_no_request_waits_long_for_what_others_gain(hopeless: int) -> None:
    machine = Machine(cheap_rows, text=0.8)
    machine.run(60, 8)
    machine.hopeless = hopeless
    seconds, _ = machine.run(300, 8)
    excess = seconds / cheap_rows(8) - min(machine.got)
    assert excess < 40  # rounds of full depth, however long the run is
    more, _ = machine.run(600, 8)
    assert more / cheap_rows(8) - min(machine.got) < 40


def test_where_others_wait_it_is_what_all_gain_that_counts() -> None:
    machine = Machine(cheap_rows, text=0.8)
    machine.others_wait = True
    machine.run(60, 8)
    machine.hopeless = 1
    seconds, full = machine.run(300, 8)
    assert full > 1.4 * seconds


def test_what_lost_is_tried_again_more_and_more_rarely() -> None:
    machine = Machine(cheap_rows, layers=0.0, step=0.3)
    running = machine.requests(1)
    tried = []
    for number in range(1200):
        machine.round(running, is_first=not number)
        if machine.rows[0].route.path is not None:
            tried.append(number)
    assert 10 < len(tried) < 40
    assert tried[-1] > 400
    machine.layers = 0.95
    machine.run(4 * MAX_WAIT, running)
    seconds, full = machine.run(200, running)
    assert full > 1.3 * seconds


def test_a_choice_is_held_for_some_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(cheap_rows, layers=0.9, step=0.2)
    running = machine.requests(3)
    machine.run(100, running)
    chosen: list[int] = []
    choose = auto_module.Chooser.choose
    monkeypatch.setattr(
        auto_module.Chooser, "choose", lambda *a, **b: chosen.append(1) or choose(*a, **b)
    )
    for _ in range(20 * HOLD_ROUNDS):
        machine.round(running)
    assert len(chosen) <= 22
    before = len(chosen)
    machine.round(running[:2])  # one has ended: for the others nothing changes
    assert len(chosen) - before <= 1
    machine.round(machine.requests(3))
    assert len(chosen) - before >= 1


@pytest.mark.parametrize(("text", "counts"), [([7, 1, 2], True), ([7, 1, 3], False), ([2], False)])
def test_drafts_for_another_text_are_not_counted(text: list[int], counts: bool) -> None:
    """They come after the tokens that a round in flight was expected to give."""
    machine = Machine(cheap_rows, text=0.5)
    planner, (request,) = machine.planner, machine.requests(1)
    (row,) = planner.plan([Work(request, 1)])
    given = Proposal([3], "text", (0.5,), ([1, 2], (0.5, 0.5)))
    row = row._replace(route=planner._route(request.draft, 0), proposed=[given])
    request.output_ids[:] = text
    outcome = Outcome(request, 0, [3, 4], counters=Counters(drafted=1, accepted=1))
    planner.learn([row], [outcome], None)
    assert bool(planner.chooser.odds_of_all.counts) == counts


@pytest.mark.parametrize("accepted", [0.05, 0.8])
def test_a_machine_whose_speed_changes(accepted: float) -> None:
    machine = Machine(cheap_rows, text=accepted)
    running = machine.requests(1)
    machine.run(100, running)
    machine.pass_time = lambda rows: 2.0 * cheap_rows(rows)
    machine.run(60, running)
    seconds, full = machine.run(200, running)
    assert seconds < 1.03 * full
    if accepted > 0.5:
        assert full > 1.8 * seconds


def test_a_request_has_odds_of_its_own_that_begin_as_those_of_all() -> None:
    everybody, key = Odds(lambda key: (key[1] + 0.5) / 10), ("text", 3)
    assert everybody.share(key) == pytest.approx(0.35)
    count_drafts([((everybody,), [key], 1)] * 100)
    own = Odds(everybody.share)
    assert own.share(("text", 3)) > 0.9
    count_drafts([((own,), [key], 0)] * 20)
    assert own.share(("text", 3)) < 0.2
    assert everybody.share(("text", 3)) > 0.9
    assert own.share(("head", 3)) == pytest.approx(0.35)


def test_the_cost_of_drafts_is_learnt_by_their_number() -> None:
    """Two rows cost nothing, further ones much; a head's step is told apart from rows."""
    curve = Curve(0.08)
    chance = random.Random(1)
    for _ in range(2000):
        count, steps = chance.randrange(9), chance.randrange(3)
        takes = 1.0 + 0.2 * max(count - 2, 0) + 0.05 * steps
        curve.add(count, steps, takes - curve.upto(count)[-1] - steps * curve.step)
    assert curve.upto(8) == pytest.approx([1.0] * 3 + [1.2, 1.4, 1.6, 1.8, 2.0, 2.2], abs=0.02)
    assert curve.step == pytest.approx(0.05, abs=0.01)
    before = curve.upto(32)
    curve.add(0, 0, 0.5)  # nothing to learn from
    assert curve.upto(32) == before


def test_full_depth_is_known_near_what_was_measured() -> None:
    costs = Costs()
    assert costs.full(4) is None
    costs.learn_full(1, 1.0)
    costs.learn_full(8, 2.0)
    assert costs.full(1) == 1.0
    assert costs.full(2) == pytest.approx(1.0 + 1.0 / 7.0)  # between two
    assert costs.full(16) == 2.0
    assert costs.full(17) is None
    costs.learn_full(8, 90.0)  # disturbed
    assert costs.full(8) == pytest.approx(2.25)
    for _ in range(40):
        costs.learn_full(8, 4.0)
    assert costs.full(8) == pytest.approx(4.0, rel=0.01)


def test_every_source_is_scored_up_to_its_first_wrong_draft() -> None:
    """Whether or not its drafts were chosen."""
    machine = Machine(cheap_rows, text=0.5)
    chooser, (request,) = machine.planner.chooser, machine.requests(1)
    machine.planner.plan([Work(request, 1)])
    its = [Proposal([7, 8, 9], "text", (0.65,) * 3), Proposal([7, 5, 6], "head", (0.35,) * 3)]
    chooser.learn_proposals([(request.draft, its, [7, 8])])
    tried = {
        source: (good, count) for (source, _), (good, count) in chooser.odds_of_all.counts.items()
    }
    assert tried["text"] == pytest.approx((4 * 0.65 + 2, 6))
    assert tried["head"] == pytest.approx((4 * 0.35 + 1, 6))


def test_exit_layers_that_promise_most() -> None:
    assert best_exit_layers(None) == ()
    assert best_exit_layers([0.01] * 11 + [1.0]) == ()
    agreement = [0.5, 0.9, 0.95, *[0.97] * 8, 1.0]
    assert set(best_exit_layers(agreement)) == {2, 3}


@pytest.mark.parametrize(("share", "pays"), [(1.0, True), (0.75, True), (0.25, False)])
def test_drafts_have_to_be_worth_the_wait_of_rows_that_share_a_pass(
    share: float, pays: bool
) -> None:
    """A round of drafts serves only the requests that draft."""
    chooser = Chooser(4, [0.9] * 4)
    chooser.costs.learn_full(1, 1.0)
    drafts = [DraftState(make_route(Auto(), range(1, 5), sampled=False))]
    proposal = Proposal([1, 2, 3], "text", (0.95,) * 3)
    (taken,), _ = chooser.pick(drafts, [[proposal]], share=share)
    assert bool(taken.tokens) == pays
    choose = partial(chooser.choose, drafts, [3], 8, share=share)
    assert choose(given=[[proposal]]).asks == pays
    choices = [choose(given=[[]], exit_layers=(1,)) for _ in range(2)]  # the first may be a trial
    assert bool(choices[1].layer) == pays
    chooser.learn_head(1, 4, 1.0)
    choices = [choose(given=[[]], has_head=True) for _ in range(2)]
    assert bool(choices[1].ahead) == pays


def test_drafts_make_other_rows_of_full_depth_take_a_pass_of_their_own(
    agreeing: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares, choose = list[float](), Chooser.choose

    def noted(chooser: Chooser, *given: Any, share: float, **more: Any) -> Any:
        shares.append(share)
        return choose(chooser, *given, share=share, **more)

    monkeypatch.setattr(Chooser, "choose", noted)
    engine = agreeing.engine(eecore.EngineConfig(kv_cache_tokens=512))
    lengths = (Auto(), 24), (Full(), 6), (ConfidentExit(0.9), 6)
    for prompt, (policy, most) in zip(PROMPTS, lengths, strict=False):
        sampling = SamplingParams(max_tokens=most, ignore_eos=True)
        engine.add_request(prompt, exit=policy, sampling=sampling)
    list(engine.run())
    assert (shares[0], shares[-1]) == (1 / 4, 1.0)


def test_it_is_known_whether_others_wait(
    agreeing: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[int, bool]] = set()
    plan = Planner.plan

    def noted(planner: Planner, works: list[Work], *, others_wait: bool) -> list[Row]:
        seen.add((len(works), others_wait))
        return plan(planner, works, others_wait=others_wait)

    monkeypatch.setattr(Planner, "plan", noted)
    engine = agreeing.engine(eecore.EngineConfig(kv_cache_tokens=512, max_num_seqs=2))
    for prompt in PROMPTS[:3]:
        engine.add_request(prompt, exit=Auto(), sampling=SamplingParams(max_tokens=6))
    list(engine.run())
    assert {(2, True), (1, False)} <= seen


def test_what_was_learnt_stays_with_the_model(agreeing: eecore.Model) -> None:
    agreeing.network.learnt.clear()
    for _ in range(2):
        eecore.generate(agreeing, PROMPTS, exit=Auto(), max_tokens=24)
    (learnt,) = agreeing.network.learnt.values()
    threads = torch.get_num_threads()
    assert learnt.costs.full(len(PROMPTS)) is not None
    torch.set_num_threads(threads + 1)
    try:
        eecore.generate(agreeing, PROMPTS, exit=Auto(), max_tokens=8)
        assert len(agreeing.network.learnt) == 2  # other passes, other times
    finally:
        torch.set_num_threads(threads)


def calls_of(engine: eecore.Engine) -> tuple[int, int]:
    """Python calls of a step, and the files that they are in."""
    called: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return len(called), len(set(called))


@pytest.mark.parametrize(("policy", "most"), [(Full(), (40, 13)), (Auto(), (100, 20))])
def test_calls_of_a_round_that_goes_on_as_the_last_one(policy: Any, most: tuple[int, int]) -> None:
    """Such rounds are the most frequent ones."""
    model = eecore.load(eecore.default_model(), device="cpu", kv_cache_tokens=1024)
    found = []
    for _ in range(2):
        engine = model.engine()
        sampling = SamplingParams(max_tokens=120, ignore_eos=True)
        engine.add_request("lock the front door", exit=policy, sampling=sampling)
        for _ in range(16):
            engine.step()
        for _ in range(16):
            held = engine.iterations.planner.held
            calls = calls_of(engine)
            if engine.iterations.planner.held is held:
                found.append(calls)
        list(engine.run())
    assert sorted(found)[len(found) // 2] <= most


def about(directory: Path, **fields: Any) -> None:
    content = {"num_layers": 4, "held_out": {"agreement": [0.2, 0.9, 0.95, 1.0]}, **fields}
    (directory / "exits.json").write_text(json.dumps(content))


def test_a_model_says_how_its_exits_agree(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    source = load(directory, kv_cache_tokens=256).network.source
    assert source is not None
    assert source.exit_agreement(range(1, 5)) is None
    about(directory)
    source = load(directory, kv_cache_tokens=256).network.source
    assert source is not None
    assert source.exit_agreement(range(1, 5)) == (0.2, 0.9, 0.95, 1.0)


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
