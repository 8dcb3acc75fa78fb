"""Which exit layer drafts for ``Auto`` requests, and how much.

What is learnt of costs, of drafts that stand and of texts that end; and short answers in a batch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from eecore.planning.budget import VAIN_SEVERAL, Budget
from eecore.planning.chooser import FULL, Chooser
from eecore.planning.history import OwnDrafts
from eecore.planning.layer_chooser import (
    HOLD_LAYERS,
    TRY_LAYER,
    WITHOUT_LOOKUP,
    LayerChoice,
    best_exit_layers,
)
from eecore.planning.layer_drafts import MOST_SHARE, LayerDrafts
from eecore.planning.layer_rounds import LayerRounds
from eecore.planning.lengths import MOST_KEPT, TextLengths, span_of
from eecore.planning.pass_times import Pace
from eecore.planning.round_costs import MEASURE_AGAIN, RoundCosts

import eecore
from eecore import Auto, Full, SamplingParams
from eecore.planning.proposal import NOTHING, Proposal

pytestmark = pytest.mark.usefixtures("one_thread")

AGREEMENT = [0.6, 0.93, 0.975, *[0.985] * 8, 1.0]


def test_exit_layers_that_promise_most() -> None:
    assert best_exit_layers(None) == ()
    assert best_exit_layers([0.01] * 11 + [1.0]) == ()
    agreement = [0.5, 0.9, 0.95, *[0.97] * 8, 1.0]
    assert set(best_exit_layers(agreement)) == {2, 3}


# How long texts get


def test_spans_are_half_as_long_as_what_is_before_them() -> None:
    spans = [span_of(position) for position in range(1, 33)]
    assert spans == sorted(spans)
    firsts = [1 + i for i in range(32) if not i or spans[i] != spans[i - 1]]
    assert firsts == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]


def test_texts_go_on_until_some_have_ended() -> None:
    lengths = TextLengths()
    assert lengths.go_on(0, 40) == [1.0] * 40
    for _ in range(100):
        lengths.add(10, ends=True)
    chances = lengths.go_on(0, 40)
    assert chances[:8] == [1.0] * 8  # none was shorter
    assert chances[8] > chances[9] > chances[11] > 0.0
    assert chances[11] < 0.35
    assert lengths.go_on(9, 3)[0] == 1.0  # one that has got so far has a token more


def test_what_was_cut_is_no_end() -> None:
    lengths = TextLengths()
    for _ in range(100):
        lengths.add(10, ends=False)
    assert lengths.go_on(0, 40) == [1.0] * 40


def test_texts_of_late_count_more() -> None:
    lengths = TextLengths()
    for _ in range(200):
        lengths.add(10, ends=True)
    short = lengths.go_on(8, 8)
    for _ in range(200):
        lengths.add(100, ends=True)
    assert lengths.go_on(8, 8)[-1] > 0.9 > 2.0 * short[-1]


def test_a_text_without_tokens_and_many_places_do_no_harm() -> None:
    lengths = TextLengths()
    lengths.add(0, ends=True)
    assert lengths.go_on(0, 3) == [1.0] * 3
    lengths.add(1, ends=True)
    assert lengths.go_on(0, 3)[1] < 1.0
    for written in range(2 * MOST_KEPT):
        assert len(lengths.go_on(written, 2)) == 2


# Which drafts stand


def test_drafts_are_counted_by_where_they_were_made() -> None:
    drafts, own = LayerDrafts(0.8), OwnDrafts()
    assert drafts.shares(0, 3) == pytest.approx([0.8] * 3)
    for _ in range(200):
        drafts.add(own, 1, 6, refused=False)  # tokens 2 to 7 stand, those from 16 on never
        drafts.add(own, 15, 0, refused=True)
    shares = drafts.shares(1, 20)
    assert min(shares[:6]) > 0.97
    assert 0.5 < shares[6] < 0.95  # of the eighth to the fifteenth is known what is of all
    assert shares[14] < 0.25
    for _ in range(2000):
        drafts.add(own, 1, 6, refused=False)
    assert drafts.shares(1, 1) == [MOST_SHARE]


def test_a_run_of_drafts_may_reach_over_places() -> None:
    drafts = LayerDrafts(0.8)
    for _ in range(100):
        drafts.add(OwnDrafts(), 2, 7, refused=True)  # tokens 3 to 9 stand, the tenth does not
    shares = drafts.shares(0, 15)
    assert min(shares[1:7]) > 0.9
    assert 0.6 < shares[7] < 0.75  # two of three of the eighth to the fifteenth
    assert shares[0] == drafts.shares(15, 1)[0]  # of others is known what is of all


def test_what_was_measured_outweighs_a_few_drafts() -> None:
    measured, unknown = LayerDrafts(0.95), LayerDrafts(None)
    for drafts in measured, unknown:
        for _ in range(4):
            drafts.add(OwnDrafts(), 3, 0, refused=True)
    assert measured.shares(100, 1)[0] > 0.85
    assert unknown.shares(100, 1)[0] < 0.3


def test_a_request_is_told_apart_from_others() -> None:
    drafts, good, bad = LayerDrafts(0.8), OwnDrafts(), OwnDrafts()
    for _ in range(60):
        drafts.add(good, 40, 5, refused=False)
        drafts.add(bad, 40, 0, refused=True)
    assert good.factor > 1.05
    assert bad.factor < 0.5


# What rounds of a layer cost


def cost_of(requests: int, steps: int) -> float:
    return 2.0 + 0.3 * requests + steps * (0.2 + 0.15 * requests)


def test_what_a_round_costs_is_learnt_of_rounds_of_any_requests() -> None:
    rounds = LayerRounds(lambda _, steps: 1.0 + 0.2 * steps, (8, 16), Pace())
    chance = random.Random(1)
    for _ in range(80):
        requests, steps = chance.choice([1, 2, 8]), chance.choice([2, 4, 8])
        seconds = cost_of(requests, steps) * chance.uniform(0.95, 1.05)
        rounds.add(requests, steps, seconds)
    for requests, steps in (1, 6), (2, 3), (5, 6), (8, 3):
        base, step = rounds.line(requests)
        assert base + steps * step == pytest.approx(cost_of(requests, steps), rel=0.1)


def test_a_disturbed_round_of_a_layer_is_outweighed() -> None:
    rounds = LayerRounds(cost_of, (1, 2), Pace())
    for i in range(60):
        rounds.add(4, 1 + i % 4, cost_of(4, 1 + i % 4) * (20.0 if i % 12 == 5 else 1.0))
    for _ in range(20):
        rounds.add(4, 3, cost_of(4, 3))
    base, step = rounds.line(4)
    assert base + 3 * step == pytest.approx(cost_of(4, 3), rel=0.1)


def test_no_part_of_a_round_is_less_than_nothing() -> None:
    rounds = LayerRounds(cost_of, (1, 8), Pace())
    for steps, seconds in [(8, 0.5), (1, 9.0)] * 60:
        assert abs(rounds.add(8, steps, seconds)) < 20.0
        for requests in 1, 8, 64:
            assert min(rounds.line(requests)) >= 0.0


def test_the_host_takes_longer_behind_drafts() -> None:
    costs = RoundCosts(12)
    for _ in range(2):
        costs.learn_full(8, 1.0)
    costs.learn_between(8, 0.2)
    assert costs.host(8, drafts=True) == costs.host(8) == 0.2
    for _ in range(200):
        costs.learn_between(8, 0.3, drafts=True)
    assert costs.host(8) == 0.2
    assert costs.host(8, drafts=True) == pytest.approx(0.3)
    chooser = Chooser(12, None)
    chooser.costs = costs
    assert chooser.gained(8, 16, 1.0, drafted=8) == pytest.approx(2.0 - 1.3 / 1.2)
    assert chooser.gained(8, 8, 1.0) == pytest.approx(0.0)


def test_full_depth_is_measured_again_for_as_many_requests() -> None:
    costs = RoundCosts(12)
    for rows in 1, 8:
        for _ in range(2):
            costs.learn_full(rows, float(rows))
    for _ in range(MEASURE_AGAIN[0]):
        assert not costs.is_full_due(8)
        costs.learn_drafted(3, 8, 4, 20.0)
        costs.learn_full(1, 1.0)  # of one it says nothing of eight
    assert costs.is_full_due(8)
    assert not costs.is_full_due(1)
    costs.learn_full(8, 8.0)
    assert not costs.is_full_due(8)
    for _ in range(2 * MEASURE_AGAIN[0]):
        costs.learn_drafted(3, 8, 4, 20.0)
    due = 0
    while costs.is_full_due(8):
        costs.learn_full(8, 8.0, steady=0)  # it never goes on
        due += 1
    assert 1 < due < 10


def test_full_depth_is_not_measured_where_requests_end_meanwhile() -> None:
    costs = RoundCosts(12)
    for _ in range(2):
        costs.learn_full(4, 4.0)
        costs.learn_full(7, 7.0)
    for period in MEASURE_AGAIN[0], 2 * MEASURE_AGAIN[0]:
        for _ in range(period):
            assert not costs.is_full_due(6)
            costs.learn_drafted(3, 6, 4, 20.0)
        assert costs.is_full_due(6)
        costs.learn_full(6, 6.0, steady=0)
        assert not costs.is_full_due(5)  # one has ended


def test_fewer_requests_take_more_time_each() -> None:
    costs = RoundCosts(12)
    for rows, seconds in (1, 4.0), (8, 7.5):
        for _ in range(2):
            costs.learn_full(rows, seconds)
    shares = [costs.fewer(rows, (8, 7.5)) for rows in (8, 4.5, 4, 1, 0.5)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1.0
    assert shares[3] == pytest.approx(4.0 / 7.5)
    unknown = RoundCosts(12)
    assert unknown.fewer(2.0, (8, 1.0)) == pytest.approx(0.25)  # in proportion


def test_what_a_round_gave_texts_that_ended_is_worth_what_full_depth_takes_for_it() -> None:
    chooser = Chooser(12, None)
    for rows, seconds in (1, 4.0), (2, 5.0):
        for _ in range(2):
            chooser.costs.learn_full(rows, seconds)
    assert chooser.worth([3, 3], [False, False]) == 6
    # One goes on alone for two tokens, in passes of four fifths of the time.
    assert chooser.worth([1, 3], [True, False]) == pytest.approx(2 + 2 * 2 * 0.8)
    assert chooser.worth([3, 1], [True, False]) == 4  # the other one could have had more


# Choosing


def known(agreement: Sequence[float] | None = AGREEMENT, rows: int = 1) -> Chooser:
    """One that knows what full depth takes."""
    chooser = Chooser(12, agreement)
    for _ in range(2):
        chooser.costs.learn_full(rows, 1.0)
    return chooser


def test_behind_the_end_of_texts_nothing_is_drafted() -> None:
    counts = []
    for ends in False, True:
        chooser = known()
        for _ in range(60):
            chooser.layers.lengths.add(12, ends=ends)
        choice = chooser.choose([chooser.history()], [[]], [10], written=[10], exit_layers=(3,))
        counts.append(sum(choice.drafts))
    assert 0 < counts[1] < counts[0]


def test_layers_that_drafted_go_on_and_others_have_their_turn_with_new_requests() -> None:
    chooser = known()
    used, stayed = [], 0
    for _ in range(16 * TRY_LAYER):
        history = chooser.history()
        layers = []
        for written in 1, 8:
            choice = chooser.choose([history], [[]], [8], written=[written], exit_layers=(2, 3))
            assert choice.kind == "draft"
            layers.append(choice.exit_layer)
            count = sum(choice.drafts)
            seconds = 1.0 + count * (0.25 if choice.exit_layer == 3 else 0.2)
            chooser.costs.learn_drafted(choice.exit_layer, 1, count, seconds)
            chooser.learn_drafts(choice.exit_layer, history, NOTHING, count, count, written=written)
            for _ in range(2):
                chooser.costs.learn_full(1, 1.0)
        stayed += layers[0] == layers[1]
        used.append(layers[0])
    assert stayed > 0.7 * len(used)
    assert min(used.count(2), used.count(3)) >= 1
    assert used[-TRY_LAYER:].count(2) > 0.8 * TRY_LAYER  # both are right, one is faster


def test_while_a_layer_drafts_the_text_is_searched_now_and_then() -> None:
    chooser = known()
    assert chooser.layers.is_lookup_due
    due = 0
    for _ in range(3 * (WITHOUT_LOOKUP + 1)):
        due += chooser.layers.is_lookup_due
        choice = chooser.choose([chooser.history()], [[]], [8], written=[1], exit_layers=(3,))
        assert choice.kind == "draft"
    assert due == 3
    chooser.layers.chosen(None, (3,), first=True)
    assert chooser.layers.is_lookup_due
    for _ in range(200):
        history = chooser.history()
        chooser.learn_drafts(0, history, Proposal(list(range(8)), 8), 8, 8)
    better = Proposal(list(range(8)), 8)
    choice = chooser.choose([history], [[better]], [8], written=[1], exit_layers=(3,))
    assert choice.kind == "given"
    assert chooser.layers.is_lookup_due


def test_a_choice_of_layers_is_held_for_requests_that_are_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chooser, asked = known(), 0
    choices = chooser.layers._choices

    def counted(*given: object) -> list[LayerChoice]:
        nonlocal asked
        asked += 1
        return choices(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(chooser.layers, "_choices", counted)
    for _ in range(HOLD_LAYERS):
        chooser.choose([chooser.history()], [[]], [8], written=[4], exit_layers=(3,))
    assert asked == 1
    chooser.choose([chooser.history()], [[]], [8], written=[40], exit_layers=(3,))
    assert asked == 2
    bad = chooser.history()
    bad.own_drafts(3).stood = 0.0
    assert chooser.choose([bad], [[]], [8], written=[4], exit_layers=(3,)) == FULL
    assert asked == 3


def test_where_there_is_no_room_no_layer_drafts() -> None:
    chooser = known()
    choice = chooser.choose([chooser.history()], [[]], [0], written=[4], exit_layers=(2, 3))
    assert choice == FULL
    choice = chooser.choose([chooser.history()], [[]], [8], written=[4], exit_layers=(2, 3))
    assert choice.kind == "draft"  # another one has room


def test_a_look_that_takes_as_long_as_a_round_is_rare() -> None:
    """Where it finds nothing: of so small a model nearly a round is lost."""
    for cost, least in (0.01, 0), (0.4, 16):
        budget = Budget(is_alone=False)
        budget.looked(-cost, found=False)
        assert budget.rests == least == int(cost / VAIN_SEVERAL)
        budget = Budget(is_alone=False)
        budget.looked(-cost, found=True)
        assert budget.rests == 0


# Short answers in a batch


@dataclass
class Answers:
    """Texts of a template, whose later part a layer is less sure of; on a machine of its own."""

    lengths: Sequence[int]
    stands: Sequence[float]
    """Of layers 2 and 3, behind the seventh token; before it all drafts stand."""
    row: float
    """What a row costs, of a pass of none."""

    def full(self, rows: int) -> float:
        return 1.0 + self.row * rows

    def draft(self, layer: int, rows: int, steps: int) -> float:
        verify = self.full(rows) + (1.0 - layer / 12) * self.row * rows * steps
        return verify + steps * (layer / 12 + 0.05) * self.full(rows)

    def round(
        self, layer: int, places: list[int], counts: Sequence[int], chance: random.Random
    ) -> tuple[list[tuple[int, int, int]], int]:
        """Of each text: drafts, those that stood, tokens; and the steps that were made."""
        came, steps = [], 0
        for i, (place, count) in enumerate(zip(places, counts, strict=True)):
            left = self.lengths[i] - place
            made = stood = 0
            while made < count and stood < left:
                made += 1
                if place + stood >= 7 and chance.random() > self.stands[layer - 2]:
                    made = count  # it goes on behind the wrong one
                    break
                stood += 1
            steps = max(steps, made)
            came.append((made, stood, stood + (stood < left)))
        return came, steps

    def seconds_of_full(self) -> float:
        return sum(
            self.full(sum(length > k for length in self.lengths))
            for k in range(1, max(self.lengths))
        )

    def seconds_of(self, layer: int, count: int, chance: random.Random) -> float:
        """Each request always drafts as much."""
        places, seconds = dict.fromkeys(range(len(self.lengths)), 1), 0.0
        while places:
            came, steps = self._of(layer, places, [count] * len(places), chance)
            seconds += self.draft(layer, len(places), steps)
            self._advance(places, came)
        return seconds

    def _of(
        self, layer: int, places: dict[int, int], counts: Sequence[int], chance: random.Random
    ) -> tuple[list[tuple[int, int, int]], int]:
        part = Answers([self.lengths[i] for i in places], self.stands, self.row)
        return part.round(layer, list(places.values()), counts, chance)

    def _advance(self, places: dict[int, int], came: list[tuple[int, int, int]]) -> None:
        for i, (_, _, tokens) in zip(list(places), came, strict=True):
            places[i] += tokens
            if places[i] >= self.lengths[i]:
                del places[i]

    def seconds_of_auto(self, chooser: Chooser, chance: random.Random) -> float:
        places, seconds = dict.fromkeys(range(len(self.lengths)), 1), 0.0
        histories = {i: chooser.history() for i in places}
        while places:
            rows, mine = len(places), [histories[i] for i in places]
            most = [min(10, 40 - place) for place in places.values()]
            choice = chooser.choose(
                mine, [[]] * rows, most, written=list(places.values()), exit_layers=(2, 3)
            )
            slower = chance.uniform(0.95, 1.05)
            if choice.kind == "full":
                took, came = self.full(rows), [(0, 0, 1)] * rows
                chooser.costs.learn_full(rows, slower * took)
            else:
                came, steps = self._of(choice.exit_layer, places, choice.drafts, chance)
                took = self.draft(choice.exit_layer, rows, steps)
                chooser.costs.learn_drafted(choice.exit_layer, rows, steps, slower * took)
                for history, place, (made, stood, _) in zip(
                    mine, places.values(), came, strict=True
                ):
                    chooser.learn_drafts(
                        *(choice.exit_layer, history, NOTHING, made, stood), written=place
                    )
            got = [(history, each[2]) for history, each in zip(mine, came, strict=True)]
            chooser.learn_leads(
                rows, got, took, drafted=sum(choice.drafts), layer=choice.exit_layer
            )
            before = set(places)
            self._advance(places, came)
            for i in before - set(places):
                chooser.layers.lengths.add(self.lengths[i], ends=True)
            seconds += took
        return seconds


def batch(size: int, chance: random.Random, stands: Sequence[float], row: float) -> Answers:
    return Answers([chance.choice([8, 10, 13, 15, 18, 24]) for _ in range(size)], stands, row)


def fixed(answers: Sequence[Answers], layer: int, count: int) -> float:
    """Seconds in which all draft as much by one layer."""
    chance = random.Random(7)
    return sum(each.seconds_of(layer, count, chance) for each in answers)


@pytest.mark.parametrize("size", [1, 4, 8])
@pytest.mark.parametrize("row", [0.02, 0.1])
def test_short_answers_are_as_fast_as_of_the_best_layer_and_count(size: int, row: float) -> None:
    """Nearly: nobody said which those are."""
    chance, chooser = random.Random(size), Chooser(12, AGREEMENT)
    answers = [batch(size, chance, (0.9, 0.97), row) for _ in range(160)]
    for each in answers[:40]:
        each.seconds_of_auto(chooser, chance)
    full = sum(each.seconds_of_full() for each in answers[40:])
    auto = sum(each.seconds_of_auto(chooser, chance) for each in answers[40:])
    ways = [(layer, count) for layer in (2, 3) for count in (1, 2, 3, 4, 6, 8, 10)]
    best = min(fixed(answers[40:], *way) for way in ways)
    assert auto < 1.02 * full
    assert auto < best / 0.92


@pytest.mark.parametrize("size", [1, 8])
def test_short_answers_that_layers_draft_wrongly_take_no_longer(size: int) -> None:
    chance, chooser = random.Random(3), Chooser(12, AGREEMENT)
    answers = [
        Answers([7 + length for length in (8, 10, 13, 15, 18, 24, 9, 11)[:size]], (0.1, 0.1), 0.2)
        for _ in range(60)
    ]
    for each in answers[:30]:
        each.seconds_of_auto(chooser, chance)
    full = sum(each.seconds_of_full() for each in answers[30:])
    auto = sum(each.seconds_of_auto(chooser, chance) for each in answers[30:])
    assert auto < 1.02 * full


# Through the engine


def test_the_engine_tells_how_long_texts_got(agreeing: eecore.Model) -> None:
    told: list[tuple[int, bool]] = []
    engine = agreeing.without_prefix_cache().engine()
    lengths = engine.iterations.planner.chooser.layers.lengths
    lengths.add = lambda tokens, *, ends: told.append((tokens, ends))  # type: ignore[method-assign]
    prompts = [[7, 8, 9, 7, 8], [3, 4, 5]]

    def settings(count: int, *stops: int) -> SamplingParams:
        return SamplingParams(max_tokens=count, ignore_eos=True, stop_token_ids=stops)

    (full,) = eecore.generate(agreeing, prompts[:1], exit=Full(), sampling=settings(12))
    stop = full.token_ids[4]
    engine.add_request(prompts[0], exit=Auto(), sampling=settings(12, stop))
    engine.add_request(prompts[1], exit=Auto(), sampling=settings(9))
    list(engine.run())
    assert sorted(told) == sorted([(full.token_ids.index(stop) + 1, True), (9, False)])
    told.clear()
    engine.add_request(prompts[1], exit=Full(), sampling=settings(9))
    cancelled = engine.add_request(prompts[0], exit=Auto(), sampling=settings(9))
    engine.step()
    engine.cancel(cancelled)
    list(engine.run())
    assert told == []  # of other policies, and of what was cancelled, nothing
