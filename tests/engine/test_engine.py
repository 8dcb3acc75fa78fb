"""The engine and ``eecore.generate``: batching, preemption, stopping, streaming, failing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

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
from eecore.engine.engine import Engine
from eecore.exits import Exit
from tiny_models import random_prompts, write_model
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


# Preemption


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


# Cancelling


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


@pytest.mark.parametrize("stop", [(), ("zzz",)])
def test_steps_that_are_read_late_have_their_own_text(
    agreeing: eecore.Model, stop: tuple[str, ...]
) -> None:
    """Whether the request has ended or not."""
    found = []
    for is_late in (False, True):
        engine = engine_of(agreeing)
        engine.add_request(PROMPTS[1], sampling=replace(GREEDY, stop=stop))
        steps, texts = [], []
        for step in engine.run():
            steps.append(step)
            if not is_late:
                texts.append(step.text)
        found.append([step.text for step in steps] if is_late else texts)
    assert found[0] == found[1]
    assert sum(map(bool, found[0])) > 3


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
        ([[True]], {}, r"prompt: expected token ids 0\.\.319, got True"),
        ([[10**5000]], {}, r"prompt: expected token ids 0\.\.319, got "),
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
    (output,) = eecore.generate(agreeing, [PROMPTS[0]], exit=Full(), sampling=GREEDY)
    stats = output.stats
    assert (stats.prompt_tokens, stats.generated_tokens, stats.num_layers) == (5, 18, 5)
    assert (stats.prompt_layers_run, stats.layers_run) == (25, 17 * 5)
    assert stats.mean_exit_layer == 5.0
    assert 0 < stats.time_to_first_token_s <= stats.total_s
    assert stats.tokens_per_s == 18 / stats.total_s
    assert stats.inner_token_latency_s == (stats.total_s - stats.time_to_first_token_s) / 18


# Failing
