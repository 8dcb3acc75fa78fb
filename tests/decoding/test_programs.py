"""Decoding programs: a request that shares one or is launched ahead has the tokens it has alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_confident_exit import MEASURES, SETTINGS, policy_of

import eecore
from devices import DEVICE, ROUNDING, cpu_only, engine_of, load
from eecore import (
    ConfidentExit,
    DraftAndVerify,
    Engine,
    EngineConfig,
    FixedExit,
    Full,
    Guide,
    Output,
    PromptLookup,
    SamplingParams,
    SelfSpeculative,
)
from eecore.decoding import draft_rows, iterate
from eecore.decoding.control import Program
from eecore.decoding.memory import HostSide
from eecore.decoding.step import Step
from eecore.exits import Exit
from eecore.planning.row import Row
from tiny_models import random_prompts
from tripwire import Fault
from workloads import Request, serve, tokens_of

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_prompts(3, 11, 1, 20, 7)
LENGTHS = (12, 3, 9, 1, 7)

HOT = {"temperature": 1.1, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.2, "seed": 11}


class Counting:
    """Runs programs as an engine would, and counts the runs of each."""

    returns_early = False

    def __init__(self, engine: Engine) -> None:
        self._run = engine.iterations.run
        self.runs: list[Program] = []

    @property
    def captures(self) -> Any:
        return self._run.captures

    def num_bytes(self, program: Program) -> int:
        return self._run.num_bytes(program)

    def __call__(self, program: Program) -> None:
        self.runs.append(program)
        self._run(program)


def run(
    model: eecore.Model,
    policies: list[Exit],
    stops: list[int] | None = None,
    *,
    ahead: bool = False,
    **settings: int,
) -> list[Output]:
    settings.setdefault("kv_cache_tokens", 512)
    engine = engine_of(model, EngineConfig(**settings), ahead=ahead)
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


def check_same(got: list[Output], expected: list[Output]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.exit_layers == other.exit_layers
        assert one.confidences == pytest.approx(other.confidences, abs=ROUNDING, rel=0)
        if other.logprobs is not None:
            assert one.logprobs == pytest.approx(other.logprobs, abs=ROUNDING, rel=0)
        for name in ("layers_run", "layers_filled", "fill_calls", "drafted", "accepted"):
            assert getattr(one.stats, name) == getattr(other.stats, name)


def test_policies_mix_as_data_of_one_program(tiny: eecore.Model) -> None:
    """Full, fixed and confident rows share a run; each has the output that it has alone."""
    mixed: list[Exit] = [
        Full(),
        policy_of("softmax", "plain", "each"),
        FixedExit(2),
        policy_of("state", "plain", "each"),
        policy_of("linear", "plain", "each"),
    ]
    together = run(tiny, mixed)
    for i, policy in enumerate(mixed):
        check_same([together[i]], [run(tiny, [policy])[i]])

    engine = engine_of(tiny, EngineConfig(kv_cache_tokens=512))
    counting = engine.iterations.run = Counting(engine)
    for prompt, policy in zip(PROMPTS, mixed, strict=True):
        engine.add_request(prompt, exit=policy, sampling=SamplingParams(max_tokens=4))
    list(engine.run())
    assert len(counting.runs) == 3  # the first token is the prompt's


def test_drafts_of_any_length_share_a_program(agreeing: eecore.Model) -> None:
    policies: list[Exit] = [SelfSpeculative(2, n) for n in (1, 2, 3, 5, 8)]
    together = run(agreeing, policies)
    for i, policy in enumerate(policies):
        check_same([together[i]], [run(agreeing, [policy])[i]])


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_other_requests_change_nothing(agreeing: eecore.Model, sampled: bool) -> None:
    """Every family, sampled requests beside greedy ones, prompts that arrive meanwhile."""
    policies: list[Exit] = [
        Full(),
        SelfSpeculative(2, 3),
        ConfidentExit(0.3, min_exit_layer=2),
        DraftAndVerify({3}, {2}, num_drafts=4),
        SelfSpeculative(3, 4, reuse=False),
    ]
    kinds = [SamplingParams(max_tokens=10), SamplingParams(max_tokens=10, **HOT)]
    engine = engine_of(agreeing, EngineConfig(kv_cache_tokens=1024, max_prefill_chunk=5))
    waiting = [
        (prompt, policy, kinds[(i + sampled) % 2])
        for i, (prompt, policy) in enumerate(zip(PROMPTS, policies, strict=True))
    ]
    names = {}
    done: dict[str, Output] = {}
    while waiting or engine.has_unfinished:
        if waiting:
            request = waiting.pop()
            name = engine.add_request(request[0], exit=request[1], sampling=request[2])
            names[name] = request
        done |= {s.request_id: s.output for s in engine.step() if s.output is not None}
    for name, (prompt, policy, sampling) in names.items():
        (alone,) = eecore.generate(agreeing, prompt, exit=policy, sampling=sampling)
        assert done[name].token_ids == alone.token_ids
        assert done[name].exit_layers == alone.exit_layers


@pytest.mark.parametrize("batch", ["each", "all"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("measure", MEASURES)
def test_confident_exits_ahead(tiny: eecore.Model, measure: str, setting: str, batch: str) -> None:
    policies: list[Exit] = [policy_of(measure, setting, batch)]
    check_same(run(tiny, policies, ahead=True), run(tiny, policies))


@pytest.mark.parametrize("policy", [Full(), FixedExit(2)], ids=["full", "fixed"])
def test_fixed_depths_ahead(tiny: eecore.Model, policy: Exit) -> None:
    check_same(run(tiny, [policy], ahead=True), run(tiny, [policy]))


@pytest.mark.parametrize(
    "policy",
    [
        *[
            SelfSpeculative(exit_layer, num_drafts, threshold)
            for exit_layer, num_drafts in ((2, 3), (1, 6), (3, 1))
            for threshold in (None, 0.2, 1.0)
        ],
        *[DraftAndVerify({3}, {2}, initial_threshold=first) for first in (None, 0.05, 1.0)],
    ],
    ids=str,
)
def test_drafts_of_layers_ahead(agreeing: eecore.Model, policy: Exit) -> None:
    check_same(run(agreeing, [policy], ahead=True), run(agreeing, [policy]))


def test_thresholds_of_rounds_ahead(
    agreeing: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round has the same threshold whether the outcome of the one before it is known or not."""
    thresholds = draft_rows._thresholds

    def given(*, ahead: bool) -> list[float]:
        found: list[float] = []

        def seen(rows: list[Row]) -> list[float]:
            found.extend(thresholds(rows))
            return found[-1:]

        monkeypatch.setattr(draft_rows, "_thresholds", seen)
        engine = engine_of(agreeing, EngineConfig(kv_cache_tokens=512), ahead=ahead)
        sampling = SamplingParams(max_tokens=40, ignore_eos=True)
        policy = DraftAndVerify({3}, {2}, initial_threshold=0.1)
        serve(engine, [Request(PROMPTS[0], policy, sampling)])
        return found

    landed = given(ahead=False)
    assert given(ahead=True)[: len(landed)] == landed
    assert landed[0] == landed[1]
    assert len(set(landed)) > 3


