"""Decoding programs: a request that shares one or is launched ahead has the tokens it has alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import eecore
from devices import ROUNDING, engine_of
from eecore import (
    ConfidentExit,
    DraftAndVerify,
    EngineConfig,
    FixedExit,
    Full,
    Guide,
    Output,
    PromptLookup,
    SamplingParams,
    SelfSpeculative,
)
from eecore.decoding import iterate
from eecore.decoding.memory import HostSide
from eecore.exits import Exit
from tiny_models import random_prompts
from workloads import Request, serve

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_prompts(3, 11, 1, 20, 7)
LENGTHS = (12, 3, 9, 1, 7)


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
