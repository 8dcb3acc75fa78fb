"""The engine and ``eecore.generate``: batching, preemption, stopping, streaming, failing."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import eecore
from devices import cpu_only, engine_of, load
from eecore import (
    ConfidentExit,
    DraftAndVerify,
    EngineConfig,
    ExitError,
    FixedExit,
    Full,
    PromptLookup,
    RequestError,
    SamplingParams,
    SelfSpeculative,
)
from eecore.decoding.capture import CallByCall, Graphs, Tapes
from eecore.decoding.prefill import Prefill
from eecore.engine.engine import Engine
from eecore.exits import Exit
from tiny_models import random_prompts, write_model
from tripwire import Fault
from workloads import python_calls, until

pytestmark = pytest.mark.usefixtures("one_thread")

MODES: dict[str, Exit] = {
    "full": Full(),
    "fixed": FixedExit(3),
    "each": ConfidentExit(0.35, decay_tau=2.0),
    "state": ConfidentExit(0.97, measure="state", thresholds={1: 1.0}),
    "all": ConfidentExit(0.0, batch="all", min_exit_layer=3),
    "speculative": SelfSpeculative(2, 4),
    "verify": DraftAndVerify({3}, {2, 4}),
}
GREEDY = SamplingParams(max_tokens=18, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=18, ignore_eos=True, temperature=0.8, top_p=0.9, seed=11)
PROMPTS = random_prompts(5, 30, 1, 12, 44, 20, 3, seed=2)


def run_all(engine: Engine, requests: list[tuple[list[int], Exit, SamplingParams]]) -> list[Any]:
    """Outputs in the order of the requests."""
    ids = [engine.add_request(p, exit=e, sampling=s) for p, e, s in requests]
    outputs = {step.request_id: step.output for step in engine.run()}
    return [outputs[request_id] for request_id in ids]


def alone(model: eecore.Model, prompt: list[int], policy: Exit, sampling: SamplingParams) -> Any:
    model.shared_engine().reset_prefix_cache()
    return eecore.generate(model, [prompt], exit=policy, sampling=sampling)[0]


def assert_idle(engine: Engine) -> None:
    """No request or page is left once a worker is done with its step."""
    assert until(lambda: not engine.has_unfinished)
    assert engine.num_waiting == engine.num_running == 0
    assert engine.pages.num_free == engine.pages.num_pages
    assert not engine.requests


@pytest.fixture(autouse=True)
def _no_page_left(agreeing: eecore.Model) -> Iterator[None]:
    yield
    assert_idle(agreeing.shared_engine().engine)


# Batching


def test_modes_in_one_batch_equal_single_runs(agreeing: eecore.Model) -> None:
    requests = [
        (prompt, policy, sampling)
        for sampling in (GREEDY, SAMPLED)
        for prompt, policy in zip(PROMPTS, MODES.values(), strict=True)
    ]
    engine = agreeing.engine()
    together = run_all(engine, requests)
    assert_idle(engine)
    for output, (prompt, policy, sampling) in zip(together, requests, strict=True):
        single = alone(agreeing, prompt, policy, sampling)
        assert output.token_ids == single.token_ids
        assert output.exit_layers == single.exit_layers
        assert output.confidences == pytest.approx(single.confidences, abs=1e-4)
        assert output.text == single.text
        assert output.stats.contract == policy.contract
        for name in ("layers_run", "prompt_layers_run", "layers_filled", "drafted", "accepted"):
            assert getattr(output.stats, name) == getattr(single.stats, name)


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_prompts_longer_than_the_prefill_chunk(agreeing: eecore.Model, chunk: int) -> None:
    config = EngineConfig(kv_cache_tokens=512, max_prefill_chunk=chunk, max_batch_tokens=24)
    requests = [(p, e, GREEDY) for p, e in zip(PROMPTS, MODES.values(), strict=True)]
    outputs = run_all(agreeing.engine(config), requests)
    for output, (prompt, policy, sampling) in zip(outputs, requests, strict=True):
        assert output.token_ids == alone(agreeing, prompt, policy, sampling).token_ids


def test_the_prompt_runs_through_all_layers_but_for_a_fixed_exit(agreeing: eecore.Model) -> None:
    for policy in MODES.values():
        output = alone(agreeing, PROMPTS[1], policy, GREEDY)
        depth = 3 if isinstance(policy, FixedExit) else 5
        assert output.stats.prompt_layers_run == 30 * depth
        assert output.exit_layers[0] == depth


# Preemption


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", MODES)
def test_preemption_changes_no_output(
    agreeing: eecore.Model, mode: str, sampling: SamplingParams
) -> None:
    """The cache holds about two of the six requests, in small pages and replayed chunks."""
    policy = MODES[mode]
    config = EngineConfig(kv_cache_tokens=96, page_size=4, max_prefill_chunk=9)
    engine = agreeing.engine(config)
    outputs = run_all(engine, [(prompt, policy, sampling) for prompt in PROMPTS])
    assert_idle(engine)
    assert sum(output.stats.preemptions for output in outputs) > 0
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        single = alone(agreeing, prompt, policy, sampling)
        assert output.token_ids == single.token_ids
        assert output.text == single.text
        if policy.max_drafts == 0 or sampling is SAMPLED:  # a greedy draft may be cut short
            assert output.exit_layers == single.exit_layers
            assert output.stats.layers_run == single.stats.layers_run


@pytest.mark.parametrize("mode", ["each", "state"])
def test_a_chunk_of_a_replay_may_be_all_of_positions_that_exited_early(
    agreeing: eecore.Model, mode: str
) -> None:
    engine = agreeing.engine(EngineConfig(kv_cache_tokens=64, page_size=4, max_prefill_chunk=1))
    policy, prompt = MODES[mode], PROMPTS[0]
    expected = alone(agreeing, prompt, policy, GREEDY)
    assert min(expected.exit_layers) < 5
    request_id = engine.add_request(prompt, exit=policy, sampling=GREEDY)
    while len(engine.requests[request_id].output_ids) < 12:
        engine.step()
    engine.scheduler.preempt(engine.requests[request_id])
    outputs = [step.output for step in engine.run() if step.output]
    assert outputs[0].token_ids == expected.token_ids
    assert outputs[0].confidences == expected.confidences


@cpu_only  # elsewhere a row's result depends on its company
def test_a_replay_writes_the_same_keys_and_values(agreeing: eecore.Model) -> None:
    config = EngineConfig(kv_cache_tokens=64, page_size=4, max_prefill_chunk=16, prefix_cache=False)
    engine = agreeing.engine(config)
    engine.add_request(PROMPTS[0], exit=ConfidentExit(0.3), sampling=GREEDY)
    (sequence,) = engine.requests.values()

    def written() -> list[torch.Tensor]:
        slots = [sequence.pages[p // 4] * 4 + p % 4 for p in range(16)]
        return [cache.flatten(1, 2)[:, slots] for cache in (engine.kv.k, engine.kv.v)]

    while sequence.num_computed < 16:
        engine.step()
    before = written()
    # Some position left earlier than its neighbours on both sides.
    depths = sequence.kv_exit_layers
    assert any(a > b < c for a, b, c in zip(depths, depths[1:], depths[2:], strict=False))
    engine.scheduler.preempt(sequence)
    engine.step()
    assert sequence.num_computed == 16
    for cache, expected in zip(written(), before, strict=True):
        assert torch.equal(cache, expected)
    engine.cancel(sequence.request_id)


# On hold


def test_a_hold_leaves_the_others_running_and_changes_no_output(agreeing: eecore.Model) -> None:
    """The cache holds about two requests: those on hold lose their pages to the others."""
    engine = agreeing.engine(EngineConfig(kv_cache_tokens=96, page_size=4, max_prefill_chunk=9))
    policies = list(MODES.values())
    policies.remove(MODES["all"])  # waits for its neighbours
    ids = [
        engine.add_request(prompt, exit=policy, sampling=SAMPLED)
        for prompt, policy in zip(PROMPTS, policies, strict=False)
    ]
    outputs: dict[str, Any] = {}
    held: list[str] = []

    def run() -> None:
        for step in engine.run():
            assert step.request_id not in held
            if step.output is not None:
                outputs[step.request_id] = step.output

    engine.step()
    engine.step()
    for request_id in (*ids[::2], "unknown"):
        engine.hold(request_id)
        held.append(request_id)
    assert engine.num_held == 3
    run()
    assert set(outputs) == set(ids[1::2])
    assert engine.has_unfinished
    assert not engine.has_runnable
    while held:
        engine.resume(held.pop())
        run()
    for request_id, prompt, policy in zip(ids, PROMPTS, policies, strict=False):
        assert outputs[request_id].token_ids == alone(agreeing, prompt, policy, SAMPLED).token_ids
    assert_idle(engine)


def test_approximate_pages_are_known_also_after_a_replay(agreeing: eecore.Model) -> None:
    engine = engine_of(agreeing, EngineConfig(kv_cache_tokens=64, page_size=4), ahead=False)
    early = ConfidentExit(0.0, min_exit_layer=2)
    for prompt, policy in (([1] * 8, early), ([2] * 8, Full()), ([3] * 8, FixedExit(2))):
        engine.add_request(prompt, exit=policy, sampling=SamplingParams(max_tokens=6))
    confident, full, fixed = engine.requests.values()

    def exactness(sequence: Any) -> list[bool]:
        return [engine.pages.is_exact(page) for page in sequence.pages]

    engine.step()
    assert exactness(confident) == [True, True]
    assert exactness(fixed) == [False, False]
    engine.step()
    engine.step()
    assert exactness(confident) == [True, True, False]
    assert exactness(full) == [True, True, True]
    engine.scheduler.preempt(confident)
    engine.step()
    assert confident.num_computed == 10
    assert exactness(confident) == [True, True, False]
    for request_id in list(engine.requests):
        engine.cancel(request_id)
    assert all(engine.pages.is_exact(page) for page in range(engine.pages.num_pages))


# Cancelling


def test_cancel_in_every_state(agreeing: eecore.Model) -> None:
    config = EngineConfig(kv_cache_tokens=64, page_size=4, max_prefill_chunk=8, max_num_seqs=2)
    engine = agreeing.engine(config)
    decoding, prefilling, waiting = (
        engine.add_request(p, sampling=GREEDY) for p in (PROMPTS[0], PROMPTS[1], PROMPTS[2])
    )
    engine.step()
    engine.step()
    sequences = engine.requests
    assert sequences[decoding].is_decoding
    assert 0 < sequences[prefilling].num_computed < 30
    assert sequences[waiting].num_computed == 0

    output = engine.cancel(prefilling)
    assert output is not None
    assert (output.token_ids, output.text, output.finish_reason) == ([], "", "cancelled")
    output = engine.cancel(waiting)
    assert output is not None
    assert output.finish_reason == "cancelled"
    assert output.stats.mean_exit_layer == 0.0
    output = engine.cancel(decoding)
    assert output is not None
    assert output.token_ids == alone(agreeing, PROMPTS[0], Full(), GREEDY).token_ids[:2]
    assert len(output.exit_layers) == len(output.confidences) == 2
    assert_idle(engine)
    assert engine.cancel(decoding) is None
    assert engine.cancel("unknown") is None
    assert engine.step() == []


def test_cancel_of_a_preempted_request(agreeing: eecore.Model) -> None:
    engine = agreeing.engine(EngineConfig(kv_cache_tokens=64, page_size=4))
    ids = [engine.add_request(PROMPTS[3], sampling=GREEDY) for _ in range(4)]
    preempted = None
    while preempted is None:
        engine.step()
        waiting = [s for s in engine.scheduler.waiting if s.output_ids]
        preempted = waiting[0] if waiting else None
    output = engine.cancel(preempted.request_id)
    assert output is not None
    assert output.stats.preemptions == 1
    finished = {step.request_id: step.output for step in engine.run() if step.output}
    assert set(finished) == set(ids) - {preempted.request_id}
    assert_idle(engine)


# Stopping


def expected_text(model: eecore.Model, prompt: list[int], policy: Exit) -> str:
    text = alone(model, prompt, policy, GREEDY).text
    assert text is not None
    return text


@pytest.mark.parametrize("mode", MODES)
def test_stop_strings(agreeing: eecore.Model, mode: str) -> None:
    """A stop string of several tokens ends the text before it, and is never streamed in part."""
    for prompt in PROMPTS[:4]:
        text = expected_text(agreeing, prompt, MODES[mode])
        for start in (1, 4):
            stop = text[start : start + 3]
            sampling = SamplingParams(max_tokens=18, ignore_eos=True, stop=(stop, "never" * 9))
            pieces, output = "", None
            for step in eecore.stream(agreeing, [prompt], exit=MODES[mode], sampling=sampling):
                pieces += step.text
                output = step.output
                assert text[: text.find(stop)].startswith(pieces)
            assert output is not None
            assert output.finish_reason == "stop"
            assert output.text == pieces == text[: text.find(stop)]
            assert len(output.token_ids) == len(output.exit_layers) <= 18
            if MODES[mode].max_drafts:
                # Drafts after the string are not kept.
                full = alone(agreeing, prompt, Full(), sampling)
                assert output.token_ids == full.token_ids


def test_text_that_may_begin_a_stop_string_is_held_back(agreeing: eecore.Model) -> None:
    text = expected_text(agreeing, PROMPTS[0], Full())
    sampling = SamplingParams(max_tokens=18, ignore_eos=True, stop=(text[2:5] + "\0never",))
    shown = [""]
    for step in eecore.stream(agreeing, [PROMPTS[0]], sampling=sampling):
        shown.append(shown[-1] + step.text)
    assert text[:2] in shown
    assert not {text[:3], text[:4], text[:5]} & set(shown)
    assert shown[-1] == text


@pytest.mark.parametrize("mode", MODES)
def test_stop_tokens_and_end_of_sequence(agreeing: eecore.Model, mode: str) -> None:
    full = alone(agreeing, PROMPTS[0], MODES[mode], GREEDY)
    token = full.token_ids[4]
    length = full.token_ids.index(token) + 1
    stopped = alone(
        agreeing,
        PROMPTS[0],
        MODES[mode],
        SamplingParams(max_tokens=18, ignore_eos=True, stop_token_ids=(token,)),
    )
    assert stopped.token_ids == full.token_ids[:length]
    assert stopped.finish_reason == "stop"
    assert agreeing.tokenizer is not None
    # The stop token is in the ids, not in the text.
    text = agreeing.tokenizer.decode_after(PROMPTS[0], full.token_ids[: length - 1])
    assert stopped.text == text


def test_the_models_own_end_of_sequence(tmp_path: Path, tiny: eecore.Model) -> None:
    (free,) = eecore.generate(tiny, [[1, 2, 3]], max_tokens=12, ignore_eos=True)
    token = free.token_ids[5]
    directory = write_model(tmp_path, eos_token_id=[300, token])
    model = load(directory, kv_cache_tokens=256)
    for policy in (Full(), SelfSpeculative(2, 8)):
        (output,) = eecore.generate(model, [[1, 2, 3]], exit=policy, max_tokens=12)
        assert output.token_ids == free.token_ids[: free.token_ids.index(token) + 1]
        assert output.finish_reason == "stop"
        (output,) = eecore.generate(model, [[1, 2, 3]], exit=policy, max_tokens=12, ignore_eos=True)
        assert output.token_ids == free.token_ids
        assert output.finish_reason == "length"


# Streaming


@pytest.mark.parametrize("mode", MODES)
def test_streamed_pieces_add_up(agreeing: eecore.Model, mode: str) -> None:
    """Random bytes: many tokens complete no character, and some never will."""
    pieces: dict[str, Any] = {}
    outputs = {}
    order: list[str] = []
    for step in eecore.stream(agreeing, PROMPTS, exit=MODES[mode], sampling=GREEDY, order=order):
        text, tokens, layers, confidences = pieces.get(step.request_id, ("", [], [], []))
        pieces[step.request_id] = (
            text + step.text,
            tokens + step.token_ids,
            layers + step.exit_layers,
            confidences + step.confidences,
        )
        if step.finished:
            outputs[step.request_id] = step.output
    assert set(outputs) == set(order)
    for request_id, output in outputs.items():
        assert output is not None
        assert pieces[request_id] == (
            output.text,
            output.token_ids,
            output.exit_layers,
            output.confidences,
        )
        assert agreeing.tokenizer is not None
        assert output.text == agreeing.tokenizer.decode_after(
            output.prompt_token_ids, output.token_ids
        )


def test_closing_a_stream_early_cancels_the_rest(agreeing: eecore.Model) -> None:
    stream = eecore.stream(agreeing, PROMPTS, sampling=GREEDY)
    next(stream)
    next(stream)
    stream.close()
    assert_idle(agreeing.shared_engine().engine)


def test_streams_of_one_model_may_overlap(agreeing: eecore.Model) -> None:
    expected = [alone(agreeing, p, Full(), GREEDY).token_ids for p in PROMPTS[:2]]
    one, two = (eecore.stream(agreeing, [p], sampling=GREEDY) for p in PROMPTS[:2])
    got: list[list[int]] = [[], []]
    for first, second in zip(one, two, strict=True):
        got[0] += first.token_ids
        got[1] += second.token_ids
        if len(got[0]) == 5:
            assert alone(agreeing, PROMPTS[0], Full(), GREEDY).token_ids == expected[0]
    assert got == expected


def test_generate_from_several_threads(agreeing: eecore.Model) -> None:
    def run(policy: Exit) -> list[list[int]]:
        outputs = eecore.generate(agreeing, PROMPTS, exit=policy, sampling=GREEDY)
        return [output.token_ids for output in outputs]

    expected = [run(policy) for policy in MODES.values()]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, MODES.values())) == expected


# What is refused


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ("", {}, "prompt: expected some text, got an empty string"),
        ([[]], {}, "prompt: expected at least one token, got none"),
        ([[1, 320]], {}, r"prompt: expected token ids 0\.\.319, got 320"),
        ([[-1]], {}, r"prompt: expected token ids 0\.\.319, got -1"),
        ([[1.5]], {}, r"prompt: expected token ids 0\.\.319, got 1\.5"),
        ([["a"]], {}, r"prompt: expected token ids 0\.\.319, got 'a'"),
        ([None], {}, "prompts: expected strings or lists of token ids, got None"),
        (7, {}, "prompts: expected a string or a list, got 7"),
        ([[1] * 500], {"max_tokens": 13}, "most 512 together, the size of the model's context"),
        ([[1]], {"max_token": 5}, "unknown setting 'max_token': expected one of .*'max_tokens'"),
        ([[1]], {"sampling": SamplingParams(), "top_k": 3}, "expected either sampling= or single"),
        ([[1]], {"sampling": "greedy"}, "sampling: expected SamplingParams objects, got 'greedy'"),
        ([[1]], {"exit": 3}, "exit: expected Exit objects, got 3"),
        ([[1]], {"exit": "deep"}, "exit: expected full, fixed, .*, got 'deep'"),
        ([[1], [2]], {"exit": [Full()]}, r"exit: expected one, or one per prompt \(2\), got 1"),
        ([[1]], {"exit": SelfSpeculative(5)}, r"SelfSpeculative.exit_layer: expected 1\.\.4"),
        ([[1]], {"exit": FixedExit(0)}, r"FixedExit.exit_layer: expected 1\.\.5"),
    ],
)
def test_bad_requests(
    agreeing: eecore.Model, prompts: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        eecore.generate(agreeing, prompts, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, r"max_tokens: expected a whole number, 1\.\.2147483647, got 0"),
        ({"max_tokens": 2.5}, r"max_tokens: expected a whole number, 1\.\..*, got 2\.5"),
        ({"max_tokens": "9"}, r"max_tokens: expected a whole number, 1\.\..*, got '9'"),
        ({"max_tokens": 10**30}, "max_tokens: expected a whole number, .*, got 1000000"),
        ({"max_tokens": True}, "max_tokens: expected a whole number, .*, got True"),
        ({"temperature": -0.1}, r"temperature: expected 0 or 1e-10\.\.1e\+10, got -0\.1"),
        ({"temperature": float("nan")}, r"temperature: expected 0 or 1e-10\.\.1e\+10, got nan"),
        ({"temperature": None}, r"temperature: expected 0 or 1e-10\.\.1e\+10, got None"),
        ({"temperature": 1e-40}, r"temperature: expected 0 or 1e-10\.\.1e\+10, got 1e-40"),
        ({"temperature": 10**20}, r"temperature: expected 0 or 1e-10\.\.1e\+10, got 1000000"),
        ({"temperature": 10**5000}, "temperature: expected .*, got a value of type int"),
        ({"temperature": Decimal("0.5")}, r"temperature: expected .*, got Decimal\('0\.5'\)"),
        ({"temperature": False}, "temperature: expected .*, got False"),
        ({"top_k": -1}, r"top_k: expected a whole number, 0\.\.2147483647, got -1"),
        ({"top_k": 2**31}, r"top_k: expected a whole number, 0\.\.2147483647, got 2147483648"),
        ({"top_p": 0.0}, "top_p: expected above 0, at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p: expected above 0, at most 1, got 1.1"),
        ({"top_p": Fraction(10**400, 3)}, "top_p: expected above 0, at most 1, got Fraction"),
        ({"min_p": 1.5}, r"min_p: expected 0\.\.1, got 1\.5"),
        ({"repetition_penalty": 0}, r"repetition_penalty: expected 0\.01\.\.100, got 0"),
        ({"repetition_penalty": 1e-40}, r"repetition_penalty: expected 0\.01\.\.100, got 1e-40"),
        ({"repetition_penalty": 1e40}, r"repetition_penalty: expected 0\.01\.\.100, got 1e\+40"),
        ({"repetition_penalty": 10**30}, r"repetition_penalty: expected 0\.01\.\.100, got 10000"),
        ({"seed": 2**64}, "seed: expected None or a whole number, 0"),
        ({"seed": -1}, "seed: expected None or a whole number, 0"),
        ({"logprobs": -1}, r"logprobs: expected None or a whole number, 0\.\..*, got -1"),
        ({"logprobs": True}, r"logprobs: expected None or a whole number, 0\.\..*, got True"),
        ({"stop": ("a", "")}, "stop: expected at most 64 strings, none empty"),
        ({"stop": [3]}, "stop: expected at most 64 strings, none empty"),
        ({"stop": "a" * 4097}, "stop: expected .* longer than 4096 characters"),
        ({"stop": itertools.repeat("a")}, "stop: expected at most 64 strings"),
        ({"stop": 3}, "stop: expected at most 64 strings, none empty .*, got 3"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids: expected at most 1024 whole numbers"),
        ({"stop_token_ids": (2**31,)}, r"stop_token_ids: .* 0\.\.2147483647, got \(2147483648,\)"),
        ({"stop_token_ids": (2**63,)}, "stop_token_ids: expected at most 1024 whole numbers"),
        ({"stop_token_ids": (True,)}, r"stop_token_ids: expected .*, got \(True,\)"),
        ({"stop_token_ids": range(1025)}, "stop_token_ids: expected at most 1024 whole numbers"),
        ({"ignore_eos": "no"}, "ignore_eos: expected True or False, got 'no'"),
    ],
)
def test_bad_sampling(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**settings)


def test_numbers_of_numpy_are_numbers(agreeing: eecore.Model) -> None:
    plain, numpy = (
        eecore.generate(
            agreeing,
            [[whole(1), whole(2)]],
            exit=SelfSpeculative(whole(2), whole(3), draft_threshold=real(0.25)),
            sampling=SamplingParams(
                max_tokens=whole(6), temperature=real(0.5), top_k=whole(9), seed=whole(3)
            ),
        )[0].token_ids
        for whole, real in ((int, float), (np.int64, np.float32))
    )
    assert plain == numpy


def test_settings_are_kept_as_pythons_own() -> None:
    one: Any = np.uint64(1)
    half: Any = Fraction(1, 2)
    given: dict[str, Any] = {
        "max_tokens": one,
        "temperature": half,
        "top_k": np.int8(100),
        "top_p": np.float16(0.5),
        "min_p": half,
        "repetition_penalty": one,
        "seed": np.uint64(2**63),
        "logprobs": np.int32(2),
        "stop": [np.str_("end")],
        "stop_token_ids": np.arange(2),
        "ignore_eos": np.bool_(True),
    }
    sampling = SamplingParams(**given)
    plain = SamplingParams(1, 0.5, 100, 0.5, 0.5, 1.0, 2**63, 2, ("end",), (0, 1), True)
    assert sampling == plain
    for name, value in vars(sampling).items():
        assert type(value) is type(getattr(plain, name)), name
    assert {type(text) for text in sampling.stop} == {str}
    assert {type(token) for token in sampling.stop_token_ids} == {int}
    assert type(EngineConfig(kv_cache_tokens=np.int64(64)).num_pages) is int  # type: ignore


class Hostile:
    """An object that raises at every access."""

    def __index__(self) -> int:
        raise OSError("never")

    __int__ = __float__ = __len__ = __repr__ = __index__  # type: ignore[assignment]


@pytest.mark.parametrize(
    "token",
    [
        True,
        np.bool_(True),
        torch.tensor(True),
        Hostile(),
        pytest.param(10**5000, id="huge"),
        np.float64(1),
        "1",
    ],
)
def test_tokens_that_are_no_tokens(agreeing: eecore.Model, token: Any) -> None:
    engine = agreeing.engine()
    with pytest.raises(RequestError, match=r"prompt: expected token ids 0\.\.319, got "):
        engine.add_request([1, token])
    assert_idle(engine)


def test_a_request_is_checked_once(agreeing: eecore.Model) -> None:
    """Settings that were checked when made are not checked again, so that a start is cheap."""
    engine = agreeing.engine()
    calls = Counter[str]()

    def counts(frame: Any, event: str, _: object) -> None:
        calls[Path(frame.f_code.co_filename).name] += event == "call"

    for _ in range(2):
        calls.clear()
        sampling, policy = SamplingParams(max_tokens=1), Full()
        before = sys.getprofile()
        sys.setprofile(counts)
        try:
            engine.add_request([1, 2, 3], exit=policy, sampling=sampling)
        finally:
            sys.setprofile(before)
        (output,) = (step.output for step in engine.run())
        assert output is not None
    assert calls["values.py"] == 0
    assert calls.total() <= 50


@pytest.mark.parametrize(
    ("policy", "ahead", "of_round", "of_row"),
    [
        *[
            (policy, ahead, 60, 6)
            for policy in (Full(), FixedExit(3), ConfidentExit(0.9), SelfSpeculative(2, 3))
            for ahead in (True, False)
        ],
        (PromptLookup(3), True, 60, 6),
        (PromptLookup(3), False, 60, 6),
        (DraftAndVerify(frozenset({3}), frozenset({3}), 3), True, 60, 6),
        (DraftAndVerify(frozenset({3}), frozenset({3}), 3), False, 54, 9),
    ],
    ids=str,
)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rows_that_go_on_cost_few_calls(
    agreeing: eecore.Model,
    policy: eecore.Exit,
    ahead: bool,
    of_round: int,
    of_row: int,
    sampling: SamplingParams,
) -> None:
    """Objects are made of a row's results, and little else is done for each row."""
    for rows in (1, 8):
        engine = engine_of(agreeing, EngineConfig(kv_cache_tokens=2048), ahead=ahead)
        settings = replace(sampling, max_tokens=64, ignore_eos=True)
        for prompt in random_prompts(*[5] * rows, seed=rows):
            engine.add_request(prompt, exit=policy, sampling=settings)
        for _ in range(8):
            engine.step()
        assert python_calls(engine) <= of_round + rows * of_row
        list(engine.run())


