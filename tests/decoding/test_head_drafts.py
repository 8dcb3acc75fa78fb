"""Draft heads of every kind: the tokens of full depth in any company."""

from __future__ import annotations

from typing import Any

import pytest

import eecore
from devices import check_logprobs, cpu_only, engine_of
from eecore import (
    Auto,
    ConfidentExit,
    EngineConfig,
    Full,
    HeadDrafts,
    PromptLookup,
    SamplingParams,
    SelfSpeculative,
)
from eecore.decoding.iterate import Iterations
from eecore.planning.heads import AheadDrafts
from eecore.planning.proposal import Drafts
from published_heads import FOLLOWING, KINDS, NAMES, PROMPTS, Models
from tiny_models import random_prompts
from workloads import Request, python_calls, serve, tokens_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*expected a head for"),
]

POLICIES = [
    HeadDrafts(),
    HeadDrafts(99, 0.0),
    Auto(),
    HeadDrafts(1, 0.0),
    Auto(lookup=False),
    HeadDrafts(3, 0.9),
    HeadDrafts(3, 1.0),
]
FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0, "logprobs": 1},
    {"temperature": 0.6, "top_k": 5, "repetition_penalty": 1.3},
    {"temperature": 2.0, "top_p": 0.8, "min_p": 0.01, "logprobs": 2},
    {"repetition_penalty": 1.5, "logprobs": 0},
]


def some_each(values: list[Any], count: int = 2) -> list[Any]:
    """Every head with so many of some values, all of which have their turn."""
    turns = ((name, count * i + k) for i, name in enumerate(NAMES) for k in range(count))
    chosen = [(name, values[turn % len(values)]) for name, turn in turns]
    return [pytest.param(*each, id=f"{each[0]}-{values.index(each[1])}") for each in chosen]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def outputs_of(model: eecore.Model, exit: Any, **settings: Any) -> list[eecore.Output]:
    return eecore.generate(
        model, PROMPTS, exit=exit, **{"max_tokens": 40, "ignore_eos": True, **settings}
    )


@pytest.mark.parametrize(("name", "policy"), some_each(POLICIES))
def test_greedy_output_is_that_of_full(models: Models, name: str, policy: Any) -> None:
    model = models[name]
    expected = outputs_of(model, Full())
    for _ in range(2):
        assert tokens_of(outputs_of(model, policy)) == tokens_of(expected)
    (alone,) = eecore.generate(model, PROMPTS[2], exit=policy, max_tokens=40, ignore_eos=True)
    assert alone.token_ids == expected[2].token_ids


@pytest.mark.parametrize("policy", [HeadDrafts(5, 0.0), Auto()])
@pytest.mark.parametrize(("name", "filters"), some_each(FILTERS))
def test_what_is_drawn_is_drawn_without_drafts(
    models: Models, name: str, filters: dict[str, Any], policy: Any
) -> None:
    sampling = [
        SamplingParams(max_tokens=30, ignore_eos=True, seed=seed, **filters)
        for seed in range(len(PROMPTS))
    ]
    expected, got = (
        eecore.generate(models[name], PROMPTS, exit=exit, sampling=sampling)
        for exit in (Full(), policy)
    )
    assert tokens_of(got) == tokens_of(expected)
    for one, other in zip(got, expected, strict=True):
        check_logprobs(one, other)


@pytest.mark.parametrize("kind", FOLLOWING)
def test_drafts_that_are_accepted_save_rounds(models: Models, kind: str) -> None:
    """What noise drafts is rejected, and not verified where it is to be certain."""
    found = {}
    for name in (f"{kind} following", kind):
        outputs = outputs_of(models[name], HeadDrafts(6, 0.0))
        accepted, drafted = (
            sum(getattr(output.stats, count) for output in outputs)
            for count in ("accepted", "drafted")
        )
        found[name] = accepted / drafted
        rounds = [len(output.token_ids) - 1 - output.stats.accepted for output in outputs]
        assert (max(rounds) < 26) == (name != kind)
        for output, count in zip(outputs, rounds, strict=True):
            assert output.stats.layers_run == 4 * (count + output.stats.drafted)
            assert output.exit_layers.count(0) == output.stats.accepted
            assert output.stats.contract == "draft head (6 drafts): lossless"
    assert found[f"{kind} following"] > 0.5
    assert found[kind] < 0.1
    assert sum(output.stats.drafted for output in outputs_of(models[kind], HeadDrafts(4, 1.0))) == 0


COMPANY = [
    HeadDrafts(8, 0.0),
    ConfidentExit(0.3),
    Full(),
    Auto(),
    PromptLookup(3),
    SelfSpeculative(2, 3),
]