@pytest.mark.parametrize("ahead", [False, True], ids=["waits", "ahead"])
@pytest.mark.parametrize(
    "policy", [SelfSpeculative(2, 4), Full(), ConfidentExit(0.05, min_exit_layer=2)]
)
def test_the_end_of_the_text_ends_it(agreeing: eecore.Model, policy: Exit, ahead: bool) -> None:
    free = run(agreeing, [policy])
    stops = [output.token_ids[len(output.token_ids) // 2] for output in free]
    ended = run(agreeing, [policy], stops, ahead=ahead)
    for i, (output, whole) in enumerate(zip(ended, free, strict=True)):
        ids = whole.token_ids
        end = min((ids.index(stop) + 1 for stop in stops[: i + 1] if stop in ids), default=None)
        assert output.token_ids == ids[:end]
    assert any(output.finish_reason == "stop" for output in ended)


@pytest.mark.parametrize("ahead", [False, True], ids=["waits", "ahead"])
@pytest.mark.parametrize(
    "policy", [policy_of("softmax", "plain", "each"), SelfSpeculative(2, 3)], ids=["each", "spec"]
)
def test_preempted_requests_come_back(agreeing: eecore.Model, policy: Exit, ahead: bool) -> None:
    settings = {"max_num_seqs": 5, "page_size": 4, "kv_cache_tokens": 24}
    preempted = run(agreeing, [policy], ahead=ahead, **settings)
    assert sum(output.stats.preemptions for output in preempted) > 0
    for output, expected in zip(preempted, run(agreeing, [policy]), strict=True):
        assert output.token_ids == expected.token_ids
        if not isinstance(policy, SelfSpeculative):  # drafts fewer tokens if pages are few
            assert output.exit_layers == expected.exit_layers


@pytest.mark.parametrize(
    "policy",
    [Full(), ConfidentExit(0.3), SelfSpeculative(2, 3), DraftAndVerify({3}, {2}, num_drafts=3)],
    ids=["full", "each", "spec", "verify"],
)
def test_a_seed_draws_the_same_after_a_preemption(agreeing: eecore.Model, policy: Exit) -> None:
    sampling = [SamplingParams(max_tokens=9, **(HOT | {"seed": i})) for i in range(len(PROMPTS))]
    alone = [
        eecore.generate(agreeing, prompt, exit=policy, sampling=params)[0]
        for prompt, params in zip(PROMPTS, sampling, strict=True)
    ]
    config = EngineConfig(max_num_seqs=5, page_size=4, kv_cache_tokens=32)
    requests = [
        Request(prompt, policy, params) for prompt, params in zip(PROMPTS, sampling, strict=True)
    ]
    outputs = serve(engine_of(agreeing, config), requests)
    assert sum(output.stats.preemptions for output in outputs) > 0
    assert tokens_of(outputs) == tokens_of(alone)


@cpu_only
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [4, 8, 16, 32])
def test_lossless_whatever_the_number_of_rows(
    agreeing_directory: Path, dtype: str, batch: int
) -> None:
    """Verifications of 28 to 224 rows, each of which rounds as in decoding at full depth."""
    model = load(agreeing_directory, dtype=dtype, kv_cache_tokens=4096)
    prompts = random_prompts(*[3 + i % 5 for i in range(batch)], seed=batch)
    settings: dict[str, Any] = {"max_tokens": 21, "ignore_eos": True, "logprobs": 0}
    full = eecore.generate(model, prompts, **settings)
    drafted = eecore.generate(model, prompts, exit=SelfSpeculative(2, 6), **settings)
    for one, other in zip(drafted, full, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs


@pytest.mark.parametrize(
    "policy", [Full(), SelfSpeculative(2, 3), PromptLookup(3)], ids=["full", "spec", "lookup"]
)
def test_the_next_run_is_launched_before_the_last_is_known(
    agreeing: eecore.Model, monkeypatch: pytest.MonkeyPatch, policy: Exit
) -> None:
    launched = overlapped = 0
    launch = iterate.Iterations.launch

    def counted(self: Any, works: Any, after: Any = None, **more: Any) -> Any:
        nonlocal launched, overlapped
        flight = launch(self, works, after, **more)
        launched += flight is not None
        overlapped += flight is not None and after is not None
        return flight

    monkeypatch.setattr(iterate.Iterations, "launch", counted)
    engine = engine_of(agreeing, ahead=True)
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    for prompt in PROMPTS:
        engine.add_request(prompt, exit=policy, sampling=sampling)
    steps = 0
    while engine.has_unfinished:
        engine.step()
        steps += 1
    assert overlapped > 0.8 * launched
    assert launched <= steps + 1  # at most one run whose result is not used


WARM = {"temperature": 1.1, "top_k": 40, "top_p": 0.95, "min_p": 0.01}
COUNTED = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.5}


def launches_ahead(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list that grows by each attempt to launch ahead: whether it did."""
    overlaps: list[bool] = []
    launch = iterate.Iterations.launch

    def seen(self: Any, works: Any, after: Any = None, **more: Any) -> Any:
        flight = launch(self, works, after, **more)
        if after is not None:
            overlaps.append(flight is not None)
        return flight

    monkeypatch.setattr(iterate.Iterations, "launch", seen)
    return overlaps


@pytest.mark.parametrize(
    ("sampling", "policy", "waits"),
    [
        (WARM, Full(), False),
        (WARM, ConfidentExit(0.05, min_exit_layer=2), False),
        (WARM, SelfSpeculative(2, 3), False),
        (WARM, DraftAndVerify({3}, {2}, num_drafts=3), False),
        ({"logit_bias": {7: 4.0}}, Full(), False),
        ({**WARM, "logprobs": 2}, Full(), False),
        ({**WARM, "logprobs": 2}, SelfSpeculative(2, 3), False),
        ({**WARM, "logprobs": 0}, DraftAndVerify({3}, {2}, num_drafts=3), False),
        ({"logprobs": 2}, SelfSpeculative(2, 3), False),
        ({**WARM, **COUNTED}, Full(), False),
        ({**WARM, **COUNTED}, ConfidentExit(0.05, min_exit_layer=2), False),
        ({"repetition_penalty": 1.2}, SelfSpeculative(2, 3), False),
        ({**WARM, "frequency_penalty": 0.5}, SelfSpeculative(2, 3), False),
        ({"guide": Guide.regex("[a-z ]+")}, Full(), True),
    ],
)
def test_tokens_drawn_ahead_are_those_drawn_anyway(
    agreeing: eecore.Model,
    monkeypatch: pytest.MonkeyPatch,
    sampling: dict[str, Any],
    policy: Exit,
    waits: bool,
) -> None:
    """A run waits for the last one's tokens where its sampling depends on them."""
    overlaps = launches_ahead(monkeypatch)

    def outputs(*, ahead: bool) -> list[Output]:
        engine = engine_of(agreeing, EngineConfig(kv_cache_tokens=1024), ahead=ahead)
        requests = [
            Request(prompt, policy, SamplingParams(max_tokens=15 + i, seed=i, **sampling))
            for i, prompt in enumerate(PROMPTS)
        ]
        return serve(engine, requests)

    check_same(outputs(ahead=True), outputs(ahead=False))
    assert any(overlaps) is not waits


@pytest.mark.parametrize("held_bytes", [iterate.MAX_PROGRAM_BYTES, 0], ids=["kept", "dropped"])
@pytest.mark.parametrize("sampling", [{}, WARM, COUNTED, {**WARM, **COUNTED}], ids=str)
def test_programs_of_a_batch_are_launched_ahead_together(
    agreeing: eecore.Model,
    monkeypatch: pytest.MonkeyPatch,
    sampling: dict[str, Any],
    held_bytes: int,
) -> None:
    """Each program continues its own run, also when another one needs its memory."""
    monkeypatch.setattr(iterate, "MAX_PROGRAM_BYTES", held_bytes)
    flights: list[tuple[int, bool]] = []
    launch = iterate.Iterations.launch

    def seen(self: Any, works: Any, after: Any = None, **more: Any) -> Any:
        flight = launch(self, works, after, **more)
        flights.append((0 if flight is None else len(flight.runs), after is not None))
        return flight

    monkeypatch.setattr(iterate.Iterations, "launch", seen)
    policies: list[Exit] = [
        SelfSpeculative(2, 3),
        Full(),
        DraftAndVerify({3}, {2}, num_drafts=3),
        ConfidentExit(0.05, min_exit_layer=2),
        SelfSpeculative(2, 5),
    ]
    requests = [
        Request(prompt, policy, SamplingParams(max_tokens=11 + 3 * i, seed=i, **sampling))
        for i, (prompt, policy) in enumerate(zip(PROMPTS, policies, strict=True))
    ]
    config = EngineConfig(kv_cache_tokens=1024)
    got = serve(engine_of(agreeing, config, ahead=True), requests)
    check_same(got, serve(engine_of(agreeing, config, ahead=False), requests))
    assert (3, True) in flights
    assert sum(runs > 1 for runs, follows in flights if follows) >= 3


def test_penalties_count_a_text_that_only_the_device_knows(
    agreeing: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts outgrow the memory of their programs on the way; looked-up drafts are rejected."""
    overlaps = launches_ahead(monkeypatch)
    counted = {"ignore_eos": True, "seed": 3, "logit_bias": dict.fromkeys(range(40, 320), -100.0)}
    ways: list[dict[str, Any]] = [{"repetition_penalty": 1.3}, COUNTED, {}, {**WARM, **COUNTED}]
    policies = [PromptLookup(5, min_ngram=1), Full(), SelfSpeculative(2, 3), PromptLookup(3)]
    requests = [
        Request([3, 9 + i], policy, SamplingParams(max_tokens=100, **counted, **way))
        for i, (policy, way) in enumerate(zip(policies, ways, strict=True))
    ]
    config = EngineConfig(kv_cache_tokens=1024)
    got = serve(engine_of(agreeing, config, ahead=True), requests)
    assert tokens_of(got) == tokens_of(serve(engine_of(agreeing, config, ahead=False), requests))
    assert sum(overlaps) > 0.8 * len(overlaps)
    assert got[0].stats.drafted > got[0].stats.accepted


LOSSLESS: dict[str, list[Exit]] = {
    "full": [Full()],
    "spec": [SelfSpeculative(2, 3)],
    "lookup": [PromptLookup(3)],
    "mixed": [Full(), SelfSpeculative(2, 3), PromptLookup(3)],
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_requests_come_and_go_while_a_run_is_out(agreeing: eecore.Model, name: str) -> None:
    """One request is cancelled and one added while a run that knows of neither is in flight."""
    policies = [LOSSLESS[name][i % len(LOSSLESS[name])] for i in range(len(PROMPTS))]
    outputs = eecore.generate(agreeing, PROMPTS, exit=policies, max_tokens=16)
    alone = {tuple(output.prompt_token_ids): output.token_ids for output in outputs}
    engine = engine_of(agreeing, EngineConfig(kv_cache_tokens=512), ahead=True)
    sampling = SamplingParams(max_tokens=16)
    names = [
        engine.add_request(prompt, exit=policy, sampling=sampling)
        for prompt, policy in zip(PROMPTS[:4], policies, strict=False)
    ]
    for _ in range(3):
        engine.step()
    cancelled = engine.cancel(names[1])
    assert cancelled is not None
    assert cancelled.token_ids == alone[tuple(PROMPTS[1])][: len(cancelled.token_ids)]
    engine.step()
    engine.add_request(PROMPTS[4], exit=policies[4], sampling=sampling)
    done = [step.output for step in engine.run() if step.output is not None]
    assert len(done) == 4
    for output in done:
        assert output.token_ids == alone[tuple(output.prompt_token_ids)]
    assert engine.pages.num_free == engine.pages.num_pages
    # No request owns the run that is still in flight; the engine goes on.
    engine.add_request(PROMPTS[0], exit=policies[0], sampling=sampling)
    (again,) = (step.output for step in engine.run() if step.output is not None)
    assert again.token_ids == alone[tuple(PROMPTS[0])]


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("where", ["launch", "_run", "land"])
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_a_failure_with_a_run_out_changes_no_request(
    agreeing: eecore.Model, monkeypatch: pytest.MonkeyPatch, name: str, where: str, calls: int
) -> None:
    """Also where one program of a batch fails after another one was launched."""
    engine, policies = engine_of(agreeing, ahead=True), LOSSLESS[name]
    owner: Any = iterate.Run if where == "land" else iterate.Iterations
    whole, left = getattr(owner, where), [calls]

    def broken(*args: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise Fault("the device is out of memory")
        return whole(*args, **more)

    monkeypatch.setattr(owner, where, broken)
    for i in range(2):
        sampling = SamplingParams(max_tokens=9 + i)
        policy = policies[i % len(policies)]
        engine.add_request(PROMPTS[i], exit=policy, sampling=sampling, request_id=str(i))
    given: dict[str, list[int]] = {"0": [], "1": []}
    for step in engine.run():
        given[step.request_id] += step.token_ids
    assert left[0] < 0
    monkeypatch.undo()
    for i in range(2):
        (expected,) = eecore.generate(agreeing, PROMPTS[i], exit="full", max_tokens=9 + i)
        assert given[str(i)] == expected.token_ids
    assert engine.pages.num_free == engine.pages.num_pages


def test_programs_are_captured_once_and_not_kept_for_ever(
    agreeing: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iterate, "MAX_PROGRAMS", 3)
    engine = engine_of(agreeing)
    expected = eecore.generate(agreeing, PROMPTS[0], max_tokens=6)[0].token_ids
    for round_ in range(2):
        for policy in (Full(), FixedExit(2), SelfSpeculative(2, 3), SelfSpeculative(1, 3)):
            engine.add_request(PROMPTS[0], exit=policy, sampling=SamplingParams(max_tokens=6))
            (output,) = (s.output for s in engine.run() if s.output is not None)
            if policy != FixedExit(2):
                assert output.token_ids == expected, round_
    assert len(engine.captures) <= 3
    assert all(capture.seconds > 0.0 for capture in engine.captures)


def test_programs_are_kept_as_long_as_their_memory_is_not_needed(
    agreeing: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9, seed=3)

    def run_one(engine: Engine, drafts: int) -> list[int]:
        engine.add_request(PROMPTS[0], exit=SelfSpeculative(2, drafts), sampling=sampling)
        (output,) = (s.output for s in engine.run() if s.output is not None)
        return output.token_ids

    engine = engine_of(agreeing)
    expected = [run_one(engine, drafts) for drafts in (17, 18, 19)]
    most = engine.iterations.program_bytes // 2
    assert most > 3 * 17 * 4 * agreeing.config.vocab_size  # two distributions of every draft
    monkeypatch.setattr(iterate, "MAX_PROGRAM_BYTES", most)
    engine = engine_of(agreeing)
    for _ in range(3):
        assert [run_one(engine, drafts) for drafts in (17, 18, 19)] == expected
        assert engine.iterations.program_bytes <= most
    monkeypatch.setattr(iterate, "MAX_PROGRAM_BYTES", 0)
    engine = engine_of(agreeing)
    assert run_one(engine, 17) == expected[0]
    assert len(engine.iterations._programs) == 1


def test_nothing_of_distributions_is_read_before_it_is_written(
    agreeing: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9, seed=3)
    policies = [SelfSpeculative(2, 3), SelfSpeculative(2, 5, draft_threshold=0.3), Full()]
    unset = Step.unset

    def run_all() -> list[list[int]]:
        engine = engine_of(agreeing)
        for prompt, policy in zip(PROMPTS, policies, strict=False):
            engine.add_request(prompt, exit=policy, sampling=sampling)
        return [s.output.token_ids for s in engine.run() if s.output is not None]

    def poisoned(step: Step, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        memory = unset(step, *shape, dtype=dtype)
        return memory.fill_(float("nan")) if dtype.is_floating_point else memory

    expected = run_all()
    monkeypatch.setattr(Step, "unset", poisoned)
    assert run_all() == expected


def test_drafts_take_the_memory_of_what_can_be_drafted(agreeing: eecore.Model) -> None:
    """The bounds are max_tokens and a round's maximum, not the policy's draft length.

    A graph's other memory is measured by what is free on a GPU that other processes may use.
    """

    def program_bytes(drafts: int, **settings: Any) -> int:
        engine = engine_of(agreeing)
        sampling = SamplingParams(ignore_eos=True, temperature=0.9, seed=3, **settings)
        engine.add_request(PROMPTS[0], exit=SelfSpeculative(2, drafts), sampling=sampling)
        for _ in range(4):
            engine.step()
        own = sum(program.num_bytes for program in engine.iterations._programs.values())
        return own if DEVICE == "cuda" else engine.iterations.program_bytes

    for settings in ({}, {"logprobs": 20}):
        assert program_bytes(10_000, max_tokens=8, **settings) == program_bytes(
            8, max_tokens=8, **settings
        )
        assert program_bytes(10_000, max_tokens=300, **settings) == program_bytes(
            64, max_tokens=300, **settings
        )


def test_a_long_draft_takes_no_more_than_is_left(agreeing: eecore.Model) -> None:
    for count in (6, 150):
        settings: dict[str, Any] = {"max_tokens": count, "ignore_eos": True}
        (full,) = eecore.generate(agreeing, PROMPTS[0], **settings)
        policy = SelfSpeculative(2, 100_000)
        (output,) = eecore.generate(agreeing, PROMPTS[0], exit=policy, **settings)
        assert output.token_ids == full.token_ids


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    "policy", [ConfidentExit(0.3), SelfSpeculative(2, 3)], ids=["each", "spec"]
)
def test_on_cuda_a_captured_run_waits_for_nothing_and_allocates_nothing(
    agreeing_directory: Path, policy: Exit
) -> None:
    model = eecore.load(agreeing_directory, device="cuda", kv_cache_tokens=512)
    engine = model.engine()
    for i in range(2):
        sampling = SamplingParams(max_tokens=64, ignore_eos=True)
        engine.add_request(PROMPTS[i], exit=policy, sampling=sampling)
    for _ in range(4):
        engine.step()
    assert engine.captures[0].seconds > 0.0
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated


@pytest.mark.parametrize("writes", [0, 1])
def test_a_program_that_was_loaded_halfway_is_loaded_again(
    agreeing: eecore.Model, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """A row joins a program whose other rows would have gone on."""
    policy, prompts = ConfidentExit(0.35), random_prompts(4, 4, 4, 4, seed=6)
    sampling = SamplingParams(max_tokens=9, ignore_eos=True)
    expected = [
        eecore.generate(agreeing, [prompt], exit=policy, sampling=sampling)[0] for prompt in prompts
    ]
    engine = engine_of(agreeing, ahead=False)
    for prompt in prompts[:3]:
        engine.add_request(prompt, exit=policy, sampling=sampling)
    for _ in range(3):
        engine.step()
    engine.add_request(prompts[3], exit=policy, sampling=sampling)
    engine.step()
    write, left = HostSide.write, [writes]

    def interrupted(side: HostSide, **columns: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        write(side, **columns)

    with monkeypatch.context() as patch:
        patch.setattr(HostSide, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    ended = [step.output for step in engine.run()]
    assert [output and output.finish_reason for output in ended] == ["error"] * 4
    ids = [engine.add_request(prompt, exit=policy, sampling=sampling) for prompt in prompts]
    outputs = {step.request_id: step.output for step in engine.run() if step.output is not None}
    for request_id, alone in zip(ids, expected, strict=True):
        assert outputs[request_id].token_ids == alone.token_ids
        assert outputs[request_id].exit_layers == alone.exit_layers