def test_tokens_are_kept_as_pythons_own(agreeing: eecore.Model) -> None:
    engine = agreeing.engine()
    mixed: Any = [np.uint8(7), torch.tensor(8), np.int64(9), 10]
    output = run_all(engine, [(mixed, Full(), GREEDY)])[0]
    assert output.prompt_token_ids == [7, 8, 9, 10]
    assert {type(token) for token in output.prompt_token_ids} == {int}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"prompt": "\ud800"}, r"prompt: expected text that the tokenizer takes, got '\\ud800'"),
        ({"prompt": {1, 2}}, r"prompt: expected a string or a list of token ids, got \{1, 2\}"),
        ({"sampling": {"top_k": 3}}, "sampling: expected SamplingParams, got {'top_k': 3}"),
        ({"sampling": SamplingParams(logprobs=321)}, "logprobs: expected at most 320, the size of"),
        ({"exit": Exit()}, r"exit: expected an exit policy such as Full\(\), got Exit\(\)"),
        ({"exit": []}, r"exit: expected an exit policy such as Full\(\), got \[\]"),
        ({"request_id": []}, r"request_id: expected a string, got \[\]"),
    ],
)
def test_requests_that_are_none(
    agreeing: eecore.Model, request_: dict[str, Any], message: str
) -> None:
    engine = agreeing.engine()
    with pytest.raises(RequestError, match=message):
        engine.add_request(**{"prompt": [1], **request_})
    assert_idle(engine)