def served(
    model: eecore.Model,
    policies: list[Any],
    *,
    ahead: bool | None = None,
    sampling: dict[str, Any] | None = None,
    **settings: Any,
) -> list[eecore.Output]:
    """Requests of different lengths under policies in turn; afterwards all pages are free."""
    engine = engine_of(model, EngineConfig(**{"kv_cache_tokens": 2048, **settings}), ahead=ahead)
    requests = []
    for i, prompt in enumerate(PROMPTS):
        params = {"max_tokens": 17 + 5 * i, "ignore_eos": True, "seed": i, **(sampling or {})}
        requests.append(Request(prompt, policies[i % len(policies)], SamplingParams(**params)))
    outputs = serve(engine, requests)
    assert engine.pages.num_free == engine.pages.num_pages
    return outputs


@pytest.mark.parametrize("name", NAMES)
def test_all_policies_share_a_batch_and_pages_are_few(models: Models, name: str) -> None:
    """The keys of the head change no token; preempted requests go on where they were."""
    model = models[name]
    expected = tokens_of(served(model, [Full()]))
    few = {"kv_cache_tokens": 124, "page_size": 4, "max_num_seqs": 5}
    for settings in ({}, few):
        outputs = served(model, COMPANY, **settings)
        for i, output in enumerate(outputs):
            if not isinstance(COMPANY[i % len(COMPANY)], ConfidentExit):
                assert output.token_ids == expected[i]
        assert settings == {} or sum(output.stats.preemptions for output in outputs) > 0


MIXES = [
    [HeadDrafts(99, 0.0)],
    [HeadDrafts(5, 0.0), HeadDrafts(2, 0.5)],
    [HeadDrafts(4, 0.0), Full()],
    [HeadDrafts()],
    [HeadDrafts(4, 0.0), PromptLookup(3)],
    [HeadDrafts(3, 0.9)],
    [HeadDrafts(4, 0.0), SelfSpeculative(2, 3)],
]


@pytest.mark.parametrize(("name", "policies"), some_each(MIXES))
def test_drafts_that_stay_on_the_device(models: Models, name: str, policies: list[Any]) -> None:
    """A round that is launched before the last one is known drafts and accepts what it would."""
    model = models[name]
    expected, got = (
        served(model, policies, ahead=ahead, max_num_seqs=3) for ahead in (False, True)
    )
    assert tokens_of(got) == tokens_of(expected)
    for one, other in zip(got, expected, strict=True):
        if PromptLookup(3) in policies:  # other drafts are looked up while a round is in flight
            continue
        assert one.stats.accepted == other.stats.accepted
        assert one.exit_layers == other.exit_layers
    stops = [output.token_ids[len(output.token_ids) // 2] for output in expected]
    ended = served(model, policies, ahead=True, sampling={"stop_token_ids": tuple(stops)})
    for output, whole in zip(ended, expected, strict=True):
        end = min(whole.token_ids.index(s) for s in stops if s in whole.token_ids)
        assert output.token_ids == whole.token_ids[: end + 1]
        assert output.finish_reason == "stop"
    few = served(model, policies, ahead=True, kv_cache_tokens=120, page_size=4)
    assert tokens_of(few) == tokens_of(expected)


@pytest.mark.parametrize("kind", FOLLOWING)
def test_what_is_drawn_after_drafts_on_the_device(models: Models, kind: str) -> None:
    policies, sampling = (
        [HeadDrafts(4, 0.0), HeadDrafts(2, 0.3)],
        {"temperature": 0.8, "logprobs": 1},
    )
    got, expected, full = (
        served(models[f"{kind} following"], each, ahead=ahead, sampling=sampling)
        for each, ahead in ((policies, True), (policies, False), ([Full()], False))
    )
    assert tokens_of(got) == tokens_of(expected) == tokens_of(full)
    assert sum(output.stats.accepted for output in got) > 0
    for one, other in zip(got, expected, strict=True):
        check_logprobs(one, other)


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "landed"])
def test_rows_that_go_on_cost_few_calls(models: Models, ahead: bool) -> None:
    following = models["recurrent following"]
    for rows in (1, 8):
        engine = engine_of(following, EngineConfig(kv_cache_tokens=2048), ahead=ahead)
        for prompt in random_prompts(*[5] * rows, seed=rows):
            sampling = SamplingParams(max_tokens=100, ignore_eos=True)
            engine.add_request(prompt, exit=HeadDrafts(3, 0.0), sampling=sampling)
        for _ in range(4):
            engine.step()
        assert python_calls(engine) <= 60 + 6 * rows
        list(engine.run())


