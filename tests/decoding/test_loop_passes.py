"""Passes of a looped model in which each row is in a loop of its own."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import eecore
from devices import cpu_only, engine_of
from eecore import Auto, ConfidentExit, EngineConfig, FixedExit, Full, Output, SamplingParams
from eecore.decoding.iterate import Iterations
from eecore.decoding.loop_step import TRIAL_TOKENS, TURN_OF_THE_FASTER, LoopStep, Race
from eecore.models import LlamaModel
from eecore.planning.auto import FULL, Chooser
from eecore.planning.costs import Costs
from looped_models import ENDS, LOOPS, PROMPTS, write_looped
from tripwire import Fault

pytestmark = [cpu_only, pytest.mark.usefixtures("one_thread")]

POLICIES = [FixedExit(ENDS[0]), Full(), ConfidentExit(0.35, "gate")]
SAMPLING = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=2)
LATE = [7 * i % 96 for i in range(40)]
OF_LATE = replace(SAMPLING, max_tokens=3, prompt_logprobs=1)
CHUNK = 25


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    directory = tmp_path_factory.mktemp("looped")
    write_looped(directory)
    return eecore.load(directory, device="cpu", dtype="float32", kv_cache_tokens=512)


@pytest.fixture(scope="module")
def alone(model: eecore.Model) -> list[Output]:
    return [
        eecore.generate(model, [prompt], exit=exit, sampling=SAMPLING)[0]
        for prompt, exit in zip(PROMPTS, POLICIES, strict=True)
    ]


@pytest.fixture(scope="module")
def late(model: eecore.Model) -> Output:
    return eecore.generate(model, [LATE], sampling=OF_LATE)[0]


def began(model: eecore.Model, **config: Any) -> eecore.Engine:
    """An engine whose three requests have their first tokens."""
    engine = engine_of(model, EngineConfig(512, **{"prefix_cache": False, **config}))
    for i, (prompt, exit) in enumerate(zip(PROMPTS, POLICIES, strict=True)):
        engine.add_request(prompt, exit=exit, sampling=SAMPLING, request_id=str(i))
    engine.step()
    return engine


def finish(engine: eecore.Engine) -> dict[str, Output]:
    return {step.request_id: step.output for step in engine.run() if step.output is not None}


def check(outputs: dict[str, Output], alone: list[Output]) -> None:
    for number, expected in enumerate(alone):
        output = outputs[str(number)]
        assert output.error is None
        assert output.token_ids == expected.token_ids
        assert output.logprobs == expected.logprobs
        assert output.exit_layers == expected.exit_layers
        assert output.confidences == expected.confidences


def test_a_row_that_is_done_begins_its_next_token_beside_the_loops_of_others(
    model: eecore.Model, alone: list[Output]
) -> None:
    engine = began(model)
    gets = [{step.request_id for step in engine.step()} for _ in range(2 * LOOPS)]
    assert all("0" in got for got in gets)
    assert ["1" in got for got in gets] == [number % LOOPS == 0 for number in range(1, 7)]
    outputs = finish(engine)
    outputs["0"] = outputs.get("0", alone[0])
    for number, output in enumerate(map(outputs.get, "012")):
        assert output is not None
        stats, expected = output.stats, alone[number]
        assert output.token_ids == expected.token_ids
        if output is not expected:
            # A row that is left alone runs its loops in one step.
            assert 2 * LOOPS <= stats.passes <= sum(output.exit_layers[1:]) // ENDS[0]
            assert stats.passes < stats.rows_in_passes <= 3 * stats.passes
            assert stats.layers_run == expected.stats.layers_run


def loses_its_pages(engine: eecore.Engine, name: str = "1") -> None:
    engine.scheduler.preempt(engine.requests[name])


def loses_its_pages_after_exits(engine: eecore.Engine) -> None:
    loses_its_pages(engine, "2")


def loses_its_pages_to_another_while_all_wait(engine: eecore.Engine) -> None:
    loses_its_pages(engine)
    for name in "012":
        engine.hold(name)
    waits_while_a_prompt_comes(engine)
    engine.hold("late")
    engine.resume("1")
    engine.step()
    engine.resume("0")
    engine.resume("2")
    engine.resume("late")


def waits(engine: eecore.Engine) -> None:
    engine.hold("1")
    engine.step()
    engine.resume("1")


def waits_while_a_prompt_comes(engine: eecore.Engine) -> None:
    engine.add_request([9] * 40, exit=Full(), sampling=SAMPLING, request_id="late")
    engine.step()


@pytest.mark.parametrize(
    "happens",
    [
        loses_its_pages,
        loses_its_pages_after_exits,
        loses_its_pages_to_another_while_all_wait,
        waits,
        waits_while_a_prompt_comes,
    ],
)
@pytest.mark.parametrize("passes", [1, 2])
def test_what_happens_in_the_middle_of_a_token_leaves_no_trace(
    model: eecore.Model, alone: list[Output], happens: Any, passes: int
) -> None:
    engine = began(model)
    for _ in range(LOOPS + passes):
        engine.step()
    happens(engine)
    check(finish(engine), alone)


def test_a_pass_that_fails_is_run_again_for_each_row(
    model: eecore.Model,
    alone: list[Output],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, logger="eecore")
    engine = began(model)
    for _ in range(LOOPS + 1):
        engine.step()
    outcomes, failed = LoopStep.outcomes, list[str]()

    def fail(self: LoopStep, *given: Any) -> Any:
        if not failed:
            failed.append("once")
            raise Fault("outcomes")
        return outcomes(self, *given)

    monkeypatch.setattr(LoopStep, "outcomes", fail)
    check(finish(engine), alone)
    assert engine.num_failed_iterations == 1


def test_auto_requests_of_full_depth_share_passes_with_rows_that_exit(
    model: eecore.Model, alone: list[Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, shares, run = list[Any](), list[float](), Iterations._run
    monkeypatch.setattr(Chooser, "choose", lambda *_, **more: shares.append(more["share"]) or FULL)
    monkeypatch.setattr(
        Iterations, "_run", lambda self, step: programs.append(step) or run(self, step)
    )
    engine = engine_of(model, EngineConfig(512, prefix_cache=False))
    for i, exit in enumerate([POLICIES[0], Auto(), POLICIES[2]]):
        engine.add_request(PROMPTS[i], exit=exit, sampling=SAMPLING, request_id=str(i))
    engine.step()
    for _ in range(2 * LOOPS):
        programs.clear()
        engine.step()
        assert [type(program) for program in programs] == [LoopStep]
    assert set(shares) == {1 / 3}
    outputs = finish(engine)
    check({"0": alone[0], **outputs}, alone)


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_that_all_run_full_depth_go_on_in_step_and_are_timed_there(
    tmp_path: Path, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the row that exits earlier is gone, the others no longer read the head in each loop."""
    loops = 6
    write_looped(tmp_path, total_ut_steps=loops)
    model = eecore.load(tmp_path, device="cpu", dtype="float32", kv_cache_tokens=512)
    happened, outcomes, learn_full = list[str](), LoopStep.outcomes, Costs.learn_full

    def in_loop(self: LoopStep, *given: Any) -> Any:
        happened.append("loop")
        return outcomes(self, *given)

    def learns(self: Costs, *given: Any) -> None:
        happened.append("full depth")
        learn_full(self, *given)

    monkeypatch.setattr(LoopStep, "outcomes", in_loop)
    monkeypatch.setattr(Costs, "learn_full", learns)
    monkeypatch.setattr(Chooser, "choose", lambda *_, **__: FULL)
    engine = engine_of(model, EngineConfig(512, prefix_cache=False), ahead=ahead)
    sampling = replace(SAMPLING, max_tokens=40)
    engine.add_request(PROMPTS[0], exit=FixedExit(ENDS[0]), sampling=sampling, request_id="short")
    engine.add_request(PROMPTS[1], exit=Auto(), sampling=sampling, request_id="0")
    for _ in range(1 + loops + 1):
        engine.step()
    engine.add_request(PROMPTS[2], exit=Auto(), sampling=sampling, request_id="1")
    for _ in range(loops + 3):
        engine.step()
    assert "full depth" not in happened
    engine.cancel("short")
    steps = list[set[str]]()
    for _ in range(12):
        happened.clear()
        steps.append({step.request_id for step in engine.step()})
        assert happened in ([], ["loop"], ["full depth"])
    assert "full depth" in happened
    assert all(got == {"0", "1"} for got in steps[loops:])