@pytest.mark.parametrize(
    "settings",
    [{"page_size": True}, {"max_num_seqs": 2.0}, {"kv_cache_tokens": 10**30}, {"page_size": 0}],
)
def test_bad_engine_settings(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(RequestError, match=rf"{name}: expected a whole number, 1\.\.2147483647"):
        EngineConfig(**settings)


def test_single_values_are_taken_as_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop_token_ids=7).stop_token_ids == (7,)  # type: ignore[arg-type]


def test_what_never_fits_is_refused_at_once_and_the_rest_goes_on(agreeing: eecore.Model) -> None:
    engine = agreeing.engine(EngineConfig(kv_cache_tokens=32, page_size=8))
    first = engine.add_request([1] * 14, sampling=GREEDY)
    with pytest.raises(RequestError, match=r"at most 32 together, the size of the KV cache.*got 3"):
        engine.add_request([1] * 15, sampling=GREEDY)
    with pytest.raises(ExitError):
        engine.add_request([1], exit=FixedExit(6))
    with pytest.raises(RequestError, match="exit: expected an exit policy"):
        engine.add_request([1], exit=3)  # type: ignore[arg-type]
    outputs = [step.output for step in engine.run() if step.output]
    assert [output.request_id for output in outputs] == [first]
    assert_idle(engine)