@pytest.mark.parametrize("guided", [False, True], ids=["free", "guided"])
def test_a_round_is_launched_while_another_is_in_flight(
    models: Models, monkeypatch: pytest.MonkeyPatch, guided: bool
) -> None:
    """Not with a guide, which has to see what a head drafted."""
    following = models["recurrent following"]
    launched, launch = [], Iterations.launch

    def seen(self: Any, works: Any, after: Any = None, **more: Any) -> Any:
        launched.append((after is not None, launch(self, works, after, **more)))
        return launched[-1][1]

    monkeypatch.setattr(Iterations, "launch", seen)
    engine = engine_of(following, ahead=True)
    guide = {"guide": eecore.Guide.regex("[a-z]*")} if guided else {}
    for prompt in PROMPTS:
        sampling = SamplingParams(max_tokens=40, ignore_eos=not guided, **guide)
        engine.add_request(prompt, exit=HeadDrafts(3, 0.0), sampling=sampling)
    steps = 0
    while engine.has_unfinished:
        engine.step()
        steps += 1
    overlapped = sum(after and flight is not None for after, flight in launched)
    assert overlapped == 0 if guided else overlapped > 0.7 * steps


@pytest.mark.parametrize("policy", [HeadDrafts(6, 0.0), Auto()])
@pytest.mark.parametrize("name", ["eagle3 following", "dspark following"])
def test_a_guide_is_followed(models: Models, name: str, policy: Any) -> None:
    guide = eecore.Guide.regex("[a-c]{3}[x-z]{5}")
    expected, got = (
        eecore.generate(models[name], PROMPTS[:4], exit=exit, max_tokens=12, guide=guide)
        for exit in (Full(), policy)
    )
    assert tokens_of(got) == tokens_of(expected)


@cpu_only
@pytest.mark.parametrize("weights", ["int8", "int4", None])
@pytest.mark.parametrize("kind", FOLLOWING)
def test_of_a_quantised_model_and_in_bfloat16(
    models: Models, kind: str, weights: str | None
) -> None:
    """The head is in few bits beside few bits, and its drafts are the same, mostly."""
    dtype = "bfloat16" if weights is None else None
    model = models.load(f"{kind} following", weights=weights, dtype=dtype, kv_cache_tokens=2048)
    expected, got = (outputs_of(model, exit) for exit in (Full(), HeadDrafts(4, 0.0)))
    assert tokens_of(got) == tokens_of(expected)
    assert sum(o.stats.accepted for o in got) > 0.4 * sum(o.stats.drafted for o in got)


PROPOSE = AheadDrafts.propose


def copied(texts: list[list[int]]) -> Any:
    """In place of what a head drafted the model's own continuation, but for every fifth token of a
    text."""
    whole = {tuple(text[:8]): text for text in texts}

    def propose(self: AheadDrafts, sequence: Any, draft: Any, most: int) -> Drafts:
        (made, scores), begin = PROPOSE(self, sequence, draft, most), sequence.num_tokens
        right = whole[tuple(sequence.tokens(0, 8))][begin : begin + len(made)]
        tokens = [(t + 1) % 256 if (begin + k) % 5 == 0 else t for k, t in enumerate(right)]
        return tokens, scores[: len(tokens)]

    return propose


@pytest.mark.long
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_prompts_give_the_tokens_of_full(
    models: Models, kind: str, temperature: float, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With noise, with a head that is mostly right where there is one, and with drafts that are
    right four times of five."""
    prompts = random_prompts(*(8 + i % 23 for i in range(100)), seed=6)
    sampling = [
        SamplingParams(max_tokens=32, ignore_eos=True, temperature=temperature, seed=seed)
        for seed in range(100)
    ]

    def run(name: str, policy: Any) -> list[eecore.Output]:
        engine = engine_of(
            models[name], EngineConfig(kv_cache_tokens=2048, max_num_seqs=batch), ahead=False
        )
        asked = zip(prompts, sampling, strict=True)
        return serve(engine, [Request(prompt, policy, params) for prompt, params in asked])

    names = [kind, f"{kind} following"] if kind in FOLLOWING else [kind]
    expected = tokens_of(run(kind, Full()))
    for name in names:
        for policy in (HeadDrafts(6, 0.0), Auto()):
            assert tokens_of(run(name, policy)) == expected
    texts = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    monkeypatch.setattr(AheadDrafts, "propose", copied(texts))
    outputs = run(kind, HeadDrafts(6, 0.0))
    assert tokens_of(outputs) == expected
    accepted, drafted = (
        sum(getattr(output.stats, count) for output in outputs) for count in ("accepted", "drafted")
    )
    assert accepted > 0.4 * drafted > 0
