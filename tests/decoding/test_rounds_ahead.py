"""Rounds planned and launched while another is in flight: looked-up drafts, and ``Auto``."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import eecore
from devices import check_logprobs, engine_of, load
from eecore import Auto, EngineConfig, Full, HeadDrafts, PromptLookup, SamplingParams
from eecore import SelfSpeculative as Layers
from eecore.decoding import iterate
from eecore.decoding.iterate import Iterations
from eecore.planning.auto import FULL, Choice, Chooser
from eecore.planning.draft_state import DraftState
from eecore.planning.proposal import MAX_AHEAD, NOTHING, Proposal
from eecore.planning.route import make_route
from eecore.planning.sources import proposals
from head_packs import write_pack
from tiny_models import random_prompts, scale_layers, write_model
from workloads import Request, python_calls, serve, tokens_of

pytestmark = pytest.mark.usefixtures("one_thread")

# A tiny model repeats itself before long, so that drafts are found in what it said.
PROMPTS = [[7, 8, 9] * 5, *random_prompts(1, 23, 9, 31, seed=4), [3, 4, 5, 6, 3, 4]]
HOT = {"temperature": 0.7, "top_k": 20, "logprobs": 1}

TEXT = Choice(asks=True)
HEAD = Choice(asks=True, ahead=3, thresholds=(0.0,) * MAX_AHEAD)
LAYER = Choice(layer=2, drafts=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    """A model whose first layers and whose head mostly draft what it says."""
    directory: Path = write_model(tmp_path_factory.mktemp("model"), seed=5)
    scale_layers(directory, dict.fromkeys(range(4), 0.04))
    write_pack(directory / "exits", load(directory), follows_tokens=True)
    return load(directory, kv_cache_tokens=2048)


class Told(Chooser):
    """Makes prescribed choices in turn, and verifies the first proposal of each request."""

    def __init__(self, num_layers: int, choices: Iterable[Choice]) -> None:
        super().__init__(num_layers, None)
        self._choices = itertools.cycle(choices)

    def choose(self, *_: Any, **__: Any) -> Choice:
        return next(self._choices)

    def pick(
        self, _: Any, given: Sequence[Sequence[Proposal]], **__: Any
    ) -> tuple[list[Proposal], float]:
        return [its[0] if its else NOTHING for its in given], 1.0


def tell(monkeypatch: pytest.MonkeyPatch, model: eecore.Model, *choices: Choice) -> None:
    """Let ``Auto`` make these choices in turn."""
    network = model.network
    told = Told(model.config.num_layers, choices)
    key = torch.get_num_threads(), network.draft_head
    monkeypatch.setattr(network, "learnt", {key: told})


class Watched:
    """Counts the rounds of an engine that were launched, and launched before the last was known."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched = self.overlapped = self.waited = 0
        launch, iterate = Iterations.launch, Iterations.iterate

        def launching(*given: Any, **more: Any) -> Any:
            flight = launch(*given, **more)
            self.launched += flight is not None
            self.overlapped += flight is not None and len(given) > 2 and given[2] is not None
            return flight

        def iterating(iterations: Any, works: Any, **more: Any) -> Any:
            self.waited += not any(work.is_prefill for work in works)
            return iterate(iterations, works, **more)

        monkeypatch.setattr(Iterations, "launch", launching)
        monkeypatch.setattr(Iterations, "iterate", iterating)


def served(
    model: eecore.Model,
    policies: Sequence[eecore.Exit],
    *,
    ahead: bool,
    stops: Sequence[int] = (),
    longer: int = 5,
    sampling: dict[str, Any] | None = None,
    **settings: int,
) -> list[eecore.Output]:
    """Requests of different lengths, by an engine that launches rounds ahead or waits for each."""
    engine = engine_of(model, EngineConfig(**{"kv_cache_tokens": 2048, **settings}), ahead=ahead)
    requests = []
    for i, prompt in enumerate(PROMPTS):
        length = {"max_tokens": 30 + longer * i, "ignore_eos": True, "stop_token_ids": tuple(stops)}
        own = SamplingParams(**length, **({**sampling, "seed": i} if sampling else {}))
        requests.append(Request(prompt, policies[i % len(policies)], own))
    outputs = serve(engine, requests)
    assert engine.pages.num_free == engine.pages.num_pages
    return outputs


def accepted(outputs: Iterable[eecore.Output]) -> int:
    return sum(output.stats.accepted for output in outputs)