def test_one_bad_prompt_of_many_leaves_no_request(agreeing: eecore.Model) -> None:
    with pytest.raises(RequestError, match="got 999"):
        eecore.generate(agreeing, [[1], [2], [999]])
    assert len(eecore.generate(agreeing, [[1], [2]], max_tokens=2)) == 2


def test_request_ids(agreeing: eecore.Model) -> None:
    engine = agreeing.engine()
    sampling = SamplingParams(max_tokens=2)
    assert engine.add_request([1], sampling=sampling, request_id="request-1") == "request-1"
    with pytest.raises(RequestError, match="request_id: 'request-1' is in use"):
        engine.add_request([1], request_id="request-1")
    ids = {engine.add_request([1], sampling=sampling) for _ in range(3)}
    assert len(ids) == 3
    assert "request-1" not in ids
    list(engine.run())
    assert engine.add_request([1], sampling=sampling, request_id="request-1") == "request-1"
    list(engine.run())
    assert_idle(engine)


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    model = load(write_model(tmp_path, tokenizer=False), kv_cache_tokens=256)
    assert model.tokenizer is None
    (output,) = eecore.generate(model, [1, 2, 3], max_tokens=4, ignore_eos=True)
    assert output.text is None
    assert len(output.token_ids) == 4
    with pytest.raises(RequestError, match="prompt: expected token ids, since the model has no"):
        eecore.generate(model, "text")
    with pytest.raises(RequestError, match="stop: expected a model with a tokenizer"):
        eecore.generate(model, [1], stop="x")


