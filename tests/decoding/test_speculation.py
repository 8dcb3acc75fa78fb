"""Self-speculation gives what the full model gives, and does no layer's work twice."""

from __future__ import annotations

from typing import Any

import pytest

import eecore
from devices import Traced, cpu_only, engine_of
from eecore import DraftAndVerify, EngineConfig, SamplingParams, SelfSpeculative
from eecore.decoding.capture import RunProgram
from eecore.exits import Exit
from eecore.planning.draft_stop import AdaptiveDraftStop
from reference_decoding import ReferenceModel
from tiny_models import random_prompts
from workloads import Request, serve

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_prompts(5, 1, 23, 9, 2, 16, 17, 31, seed=1)


def tokens_of(model: eecore.Model, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    settings = {"exit": "full", "max_tokens": 20, "ignore_eos": True, **settings}
    return [output.token_ids for output in eecore.generate(model, prompts, **settings)]


@pytest.fixture(scope="module")
def full_tokens(agreeing: eecore.Model) -> list[list[int]]:
    return tokens_of(agreeing, PROMPTS)


def test_full_is_the_reference(tiny: eecore.Model, reference: ReferenceModel) -> None:
    prompts = PROMPTS[:4]
    assert tokens_of(tiny, prompts) == [reference.generate(p, 20) for p in prompts]


@pytest.mark.parametrize("policy", [SelfSpeculative(2, 6), DraftAndVerify({3}, {4})])
def test_stops_inside_a_run_of_accepted_drafts(
    agreeing: eecore.Model, full_tokens: list[list[int]], policy: Exit
) -> None:
    seen_inside = 0
    for prompt, expected in zip(PROMPTS, full_tokens, strict=True):
        for stop in sorted(set(expected[2:9])):
            (output,) = eecore.generate(
                agreeing, prompt, exit=policy, max_tokens=20, stop_token_ids=[stop], ignore_eos=True
            )
            assert output.token_ids == expected[: expected.index(stop) + 1]
            assert output.finish_reason == "stop"
            assert len(output.exit_layers) == len(output.confidences) == len(output.token_ids)
            seen_inside += output.exit_layers[-1] < 5 and output.stats.accepted > 0
    assert seen_inside or isinstance(policy, DraftAndVerify)


@pytest.mark.parametrize("ahead", [False, True], ids=["landed", "ahead"])
def test_logprobs_of_drawn_drafts_are_those_of_the_full_model(
    agreeing: eecore.Model, ahead: bool
) -> None:
    """Some accepted drafts are not the tokens that the full model has drawn at their places."""
    engine = engine_of(agreeing, EngineConfig(kv_cache_tokens=1024), ahead=ahead)
    ways: list[dict[str, Any]] = [{"temperature": 1.5, "logprobs": 1}, {}, {"temperature": 1.0}]
    requests = [
        Request(
            prompt,
            SelfSpeculative(2, 4),
            SamplingParams(max_tokens=20, seed=i, ignore_eos=True, **ways[i % len(ways)]),
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    outputs = [o for o in serve(engine, requests) if o.logprobs is not None]
    assert len(outputs) > 1
    assert sum(output.stats.accepted for output in outputs) > 5
    for output in outputs:
        text = output.prompt_token_ids + output.token_ids
        (whole,) = eecore.generate(agreeing, [text], max_tokens=0, prompt_logprobs=0)
        assert whole.prompt_logprobs is not None
        scores = whole.prompt_logprobs[-len(output.token_ids) :]
        expected = [score.logprob for score in scores if score is not None]
        assert output.logprobs == pytest.approx(expected, abs=1e-4)


def test_exit_layers_tell_drafts_from_verified_tokens(agreeing: eecore.Model) -> None:
    outputs = eecore.generate(
        agreeing, PROMPTS, exit=SelfSpeculative(2, 4), max_tokens=20, ignore_eos=True
    )
    for output in outputs:
        assert set(output.exit_layers) <= {2, 5}
        assert output.exit_layers[0] == 5  # the prompt runs through all layers
        assert output.exit_layers.count(2) == output.stats.accepted
    assert sum(o.stats.accepted for o in outputs) > 40


def prefilled(
    model: eecore.Model,
    policy: Exit,
    config: EngineConfig | None = None,
    run: RunProgram | None = None,
    ahead: bool | None = None,
) -> eecore.Engine:
    """An engine in which every prompt has its first token."""
    engine = engine_of(model, config, run=run, ahead=ahead)
    for prompt in PROMPTS:
        engine.add_request(
            prompt, exit=policy, sampling=SamplingParams(max_tokens=16, ignore_eos=True)
        )
    engine.step()
    return engine


@cpu_only
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize(("exit_layer", "num_drafts"), [(1, 3), (2, 5), (4, 2)])
def test_no_position_runs_through_a_layer_twice_in_a_round(
    agreeing: eecore.Model, exit_layer: int, num_drafts: int, reuse: bool
) -> None:
    traced = Traced()
    engine = prefilled(agreeing, SelfSpeculative(exit_layer, num_drafts, reuse=reuse), run=traced)
    outputs = [step.output for step in engine.run() if step.output]
    assert sum(output.stats.layers_run for output in outputs) == traced.executions
    drafted = sum(output.stats.drafted for output in outputs)
    accepted = sum(output.stats.accepted for output in outputs)
    rounds = sum(output.stats.generated_tokens for output in outputs) - len(outputs) - accepted
    again = 0 if reuse else drafted * exit_layer
    assert traced.executions == 5 * (drafted + rounds) + again


@pytest.mark.parametrize("ahead", [False, True], ids=["landed", "ahead"])
def test_rejected_positions_give_their_pages_back(agreeing: eecore.Model, ahead: bool) -> None:
    """With the next round in flight, all but the pages that two rounds may need."""
    config = EngineConfig(kv_cache_tokens=512, page_size=2)
    engine = prefilled(agreeing, SelfSpeculative(1, 7), config, ahead=ahead)
    while engine.has_unfinished:
        engine.step()
        held = 0
        for sequence in engine.requests.values():
            fewest, most = (
                engine.pages.pages_for(sequence.num_computed + under_way)
                for under_way in (0, 2 * 8 if ahead else 0)
            )
            assert fewest <= len(sequence.pages) <= most
            assert sequence.num_computed == sequence.num_tokens - 1
            held += len(sequence.pages)
        assert engine.pages.num_free == engine.pages.num_pages - held


def test_adaptive_draft_stop_by_hand() -> None:
    rule = AdaptiveDraftStop(0.8, 0.8)
    for drafted, accepted, acceptance, threshold in (
        (4, 2, 0.7, 0.801),  # m = 0.45 + 0.25: fewer drafts
        (2, 2, 0.85, 0.802),  # m = 0.35 + 0.5
        (8, 8, 0.925, 0.802),  # all drafts used: stays
        (3, 3, 0.9625, 0.801),  # stopped too early: more drafts
        (0, 0, 0.9625, 0.801),
    ):
        before, rule = rule.threshold, rule.after(drafted, accepted, num_drafts=8)
        assert (rule.acceptance, rule.threshold) == pytest.approx((acceptance, threshold))
        assert rule.before == before
