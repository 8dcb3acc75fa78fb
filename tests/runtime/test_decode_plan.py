"""Decoding by plans gives what the plain iteration gives, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_confident_exit import MEASURES, SETTINGS, policy_of

import eecore
from eecore import (
    ConfidentExit,
    Engine,
    EngineConfig,
    FixedExit,
    Full,
    Output,
    SamplingParams,
    SelfSpeculative,
)
from eecore.decoding.captured import Always, CapturedPlans
from eecore.decoding.decode_plan import Control, DecodeKind, DecodePlan, DecodeRow, OnHost
from eecore.decoding.planned import PlannedDecoding
from eecore.decoding.speculative_plan import SpeculativeKind, SpeculativePlan, SpeculativeRow
from eecore.exits import Exit
from eecore.models import KVCache
from tiny_models import random_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_prompts(3, 11, 1, 20, 7)
LENGTHS = (12, 3, 9, 1, 7)

AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["waits", "ahead"])
"""Whether the next iteration is launched before the outcome of the last is known."""


class Recorder(OnHost):
    """Counts the flags that it is asked about, and those that let the body run."""

    asked = went_on = 0

    def unless(self, flag, body) -> None:  # type: ignore[no-untyped-def]
        self.asked += 1
        self.went_on += not flag.item()
        super().unless(flag, body)


def plans_of(engine: Engine, control: Control, *, ahead: bool = False) -> PlannedDecoding:
    return PlannedDecoding(engine._runner, lambda plan: plan.run(control), ahead=ahead)


def run(
    model: eecore.Model,
    policies: list[Exit],
    control: Control | None,
    stops: list[int] | None = None,
    *,
    ahead: bool = False,
    **settings: int,
) -> list[Output]:
    settings.setdefault("kv_cache_tokens", 512)
    engine = Engine(model.network, model.tokenizer, EngineConfig(**settings))
    if control is not None:
        engine._planned = plans_of(engine, control, ahead=ahead)
    for i, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(
            max_tokens=LENGTHS[i],
            logprobs=0 if i == 1 else None,
            stop_token_ids=tuple(stops or ())[: i + 1],
        )
        policy = policies[i % len(policies)]
        engine.add_request(prompt, exit=policy, sampling=sampling, request_id=str(i))
    done = [step.output for step in engine.run() if step.output is not None]
    assert engine.pages.num_free == engine.pages.num_pages
    return sorted(done, key=lambda output: output.request_id)


def check_same(planned: list[Output], plain: list[Output]) -> None:
    for got, expected in zip(planned, plain, strict=True):
        assert got.token_ids == expected.token_ids
        assert got.exit_layers == expected.exit_layers
        assert got.confidences == expected.confidences
        assert got.logprobs == expected.logprobs
        for name in ("layers_run", "layers_filled", "fill_calls", "mean_exit_layer"):
            assert getattr(got.stats, name) == getattr(expected.stats, name)


@AHEAD
@pytest.mark.parametrize("policy", [Full(), FixedExit(2)], ids=["full", "fixed"])
def test_without_checks(tiny: eecore.Model, policy: Exit, ahead: bool) -> None:
    control = Recorder()
    check_same(run(tiny, [policy], control, ahead=ahead), run(tiny, [policy], None))
    assert control.asked == 0


@AHEAD
@pytest.mark.parametrize("batch", ["each", "all"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("measure", MEASURES)
def test_confident_exits(
    tiny: eecore.Model, measure: str, setting: str, batch: str, ahead: bool
) -> None:
    policy = policy_of(measure, setting, batch)
    control = Recorder()
    check_same(run(tiny, [policy], control, ahead=ahead), run(tiny, [policy], None))
    assert control.asked > 0


@pytest.mark.parametrize(("threshold", "bodies"), [(0.0, 0), (0.999999, 3)])
def test_deeper_layers_run_while_a_row_survives(
    tiny: eecore.Model, threshold: float, bodies: int
) -> None:
    """Bodies that run per iteration: none when all rows leave at once, else all of four layers."""
    control = Recorder()
    outputs = run(tiny, [ConfidentExit(threshold)], control)
    iterations = control.asked - control.went_on if bodies == 0 else control.asked / bodies
    assert control.went_on == bodies * iterations
    assert iterations >= max(len(output.token_ids) for output in outputs) - 1
    assert {e for output in outputs for e in output.exit_layers[1:]} == {1 + bodies}


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("batch", ["each", "all"])
def test_a_body_that_runs_for_nothing_has_no_effect(
    agreeing: eecore.Model, measure: str, batch: str
) -> None:
    """What a host that launches ahead of its knowledge rests on."""
    for policy in (policy_of(measure, "plain", batch), SelfSpeculative(2, 4, 0.2)):
        check_same(run(agreeing, [policy], Always()), run(agreeing, [policy], None))


def test_rows_that_are_done_write_no_keys(tiny: eecore.Model) -> None:
    """What a plan leaves in the cache is what the plain iteration leaves."""
    caches = []
    for control in (OnHost(), None):
        torch.manual_seed(0)
        engine = Engine(tiny.network, tiny.tokenizer, EngineConfig(kv_cache_tokens=256))
        kv = engine._runner.kv
        kv.k.zero_()
        kv.v.zero_()
        if control is not None:
            engine._planned = plans_of(engine, control)
        for prompt in PROMPTS:
            engine.add_request(
                prompt, exit=policy_of("softmax", "plain", "each"), sampling=SamplingParams(8)
            )
        list(engine.run())
        caches.append((kv.k.clone(), kv.v.clone()))
    for planned, plain in zip(*caches, strict=True):
        assert torch.equal(planned, plain)


@AHEAD
@pytest.mark.parametrize("threshold", [None, 0.2, 1.0])
@pytest.mark.parametrize(("exit_layer", "num_drafts"), [(2, 3), (1, 6), (3, 1)])
def test_self_speculation(
    agreeing: eecore.Model,
    exit_layer: int,
    num_drafts: int,
    threshold: float | None,
    ahead: bool,
) -> None:
    policy = SelfSpeculative(exit_layer, num_drafts, threshold)
    control = Recorder()
    planned = run(agreeing, [policy], control, ahead=ahead)
    plain = run(agreeing, [policy], None)
    check_same(planned, plain)
    for got, expected in zip(planned, plain, strict=True):
        assert (got.stats.drafted, got.stats.accepted) == (
            expected.stats.drafted,
            expected.stats.accepted,
        )
    assert (control.asked > 0) == (num_drafts > 1)


@AHEAD
@pytest.mark.parametrize(
    "policy", [SelfSpeculative(2, 4), Full(), ConfidentExit(0.05, min_exit_layer=2)]
)
def test_the_end_of_the_text_ends_it(agreeing: eecore.Model, policy: Exit, ahead: bool) -> None:
    free = run(agreeing, [policy], None)
    stops = [output.token_ids[len(output.token_ids) // 2] for output in free]
    planned = run(agreeing, [policy], OnHost(), stops, ahead=ahead)
    check_same(planned, run(agreeing, [policy], None, stops))
    assert any(output.finish_reason == "stop" for output in planned)


def test_other_requests_go_the_plain_way(tiny: eecore.Model) -> None:
    mixed: list[Exit] = [Full(), policy_of("softmax", "plain", "each"), FixedExit(2)]
    check_same(run(tiny, mixed, OnHost()), run(tiny, mixed, None))
    ablation: list[Exit] = [SelfSpeculative(2, 3, reuse=False)]
    check_same(run(tiny, ablation, OnHost()), run(tiny, ablation, None))


@AHEAD
@pytest.mark.parametrize(
    "policy", [policy_of("softmax", "plain", "each"), SelfSpeculative(2, 3)], ids=["each", "spec"]
)
def test_preempted_requests_come_back(agreeing: eecore.Model, policy: Exit, ahead: bool) -> None:
    settings = {"max_num_seqs": 5, "page_size": 4, "kv_cache_tokens": 24}
    planned = run(agreeing, [policy], OnHost(), ahead=ahead, **settings)
    assert sum(output.stats.preemptions for output in planned) > 0
    check_same(planned, run(agreeing, [policy], None, **settings))


class Launches(PlannedDecoding):
    """Counts its launches, and those behind a flight that was still out."""

    launched = behind = 0

    def launch(self, works, after=None):  # type: ignore[no-untyped-def]
        flight = super().launch(works, after)
        self.launched += flight is not None
        self.behind += flight is not None and after is not None
        return flight


@pytest.mark.parametrize("policy", [Full(), SelfSpeculative(2, 3)], ids=["full", "spec"])
def test_the_next_iteration_is_launched_before_the_last_is_known(
    agreeing: eecore.Model, policy: Exit
) -> None:
    engine = agreeing.engine()
    planned = Launches(engine._runner, lambda plan: plan.run(OnHost()), ahead=True)
    engine._planned = planned
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    for prompt in PROMPTS:
        engine.add_request(prompt, exit=policy, sampling=sampling)
    steps = 0
    while engine.has_unfinished:
        engine.step()
        steps += 1
    assert planned.behind > 0.8 * planned.launched
    assert planned.launched <= steps + 1  # an iteration of which nothing is left, at most


@pytest.mark.parametrize("policy", [Full(), SelfSpeculative(2, 3)], ids=["full", "spec"])
def test_requests_come_and_go_while_an_iteration_is_out(
    agreeing: eecore.Model, policy: Exit
) -> None:
    """One is cancelled, one comes, with iterations launched that know of neither."""
    outputs = eecore.generate(agreeing, PROMPTS, exit=policy, max_tokens=16)
    alone = {tuple(output.prompt_token_ids): output.token_ids for output in outputs}
    engine = Engine(agreeing.network, None, EngineConfig(kv_cache_tokens=512))
    engine._planned = plans_of(engine, OnHost(), ahead=True)
    sampling = SamplingParams(max_tokens=16)
    names = [engine.add_request(p, exit=policy, sampling=sampling) for p in PROMPTS[:4]]
    for _ in range(3):
        engine.step()
    cancelled = engine.cancel(names[1])
    assert cancelled is not None
    assert cancelled.token_ids == alone[tuple(PROMPTS[1])][: len(cancelled.token_ids)]
    engine.step()
    engine.add_request(PROMPTS[4], exit=policy, sampling=sampling)
    done = [step.output for step in engine.run() if step.output is not None]
    assert len(done) == 4
    for output in done:
        assert output.token_ids == alone[tuple(output.prompt_token_ids)]
    assert engine.pages.num_free == engine.pages.num_pages
    # What is still out by now is of nobody; the engine serves on.
    engine.add_request(PROMPTS[0], exit=policy, sampling=sampling)
    (again,) = (step.output for step in engine.run() if step.output is not None)
    assert again.token_ids == alone[tuple(PROMPTS[0])]


@pytest.mark.parametrize("policy", [Full(), SelfSpeculative(2, 3)], ids=["full", "spec"])
@pytest.mark.parametrize("where", ["launch", "land"])
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_a_failure_with_an_iteration_out_changes_no_request(
    agreeing: eecore.Model,
    monkeypatch: pytest.MonkeyPatch,
    policy: Exit,
    where: str,
    calls: int,
) -> None:
    engine = agreeing.engine()
    planned = engine._planned = plans_of(engine, OnHost(), ahead=True)
    whole, left = getattr(planned, where), [calls]

    def broken(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise RuntimeError("the device is out of memory")
        return whole(*args)

    monkeypatch.setattr(planned, where, broken)
    for i in range(2):
        sampling = SamplingParams(max_tokens=9 + i)
        engine.add_request(PROMPTS[i], exit=policy, sampling=sampling, request_id=str(i))
    given: dict[str, list[int]] = {"0": [], "1": []}
    failures = 0
    while engine.has_unfinished:
        try:
            for step in engine.step():
                given[step.request_id] += step.token_ids
        except RuntimeError:
            failures += 1
    assert failures == 1
    for i in range(2):
        (expected,) = eecore.generate(agreeing, PROMPTS[i], max_tokens=9 + i)
        assert given[str(i)] == expected.token_ids
    assert engine.pages.num_free == engine.pages.num_pages


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("decoding", ["planned", "captured", "polled"])
@pytest.mark.parametrize("mode", ["full", "fixed", "each", "all", "speculative"])
def test_the_setting(agreeing_directory: Path, device: str, decoding: str, mode: str) -> None:
    """Every way to decode gives the tokens of the plain one, on the device."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if device == "cpu" and decoding != "planned":
        pytest.skip("graphs are for CUDA")
    policy = {
        "full": Full(),
        "fixed": FixedExit(2),
        "each": policy_of("softmax", "plain", "each"),
        "all": policy_of("state", "plain", "all"),
        "speculative": SelfSpeculative(2, 3),
    }[mode]
    given = []
    for way in ("plain", decoding):
        settings = EngineConfig(kv_cache_tokens=512, decoding=way)
        model = eecore.load(agreeing_directory, device=device, engine=settings)
        outputs = eecore.generate(model, PROMPTS, exit=policy, max_tokens=8)
        outputs += eecore.generate(model, PROMPTS[:3], exit=policy, max_tokens=5)
        given.append([(output.token_ids, output.exit_layers) for output in outputs])
    assert given[0] == given[1]


