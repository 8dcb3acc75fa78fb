"""Drafts from past outputs: what is kept and found; no output depends on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import eecore
from devices import engine_of
from eecore import Auto, EngineConfig, Full
from eecore.planning.auto import Choice, Chooser
from eecore.planning.draft_state import draft_state
from eecore.planning.past_outputs import END, LONGEST, SHORTEST, PastDrafts, PastOutputs
from eecore.planning.proposal import NOTHING, Proposal
from eecore.scheduling.sequence import Sequence
from tiny_models import random_prompts
from workloads import tokens_of

pytestmark = pytest.mark.usefixtures("one_thread")


def text_of(prompt: list[int], output: list[int], stops: tuple[int, ...] = ()) -> Sequence:
    """A request with a prompt and the tokens generated so far."""
    sampling = eecore.SamplingParams(stop_token_ids=list(stops))
    sequence = Sequence("a", prompt, sampling, Auto(), 0, frozenset())
    sequence.output_ids += output
    return sequence


def proposed(past: PastOutputs, sequence: Sequence, most: int = 8) -> list[int]:
    draft = draft_state(sequence, range(1, 5))
    draft.past = past
    assert PastDrafts().serves(draft)
    return PastDrafts().propose(sequence, draft, most)[0]


def test_an_output_is_proposed_where_its_prompt_comes_again() -> None:
    past = PastOutputs(1000)
    past.add(text_of([1, 2, 3, 4], [5, 6, 7, 8, 9]))
    assert proposed(past, text_of([1, 2, 3, 4], [])) == [5, 6, 7, 8, 9]
    assert proposed(past, text_of([1, 2, 3, 4], [5, 6])) == [7, 8, 9]
    assert proposed(past, text_of([1, 2, 3, 4], [5, 6]), 2) == [7, 8]
    assert proposed(past, text_of([1, 2, 3, 4], [5, 6]), 0) == []
    assert proposed(past, text_of([9, 9], [6, 7, 8])) == [9]
    assert proposed(past, text_of([1, 2, 3, 4], [5, 7])) == []
    assert proposed(past, text_of([3, 4], [])) == [], f"shorter than {SHORTEST} tokens"
    assert proposed(past, text_of([1, 2, 3, 4], [5], stops=(7,))) == [6, 7]


def test_nothing_goes_on_from_one_output_into_the_next() -> None:
    past = PastOutputs(1000)
    past.add(text_of([1, 2, 3], [4, 5]))
    past.add(text_of([6, 7, 8], [9]))
    assert proposed(past, text_of([1, 2, 3], [])) == [4, 5]
    assert proposed(past, text_of([1, 2, 3], [4, 5])) == []
    assert max(1 << 18, 2**31) < END


def test_the_longer_match_wins_and_of_equals_the_later_one() -> None:
    past = PastOutputs(1000)
    past.add(text_of([0, 0, 1, 2, 3], [4, 4]))
    past.add(text_of([9, 1, 2, 3], [5, 5]))
    past.add(text_of([8, 1, 2, 3], [6, 6]))
    assert proposed(past, text_of([0, 0, 1, 2, 3], [])) == [4, 4]
    assert proposed(past, text_of([7, 1, 2, 3], [])) == [6, 6]


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 40, 1000])
def test_no_more_is_kept_than_was_asked_for(max_tokens: int) -> None:
    past = PastOutputs(max_tokens)
    for first in range(50):
        past.add(text_of([first, 1, 2], list(range(first, first + first % 30))))
        assert past.num_tokens <= max_tokens
    assert past.num_tokens > max_tokens // 2 or max_tokens < 40


def test_what_comes_again_stays() -> None:
    past = PastOutputs(100)
    often = text_of([1, 2, 3], [4, 5, 6])
    past.add(often)
    for number in range(100):
        past.add(text_of([100 + number] * 3, [200 + number] * 5))
        if number % 5 == 0:
            past.add(often)
    assert proposed(past, text_of([1, 2, 3], [])) == [4, 5, 6]
    assert proposed(past, text_of([100] * 3, [])) == []


def test_an_empty_output_and_a_long_one() -> None:
    past = PastOutputs(64)
    past.add(text_of([1, 2, 3], []))
    assert past.num_tokens == 0
    past.add(text_of(list(range(500)), list(range(500, 900))))
    assert past.num_tokens == 32
    ending = list(range(500 - LONGEST, 500))
    assert proposed(past, text_of(ending, []), 99) == list(range(500, 515))


PROMPTS = random_prompts(5, 23, 9, 31, seed=4)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 3, "top_k": 20}])
def test_a_repeated_prompt_drafts_its_past_output_and_no_output_depends_on_it(
    tiny: eecore.Model, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chooser takes every proposal of past outputs, whatever it costs."""

    def pick(_: Chooser, _drafts: Any, given: Any, **__: Any) -> tuple[list[Proposal], float]:
        past = [[p for p in several if p.source == "past"] for several in given]
        return [(each or [NOTHING])[0] for each in past], 1.0

    monkeypatch.setattr(Chooser, "choose", lambda *_, **__: Choice(asks=True, rounds=1))
    monkeypatch.setattr(Chooser, "pick", pick)
    settings = {"max_tokens": 24, "ignore_eos": True, **settings}
    expected = tokens_of(eecore.generate(tiny, PROMPTS, exit=Full(), **settings))
    config = replace(tiny.engine_config, draft_history_tokens=4096)
    model = eecore.Model(tiny.network, tiny.tokenizer, config)
    for is_known in (False, True, True):
        outputs = eecore.generate(model, PROMPTS, exit=Auto(), **settings)
        assert tokens_of(outputs) == expected
        if is_known:
            assert all(output.stats.accepted >= 12 for output in outputs)


def test_no_output_is_kept_unless_asked_for(tiny: eecore.Model) -> None:
    engine = engine_of(tiny)
    assert engine.iterations.planner.past is None
    config = replace(tiny.engine_config, draft_history_tokens=512)
    engine = engine_of(tiny, config)
    engine.add_request([1, 2, 3], exit="full", sampling=eecore.SamplingParams(max_tokens=4))
    list(engine.run())
    name = engine.add_request([1, 2, 3], exit="full", sampling=eecore.SamplingParams(max_tokens=9))
    engine.step()
    engine.step()
    engine.cancel(name)
    past = engine.iterations.planner.past
    assert past is not None
    assert past.num_tokens == 3 + 4 + 1 + 3 + 2 + 1


def test_a_history_has_no_fewer_than_0_tokens() -> None:
    with pytest.raises(eecore.RequestError, match=r"draft_history_tokens: expected .*got -1"):
        EngineConfig(draft_history_tokens=-1)
