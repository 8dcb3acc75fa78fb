"""Self-speculation gives what the full model gives, and does no layer's work twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import eecore
from devices import Traced, cpu_only, engine_of, load
from eecore import DraftAndVerify, EngineConfig, SamplingParams, SelfSpeculative
from eecore.decoding.capture import RunProgram
from eecore.exits import Exit
from eecore.planning.draft_stop import AdaptiveDraftStop
from reference_decoding import ReferenceModel
from tiny_models import random_prompts, write_model
from workloads import Request, serve

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_prompts(5, 1, 23, 9, 2, 16, 17, 31, seed=1)
POLICIES: dict[str, Exit] = {
    "E1-d1": SelfSpeculative(1, 1),
    "E1-d5": SelfSpeculative(1, 5),
    "E2-d3": SelfSpeculative(2, 3),
    "E3-d8": SelfSpeculative(3, 8),
    "E4-d4": SelfSpeculative(4, 4),
    "E2-unsure": SelfSpeculative(2, 6, draft_threshold=0.3),
    "E2-never-sure": SelfSpeculative(2, 6, draft_threshold=1.0),
    "skip-deep": DraftAndVerify({3, 4}, {2, 4}),
    "skip-first": DraftAndVerify({0}, {4}, num_drafts=3, adaptive=False),
    "skip-mlp": DraftAndVerify(skip_mlp={3}, num_drafts=5, adaptive=False),
    "skip-all": DraftAndVerify(range(5), range(5), num_drafts=2, adaptive=False),
}


def tokens_of(model: eecore.Model, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    settings = {"exit": "full", "max_tokens": 20, "ignore_eos": True, **settings}
    return [output.token_ids for output in eecore.generate(model, prompts, **settings)]


@pytest.fixture(scope="module")
def full_tokens(agreeing: eecore.Model) -> list[list[int]]:
    return tokens_of(agreeing, PROMPTS)


def test_full_is_the_reference(tiny: eecore.Model, reference: ReferenceModel) -> None:
    prompts = PROMPTS[:4]
    assert tokens_of(tiny, prompts) == [reference.generate(p, 20) for p in prompts]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_greedy_output_is_that_of_full(
    agreeing: eecore.Model, full_tokens: list[list[int]], policy: Exit
) -> None:
    outputs = eecore.generate(agreeing, PROMPTS, exit=policy, max_tokens=20, ignore_eos=True)
    assert [output.token_ids for output in outputs] == full_tokens
    for prompt, expected in list(zip(PROMPTS, full_tokens, strict=True))[:3]:
        single = eecore.generate(agreeing, prompt, exit=policy, max_tokens=20, ignore_eos=True)
        assert single[0].token_ids == expected


@pytest.mark.parametrize("policy", [SelfSpeculative(1, 4), DraftAndVerify({1, 3}, {2})])
def test_drafts_that_are_mostly_wrong_change_nothing(tiny: eecore.Model, policy: Exit) -> None:
    assert tokens_of(tiny, PROMPTS, exit=policy) == tokens_of(tiny, PROMPTS)


@pytest.mark.parametrize("family", ["qwen3", "qwen2_windows", "llama_tied"])
def test_other_families(tmp_path: Path, family: str) -> None:
    model = load(write_model(tmp_path, family), kv_cache_tokens=1024)
    expected = tokens_of(model, PROMPTS[:4])
    for policy in (SelfSpeculative(2, 4), DraftAndVerify({1}, {2})):
        assert tokens_of(model, PROMPTS[:4], exit=policy) == expected


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 6])
def test_max_tokens_is_met_exactly(
    agreeing: eecore.Model, full_tokens: list[list[int]], max_tokens: int
) -> None:
    """Edges around d = 4: a round never drafts tokens that could not be emitted."""
    outputs = eecore.generate(
        agreeing, PROMPTS, exit=SelfSpeculative(2, 4), max_tokens=max_tokens, ignore_eos=True
    )
    assert [o.token_ids for o in outputs] == [t[:max_tokens] for t in full_tokens]
    assert {o.finish_reason for o in outputs} == {"length"}
    assert all((o.stats.drafted > 0) == (max_tokens > 2) for o in outputs)


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


def test_a_drafted_end_ends_each_text_of_a_batch(
    agreeing: eecore.Model, full_tokens: list[list[int]]
) -> None:
    stops = [expected[5] for expected in full_tokens]
    outputs = eecore.generate(
        agreeing,
        PROMPTS,
        exit=SelfSpeculative(2, 6),
        sampling=[
            SamplingParams(max_tokens=20, stop_token_ids=[stop], ignore_eos=True) for stop in stops
        ],
    )
    for output, expected, stop in zip(outputs, full_tokens, stops, strict=True):
        assert output.token_ids == expected[: expected.index(stop) + 1]


@pytest.mark.parametrize("policy", [SelfSpeculative(2, 5), DraftAndVerify({2, 3}, {4})])
def test_repetition_penalty_reaches_draft_and_verification(
    agreeing: eecore.Model, full_tokens: list[list[int]], policy: Exit
) -> None:
    settings = {"repetition_penalty": 1.6}
    expected = tokens_of(agreeing, PROMPTS, **settings)
    assert expected != full_tokens
    assert tokens_of(agreeing, PROMPTS, exit=policy, **settings) == expected


def test_logprobs_are_those_of_the_full_model(agreeing: eecore.Model) -> None:
    for count in (0, 3):
        full, spec = (
            eecore.generate(agreeing, PROMPTS, exit=e, max_tokens=12, logprobs=count)
            for e in (eecore.Full(), SelfSpeculative(2, 4))
        )
        for one, other in zip(full, spec, strict=True):
            assert one.logprobs is not None
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


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


@cpu_only
def test_draft_and_verify_shares_the_layers_below_the_first_skipped(agreeing: eecore.Model) -> None:
    traced = Traced()
    policy = DraftAndVerify({2}, {3}, num_drafts=3, adaptive=False)
    engine = prefilled(agreeing, policy, run=traced)
    outputs = [step.output for step in engine.run() if step.output]
    drafted = sum(output.stats.drafted for output in outputs)
    accepted = sum(output.stats.accepted for output in outputs)
    rounds = sum(output.stats.generated_tokens for output in outputs) - len(outputs) - accepted
    # Drafted positions go through the deeper layers twice.
    assert traced.executions == 5 * (drafted + rounds) + 3 * drafted
    assert sum(output.stats.layers_run for output in outputs) == traced.executions


@cpu_only
def test_rows_that_draft_no_more_do_not_run(agreeing: eecore.Model) -> None:
    """Each drafted token is one row of a draft, however ragged the drafts of a batch are."""
    traced = Traced()
    engine = prefilled(agreeing, SelfSpeculative(2, 6, draft_threshold=0.1), run=traced)
    outputs = [step.output for step in engine.run() if step.output]
    drafted = sum(output.stats.drafted for output in outputs)
    steps = traced.of("append_drafts")
    assert sum(call.num_tokens for call in steps) == drafted
    assert min(call.num_tokens for call in steps) < len(PROMPTS)


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


def test_counters(agreeing: eecore.Model) -> None:
    """Each round emits its accepted drafts and one token, and drafts min(d, tokens left - 1)."""
    engine = prefilled(agreeing, SelfSpeculative(2, 4))
    lengths: dict[str, list[int]] = {}
    outputs = []
    while engine.has_unfinished:
        for step in engine.step():
            lengths.setdefault(step.request_id, []).append(len(step.token_ids))
            outputs += [step.output] if step.output else []
    for output in outputs:
        left, drafted, accepted = 15, 0, 0
        for emitted in lengths[output.request_id]:
            drafted += min(4, left - 1)
            accepted += emitted - 1
            left -= emitted
        assert (output.stats.drafted, output.stats.accepted) == (drafted, accepted)
        assert output.stats.draft_acceptance == accepted / drafted


def test_acceptance_is_not_available_without_drafts(agreeing: eecore.Model) -> None:
    (output,) = eecore.generate(agreeing, [1, 2], exit=SelfSpeculative(2), max_tokens=2)
    assert output.stats.draft_acceptance is None


def test_draft_threshold_stops_the_draft(agreeing: eecore.Model) -> None:
    outputs = {
        threshold: eecore.generate(
            agreeing,
            PROMPTS,
            exit=SelfSpeculative(2, 6, draft_threshold=threshold),
            max_tokens=20,
            ignore_eos=True,
        )
        for threshold in (None, 0.0, 0.5, 1.0)
    }
    drafted = {t: sum(o.stats.drafted for o in outs) for t, outs in outputs.items()}
    assert drafted[None] == drafted[0.0] > drafted[0.5] > drafted[1.0]
    for output in outputs[1.0]:  # one draft a round, but for a last round of one token
        rounds = output.stats.generated_tokens - 1 - output.stats.accepted
        assert output.stats.drafted in (rounds, rounds - 1)


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


def test_adaptive_threshold_starts_lower_for_sampled_requests(agreeing: eecore.Model) -> None:
    engine = agreeing.engine()
    policies = [DraftAndVerify({3}), DraftAndVerify({3}, initial_threshold=0.25)]
    for temperature in (0.0, 1.0):
        for policy in policies:
            engine.add_request(
                [1, 2, 3], exit=policy, sampling=SamplingParams(temperature=temperature)
            )
    engine.step()
    engine.step()
    starts = [s.draft.stop.threshold for s in engine.requests.values()]
    assert starts == pytest.approx([0.8, 0.25, 0.5, 0.25], abs=0.0011)