def test_captured_is_for_cuda(tiny: eecore.Model, tiny_directory: Path) -> None:
    assert tiny.engine(EngineConfig(decoding="planned")).captures == []
    said = "expected plain or planned on cpu, got captured"
    with pytest.raises(eecore.ModelError, match=said):
        tiny.engine(EngineConfig(decoding="captured"))
    with pytest.raises(eecore.ModelError, match=said):
        eecore.load(tiny_directory, device="cpu", decoding="captured")
    with pytest.raises(ValueError, match=r"decoding: expected plain, planned, .*, got 'fast'"):
        EngineConfig(decoding="fast")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("in_segments", [False, True])
@pytest.mark.parametrize("mode", ["each", "speculative"])
def test_on_cuda_a_captured_iteration_waits_for_nothing_and_allocates_nothing(
    agreeing_directory: Path, mode: str, in_segments: bool
) -> None:
    network = eecore.load(agreeing_directory, device="cuda", kv_cache_tokens=512).network
    kv = KVCache.allocate(network.config, 8, 16, device=network.device, dtype=network.dtype)
    plan: DecodePlan | SpeculativePlan
    if mode == "each":
        plan = DecodePlan(network, kv, DecodeKind(5, (2, 3)), 2, 4)
        given: list[Any] = [DecodeRow(3, i, [i], (0.5, 0.5)) for i in range(2)]
    else:
        plan = SpeculativePlan(network, kv, SpeculativeKind(2, 3), 2, 4, 1)
        given = [SpeculativeRow(3, i, [i], 3, -1.0, []) for i in range(2)]
    run_captured = CapturedPlans(network.device, in_segments=in_segments)
    plan.load(given)
    run_captured(plan)
    assert run_captured.captures[0].seconds > 0.0
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan.load(given)
        run_captured(plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