# generate's conveniences


def test_prompts_come_in_many_shapes(agreeing: eecore.Model) -> None:
    assert agreeing.tokenizer is not None
    ids = agreeing.tokenizer.encode("abc")
    wanted = eecore.generate(agreeing, [ids], max_tokens=3)[0].token_ids
    for prompts in ("abc", ["abc"], ids, tuple(ids), [tuple(ids)]):
        (output,) = eecore.generate(agreeing, prompts, max_tokens=3)
        assert output.token_ids == wanted
        assert output.prompt_token_ids == ids
    assert eecore.generate(agreeing, []) == []


def test_a_model_has_to_be_loaded_first() -> None:
    for given in ("a/model", None):
        with pytest.raises(RequestError, match="model: expected one that eecore"):
            eecore.generate(given, ["abc"])  # type: ignore[arg-type]


def test_settings_of_single_prompts(agreeing: eecore.Model) -> None:
    outputs = eecore.generate(
        agreeing,
        PROMPTS[:3],
        exit=[Full(), FixedExit(2), SelfSpeculative(2)],
        sampling=[SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 4, 5)],
    )
    assert [len(output.token_ids) for output in outputs] == [3, 4, 5]
    assert outputs[1].exit_layers == [2] * 4
    assert outputs[1].stats.layers_run == 2 * 3
    assert [output.stats.contract for output in outputs] == [
        "full: every layer",
        "fixed exit after layer 2: no promise about quality",
        "self-speculation (exit layer 2, 6 drafts): lossless",
    ]