@pytest.mark.parametrize("sampling", [None, HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "policies",
    [
        [PromptLookup()],
        [PromptLookup(1)],
        [PromptLookup(3, 4, 1)],
        [PromptLookup(40, 5, 2)],
        [PromptLookup(6), PromptLookup(3, min_ngram=1)],
        [PromptLookup(3), Full(), HeadDrafts(3, 0.0), Layers(2, 3)],
        [Auto(), PromptLookup(3)],
    ],
)
def test_looked_up_drafts_change_no_token(
    model: eecore.Model, policies: list[eecore.Exit], sampling: dict[str, Any] | None
) -> None:
    if any(isinstance(policy, Layers) for policy in policies) and sampling:
        policies = policies[:-1]  # layers that draft draw other tokens
    expected = served(model, [Full()], ahead=False, sampling=sampling)
    got = served(model, policies, ahead=True, sampling=sampling)
    assert tokens_of(got) == tokens_of(expected)
    assert accepted(got) > 0
    few = {"kv_cache_tokens": 160, "page_size": 4, "max_num_seqs": 4}
    few_pages = served(model, policies, ahead=True, sampling=sampling, **few)
    assert tokens_of(few_pages) == tokens_of(expected)
    stops = [output.token_ids[len(output.token_ids) // 2] for output in expected]
    ended = served(model, policies, ahead=True, sampling=sampling, stops=stops)
    for output, whole in zip(ended, expected, strict=True):
        end = min(whole.token_ids.index(stop) for stop in stops if stop in whole.token_ids)
        assert output.token_ids == whole.token_ids[: end + 1]


def test_no_round_of_looked_up_drafts_waits(
    model: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a proposal that is a round old costs: some drafts, where the text changes its course."""
    waiting = served(model, [PromptLookup()], ahead=False, longer=0)
    watched = Watched(monkeypatch)
    got = served(model, [PromptLookup()], ahead=True, longer=0)
    assert watched.waited == 0
    # Again only where requests end, since the others run the program of fewer rows.
    assert watched.launched - watched.overlapped <= 6
    assert watched.overlapped >= 12
    assert 0.5 * accepted(waiting) < accepted(got) <= accepted(waiting)


@pytest.mark.parametrize("sampling", [None, HOT], ids=["greedy", "sampled"])
def test_looked_up_drafts_beside_those_of_a_head(
    model: eecore.Model, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any] | None
) -> None:
    """A row continues with a head's drafts on the device, or with those that the host gives."""
    policies = [PromptLookup(3), HeadDrafts(3, 0.0)]
    waiting = served(model, policies, ahead=False, longer=0, sampling=sampling)
    watched = Watched(monkeypatch)
    got = served(model, policies, ahead=True, longer=0, sampling=sampling)
    assert tokens_of(got) == tokens_of(waiting)
    assert watched.waited == 0
    assert watched.launched - watched.overlapped <= 6
    assert watched.overlapped >= 12
    assert accepted(got[::2]) > 0.5 * accepted(waiting[::2]) > 0
    assert [output.stats.accepted for output in got[1::2]] == [
        output.stats.accepted for output in waiting[1::2]
    ]


@pytest.mark.parametrize(
    ("choice", "temperature"),
    [(FULL, 0.0), (TEXT, 0.0), (TEXT, 0.7), (HEAD, 0.0), (HEAD, 0.7), (LAYER, 0.0)],
)
def test_rounds_of_auto_do_not_wait(
    model: eecore.Model, monkeypatch: pytest.MonkeyPatch, choice: Choice, temperature: float
) -> None:
    sampling = {"temperature": temperature, "logprobs": 1}
    expected = served(model, [Full()], ahead=False, sampling=sampling)
    tell(monkeypatch, model, choice)
    watched = Watched(monkeypatch)
    got = served(model, [Auto()], ahead=True, sampling=sampling)
    assert tokens_of(got) == tokens_of(expected)
    for one, other in zip(got, expected, strict=True):
        check_logprobs(one, other)
    assert (accepted(got) > 0) == (choice is not FULL)
    assert watched.waited == 0
    assert watched.launched - watched.overlapped <= 0.35 * watched.launched


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_a_change_of_choice_waits_once(
    model: eecore.Model, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """A choice that another program runs is kept until the round in flight is known."""
    expected = served(model, [Full()], ahead=False)
    tell(monkeypatch, model, *(c._replace(rounds=rounds) for c in (FULL, TEXT, LAYER, HEAD)))
    got = served(model, [Auto()], ahead=True)
    assert tokens_of(got) == tokens_of(expected)
    assert accepted(got) > 0


def test_auto_learns_from_rounds_ahead(
    model: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.network, "learnt", {})
    got = served(model, [Auto()], ahead=True)
    assert tokens_of(got) == tokens_of(served(model, [Full()], ahead=False))
    (learnt,) = model.network.learnt.values()
    assert learnt.costs.full(len(PROMPTS)) is not None
    assert any(output.stats.full_depth_s for output in got)


# The proposals themselves


def after(tokens: list[int], verified: list[int], most: int, score: float = 0.5) -> Proposal:
    """The proposal of a source that proposes these tokens, while a round verifies other ones."""
    scores = tuple(score + 0.01 * k for k in range(len(tokens)))
    source = SimpleNamespace(name="text", propose=lambda *_: (tokens, scores))
    draft = SimpleNamespace(sources=[source], guided=None)
    sequence = SimpleNamespace(draft=draft, is_masked=False)
    work: Any = SimpleNamespace(sequence=sequence, max_drafts=most)
    (found,) = proposals([work], [verified])
    return found[0] if found else NOTHING


def test_a_proposal_for_the_round_after_the_one_in_flight() -> None:
    drafts = [1, 2, 3, 4, 5]
    # The round verifies the same drafts: all are accepted, and the model gives the next token.
    made = after(drafts, [1, 2], 9)
    assert (made.tokens, made.scores) == ([4, 5], (0.53, 0.54))
    assert made.before == ([1, 2, 3], (0.5, 0.51, 0.52))
    # Other drafts are rejected: the model gives the first token.
    assert after(drafts, [1, 9, 3], 9).tokens == [3, 4, 5]
    assert after(drafts, [9], 9).tokens == after(drafts, [], 9).tokens == [2, 3, 4, 5]
    assert after(drafts, [9], 2).tokens == [2, 3]
    assert after(drafts, [1, 2, 3, 4, 5, 6], 9) == after([], [1], 9) == NOTHING
    assert made.first(1) == Proposal([4], "text", (0.53,), made.before)


class Held(Chooser):
    """Makes one choice, whatever pays, of drafts that cost little."""

    def __init__(self, num_layers: int, choice: Choice, requests: int) -> None:
        super().__init__(num_layers, None)
        self._told = choice
        self.costs.learn_full(requests, 1.0)
        self.costs.curve("rows", requests, slope=0.01)

    def choose(self, *given: Any, **more: Any) -> Choice:
        super().choose(*given, **more)
        return self._told


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(
    ("choice", "ahead", "of_round", "of_row"),
    [
        (FULL, False, 60, 6),
        (FULL, True, 60, 6),
        (TEXT, False, 60, 8),
        (TEXT, True, 82, 8),
        (HEAD, False, 91, 13),
        (HEAD, True, 86, 6),
        (LAYER, False, 71, 6),
        (LAYER, True, 76, 6),
    ],
    ids=str,
)
def test_rounds_of_auto_cost_few_calls(
    model: eecore.Model,
    monkeypatch: pytest.MonkeyPatch,
    choice: Choice,
    ahead: bool,
    of_round: int,
    of_row: int,
    rows: int,
) -> None:
    """In most rounds of one choice; some make a choice or a program."""
    ticks = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr(iterate, "time", ticks)  # all rounds take the same time
    network = model.network
    held = Held(model.config.num_layers, choice, rows)
    key = torch.get_num_threads(), network.draft_head
    monkeypatch.setattr(network, "learnt", {key: held})
    engine = engine_of(model, EngineConfig(kv_cache_tokens=4096), ahead=ahead)
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    for warm_up in (24, 16):
        for prompt in random_prompts(*[5] * rows, seed=rows):
            engine.add_request([7, 8, 9] * 5 + prompt, exit=Auto(), sampling=sampling)
        for _ in range(warm_up):
            engine.step()
        if warm_up == 16:
            calls = statistics.median([python_calls(engine, 1) for _ in range(8)])
        for request_id in engine.requests:
            engine.cancel(request_id)
    assert calls <= of_round + rows * of_row


def test_drafts_after_a_round_in_flight_are_less_likely() -> None:
    """They are accepted only if that round gives the tokens before them."""
    chooser = Chooser(4, None)
    chooser.costs.learn_full(1, 1.0)
    drafts = [DraftState(make_route(Auto(), range(1, 5), sampled=False))]
    (now,), speed = chooser.pick(drafts, [[Proposal([1, 2], "text", (0.65,) * 2)]])
    (later,), late_speed = chooser.pick(drafts, [[after([1, 2, 3, 4], [1], 9, 0.65)]])
    assert len(now.tokens) == len(later.tokens) == 2
    assert 1.0 < late_speed < speed