# A prompt beside rows that decode


def add_late(engine: eecore.Engine, name: str = "late") -> None:
    engine.add_request(LATE, exit=Full(), sampling=OF_LATE, request_id=name)


def check_late(outputs: dict[str, Output], late: Output, name: str = "late") -> None:
    output = outputs[name]
    assert output.error is None
    assert output.token_ids == late.token_ids
    assert output.logprobs == late.logprobs
    assert output.prompt_logprobs == late.prompt_logprobs


def test_a_chunk_runs_one_loop_beside_rows_that_decode(
    model: eecore.Model, alone: list[Output], late: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, next_loop = list[int](), LlamaModel.next_loop

    def counted(network: LlamaModel, hidden: Any, *given: Any, **named: Any) -> Any:
        sizes.append(len(hidden))
        return next_loop(network, hidden, *given, **named)

    monkeypatch.setattr(LlamaModel, "next_loop", counted)
    engine = began(model, max_prefill_chunk=CHUNK)
    add_late(engine)
    for size in [CHUNK] * LOOPS + [len(LATE) - CHUNK] * LOOPS:
        assert not engine.requests["late"].output_ids
        sizes.clear()
        got = {step.request_id for step in engine.step()}
        assert [count for count in sizes if count > len(PROMPTS) + 1] == [size]
        assert "0" in got
    assert engine.requests["late"].output_ids
    outputs = finish(engine)
    check(outputs, alone)
    check_late(outputs, late)
    add_late(engine)
    sizes.clear()
    engine.step()
    assert sizes == [CHUNK] * LOOPS


def test_a_short_prompt_runs_all_loops_at_once(model: eecore.Model) -> None:
    """One that has no more to run than a loop of a whole chunk."""
    engine = began(model, max_prefill_chunk=CHUNK)
    length = CHUNK // LOOPS
    engine.add_request(LATE[:length], exit=Full(), sampling=SAMPLING, request_id="short")
    engine.add_request(LATE[: length + 1], exit=Full(), sampling=SAMPLING, request_id="longer")
    engine.hold("longer")
    assert "short" in {step.request_id for step in engine.step()}
    engine.resume("longer")
    assert "longer" not in {step.request_id for step in engine.step()}
    assert "longer" in {step.request_id for step in engine.step()}


def late_loses_its_pages(engine: eecore.Engine) -> None:
    loses_its_pages(engine, "late")


def late_loses_its_pages_to_others(engine: eecore.Engine) -> None:
    loses_its_pages(engine, "late")
    engine.hold("late")
    engine.add_request([9] * 90, exit=Full(), sampling=SAMPLING, request_id="other")
    engine.step()
    engine.resume("late")


def late_waits(engine: eecore.Engine) -> None:
    engine.hold("late")
    engine.step()
    add_late(engine, "twin")
    engine.step()
    engine.resume("late")


def late_is_cancelled(engine: eecore.Engine) -> None:
    engine.cancel("late")
    add_late(engine)


def another_is_cancelled(engine: eecore.Engine) -> None:
    add_late(engine, "twin")
    engine.step()
    engine.cancel("twin")


def a_twin_comes(engine: eecore.Engine) -> None:
    add_late(engine, "twin")


def all_others_wait(engine: eecore.Engine) -> None:
    for name in "012":
        engine.hold(name)
    engine.step()
    for name in "012":
        engine.resume(name)


@pytest.mark.parametrize(
    "happens",
    [
        late_loses_its_pages,
        late_loses_its_pages_to_others,
        late_waits,
        late_is_cancelled,
        another_is_cancelled,
        a_twin_comes,
        all_others_wait,
    ],
)
@pytest.mark.parametrize("passes", [1, 2, LOOPS, LOOPS + 1])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_what_happens_in_the_middle_of_a_chunk_leaves_no_trace(
    model: eecore.Model,
    alone: list[Output],
    late: Output,
    happens: Any,
    passes: int,
    prefix_cache: bool,
) -> None:
    engine = began(model, max_prefill_chunk=CHUNK, prefix_cache=prefix_cache, page_size=4)
    cached = engine.num_cached_pages
    add_late(engine)
    for number in range(passes):
        assert engine.num_cached_pages - cached == (number >= LOOPS and prefix_cache) * (CHUNK // 4)
        engine.step()
    happens(engine)
    outputs = finish(engine)
    check(outputs, alone)
    check_late(outputs, late)
    if "twin" in outputs:
        check_late(outputs, late, "twin")


@pytest.mark.parametrize("passes", [1, LOOPS, 2 * LOOPS - 1])
def test_a_chunk_whose_iteration_fails_goes_on(
    model: eecore.Model,
    alone: list[Output],
    late: Output,
    passes: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, logger="eecore")
    engine = began(model, max_prefill_chunk=CHUNK)
    add_late(engine)
    for _ in range(passes):
        engine.step()
    outcomes, failed = LoopStep.outcomes, list[str]()

    def fail(self: LoopStep, *given: Any) -> Any:
        if len(failed) < 2:
            failed.append("again")
            raise Fault("outcomes")
        return outcomes(self, *given)

    monkeypatch.setattr(LoopStep, "outcomes", fail)
    outputs = finish(engine)
    check(outputs, alone)
    check_late(outputs, late)
    assert len(failed) == 2


def test_the_faster_way_is_run_and_the_other_one_tried_again() -> None:
    race, turns = Race(2), list[tuple[bool, int]]()
    for _ in range(1000):
        way = race.by_loops
        race.learn(1, 0.3 if way else 0.2)
        if not turns or turns[-1][0] != way:
            turns.append((way, 0))
        turns[-1] = way, turns[-1][1] + 1
    trial = 2 * TRIAL_TOKENS
    faster = (TURN_OF_THE_FASTER + 1) * trial
    assert turns[:3] == [(True, trial), (False, faster), (True, trial)]
    race = Race(2)
    for _ in range(1000):
        race.learn(1, 0.1 if race.by_loops else 0.2)
    assert race.by_loops


@pytest.mark.parametrize("first", [True, False])
def test_a_text_does_not_depend_on_the_way(
    model: eecore.Model, alone: list[Output], first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way changes after every token, in the middle of others' tokens."""

    def learn(race: Race, tokens: int, seconds: float) -> None:
        assert seconds > 0
        race.by_loops = race.by_loops ^ (tokens > 0)

    monkeypatch.setattr(Race, "learn", learn)
    monkeypatch.setattr(Race, "by_loops", first, raising=False)
    check(finish(began(model)), alone)


def test_pages_of_every_loop_are_counted(model: eecore.Model, tmp_path: Path) -> None:
    kv = engine_of(model, EngineConfig(64, page_size=16)).kv
    assert kv.num_pages == 4
    assert kv.loop_slots == 64
    assert len(kv.layers) == ENDS[-1]
    write_looped(tmp_path, total_ut_steps=1)
    once = eecore.load(tmp_path, device="cpu", dtype="float32", kv_cache_tokens=64)
    assert engine_of(once, EngineConfig(64, page_size=16)).kv.loop_slots == 0
