"""Prompt lookup: drafts from the text itself, and the outputs with them."""

from __future__ import annotations

import random
from typing import Any

import pytest

import eecore
from devices import check_logprobs, engine_of, load
from eecore import EngineConfig, Full, PromptLookup, SamplingParams
from eecore.planning.ngrams import MAX_CANDIDATES, NgramIndex
from tiny_models import random_prompts
from tiny_t5 import write_t5
from workloads import Request, serve, tokens_of

pytestmark = pytest.mark.usefixtures("one_thread")

# A tiny model repeats itself before long, so that drafts are found in what it said.
PROMPTS = [[7, 8, 9] * 5, *random_prompts(1, 23, 9, 31, seed=4), [3, 4, 5, 6, 3, 4]]


def propose(text: list[int], longest: int, shortest: int, most: int) -> tuple[list[int], int]:
    """The reference proposal: tries every n-gram at every place."""
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        for place in range(len(text) - 1, size - 1, -1):
            if text[place - size : place] == text[-size:]:
                drafts = list(text)
                for at in range(place, place + most):
                    drafts.append(drafts[at])
                return drafts[len(text) :], size
    return [], 0


@pytest.mark.parametrize("letters", [1, 2, 3, 9])
@pytest.mark.parametrize(("longest", "shortest"), [(1, 1), (2, 1), (3, 2), (6, 2), (6, 6)])
def test_the_longest_ngram_at_its_latest_place(letters: int, longest: int, shortest: int) -> None:
    draw = random.Random(10 * letters + longest)
    text: list[int] = []
    index = NgramIndex(longest, shortest)
    found = 0
    while len(text) < MAX_CANDIDATES:
        more = [draw.randrange(letters) for _ in range(draw.choice((0, 1, 2, 7)))]
        text += more
        index.extend(more)
        assert len(index.tokens) == len(text)
        for most in (0, 1, 5, 40):
            drafts = index.propose(most)
            assert drafts == propose(text, longest, shortest, most)
            found += len(drafts[0])
    assert found > 0 or shortest == 6


def test_the_latest_of_many_places_are_compared() -> None:
    index = NgramIndex(4, 2)
    index.extend([9, 1, 2, 5, *([0, 1, 2, 3] * MAX_CANDIDATES), 9, 1, 2])
    assert index.propose(1) == ([3], 2)  # 9, 1, 2 is too far back


def test_nothing_is_drafted_after_a_stop_token() -> None:
    index = NgramIndex(3, 2)
    index.extend([1, 2, 3, 4, 5, 6, 1, 2])
    assert index.propose(4)[0] == [3, 4, 5, 6]
    assert index.propose(4, stops={5, 3})[0] == [3]
    assert index.propose(4, stops={5})[0] == [3, 4, 5]
    assert index.propose(0)[0] == []


def outputs_of(model: eecore.Model, exit: Any, **settings: Any) -> list[eecore.Output]:
    settings = {"max_tokens": 40, "ignore_eos": True, **settings}
    return eecore.generate(model, PROMPTS, exit=exit, **settings)


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 5, "repetition_penalty": 1.3},
    {"temperature": 2.0, "top_p": 0.8, "min_p": 0.01, "logprobs": 2},
    {"repetition_penalty": 1.5, "logprobs": 0},
]


@pytest.mark.parametrize("filters", FILTERS)
def test_whatever_is_drawn_is_drawn_without_drafts(
    tiny: eecore.Model, filters: dict[str, Any]
) -> None:
    """Not only the distribution is the same, but also the tokens of a seed."""
    sampling = [
        SamplingParams(max_tokens=40, ignore_eos=True, seed=seed, **filters)
        for seed in range(len(PROMPTS))
    ]
    expected, got = (
        eecore.generate(tiny, PROMPTS, exit=policy, sampling=sampling)
        for policy in (Full(), PromptLookup(5, min_ngram=1))
    )
    assert sum(output.stats.drafted for output in got) > 0
    assert tokens_of(got) == tokens_of(expected)
    for one, other in zip(got, expected, strict=True):
        check_logprobs(one, other)


@pytest.mark.parametrize("tokens", [64, 88, 130])
def test_preempted_requests_go_on(tiny: eecore.Model, tokens: int) -> None:
    expected = tokens_of(outputs_of(tiny, Full()))
    engine = engine_of(tiny, EngineConfig(kv_cache_tokens=tokens, page_size=4))
    sampling = SamplingParams(max_tokens=33, ignore_eos=True)
    outputs = serve(engine, [Request(prompt, PromptLookup(6), sampling) for prompt in PROMPTS])
    assert tokens_of(outputs) == [ids[:33] for ids in expected]
    assert sum(output.stats.preemptions for output in outputs) > 0


def test_an_encoder_decoder(tmp_path: Any) -> None:
    """Drafts come from the decoder's own text."""
    model = load(write_t5(tmp_path, "t5"), kv_cache_tokens=1024)
    inputs = random_prompts(9, 4, seed=1)
    settings = {"max_tokens": 40, "ignore_eos": True}
    full = eecore.generate(model, inputs, exit="full", **settings)
    drafted = eecore.generate(model, inputs, exit=PromptLookup(min_ngram=1), **settings)
    assert tokens_of(drafted) == tokens_of(full)
    assert sum(output.stats.accepted for output in drafted) > 0