def test_stats_add_up(agreeing: eecore.Model) -> None:
    (output,) = eecore.generate(agreeing, [PROMPTS[0]], sampling=GREEDY)
    stats = output.stats
    assert (stats.prompt_tokens, stats.generated_tokens, stats.num_layers) == (5, 18, 5)
    assert (stats.prompt_layers_run, stats.layers_run) == (25, 17 * 5)
    assert stats.mean_exit_layer == 5.0
    assert 0 < stats.time_to_first_token_s <= stats.total_s
    assert stats.tokens_per_s == 18 / stats.total_s
    assert stats.inner_token_latency_s == (stats.total_s - stats.time_to_first_token_s) / 18


# Failing


class Bomb:
    """Makes the n-th pass, of prompts or of a program, raise once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: BaseException, passes: int) -> None:
        self._left = passes
        for owner, name in (
            (Prefill, "run"),
            (CallByCall, "__call__"),
            (Graphs, "__call__"),
            (Tapes, "__call__"),
        ):
            self._arm(monkeypatch, owner, name, error)

    def _arm(
        self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException
    ) -> None:
        whole = getattr(owner, name)

        def explosive(*args: Any) -> Any:
            self._left -= 1
            result = whole(*args)
            if self._left == 0:  # the cache has been written to already
                raise error
            return result

        monkeypatch.setattr(owner, name, explosive)


@pytest.mark.parametrize("passes", [1, 2, 5, 9, 14])
def test_a_step_that_fails_once_changes_no_request(
    agreeing: eecore.Model,
    monkeypatch: pytest.MonkeyPatch,
    passes: int,
) -> None:
    requests = [
        (prompt, policy, sampling)
        for sampling in (GREEDY, SAMPLED)
        for prompt, policy in zip(PROMPTS, MODES.values(), strict=True)
    ]
    config = EngineConfig(kv_cache_tokens=512, page_size=4, max_prefill_chunk=16)
    expected = run_all(agreeing.engine(config), requests)
    engine = agreeing.engine(config)
    ids = [engine.add_request(p, exit=e, sampling=s) for p, e, s in requests]
    Bomb(monkeypatch, Fault("broken"), passes)
    outputs: dict[str, Any] = {step.request_id: step.output for step in engine.run()}
    assert_idle(engine)
    assert [outputs[i].token_ids for i in ids] == [output.token_ids for output in expected]
    assert [outputs[i].exit_layers for i in ids] == [output.exit_layers for output in expected]
