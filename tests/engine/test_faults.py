"""A fault of one request ends that request; other requests are not affected."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine import GREEDY, MODES, PROMPTS, SAMPLED, assert_idle, run_all

import eecore
from devices import engine_of, load
from eecore import (
    ConfidentExit,
    DraftAndVerify,
    EngineConfig,
    FixedExit,
    Full,
    SamplingParams,
    SelfSpeculative,
)
from eecore.decoding.draft_outcomes import DraftOutcomes
from eecore.decoding.draft_step import DraftStep
from eecore.decoding.exit_step import ExitStep
from eecore.decoding.iterate import Iterations
from eecore.decoding.prefill import Prefill
from eecore.engine.commit import Commits
from eecore.engine.faults import described, isolated
from eecore.engine.text import TextStream
from eecore.errors import ModelError
from eecore.exits import Exit
from eecore.planning.row import Outcome
from eecore.scheduling.scheduler import Work
from eecore.scheduling.sequence import Sequence
from tiny_models import scale_layers, write_model
from tripwire import Fault

pytestmark = pytest.mark.usefixtures("one_thread")

BAD = "bad"
CONFIG = EngineConfig(kv_cache_tokens=512, page_size=4, max_prefill_chunk=16)
NOT_FINITE = "expected finite logits and confidences from the model, got NaN or infinity"


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="eecore")


def names_the_bad(given: Any) -> bool:
    """Whether the bad request is among the arguments of a function."""
    if isinstance(given, Sequence):
        return given.request_id == BAD
    if isinstance(given, TextStream):
        return given.watches
    if isinstance(given, list) or type(given) is tuple:
        return any(map(names_the_bad, given))
    sequence = getattr(given, "sequence", None)
    return sequence is not None and names_the_bad(sequence)


def break_for_the_bad(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    whole = getattr(owner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        if any(map(names_the_bad, args)):
            raise Fault("of this request")
        return whole(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)


@pytest.mark.parametrize("ahead", [False, True], ids=["landed", "ahead"])
@pytest.mark.parametrize(
    ("owner", "name", "policy"),
    [
        (Prefill, "__init__", Full()),
        (Prefill, "_chunk", Full()),
        (ExitStep, "load", Full()),
        (ExitStep, "outcomes", ConfidentExit(0.35)),
        (DraftStep, "load", SelfSpeculative(2, 4)),
        (DraftOutcomes, "of", DraftAndVerify({3}, {2, 4})),
        (DraftOutcomes, "of", SelfSpeculative(2, 4)),
        (Commits, "taken", Full()),
        (TextStream, "after", Full()),
        (TextStream, "whole", Full()),
    ],
)
def test_whatever_fails_for_a_request_ends_it_alone(
    agreeing: eecore.Model,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    policy: Exit,
    ahead: bool,
) -> None:
    others = [
        (p, e, s) for p, e in zip(PROMPTS, MODES.values(), strict=True) for s in (GREEDY, SAMPLED)
    ]
    expected = run_all(engine_of(agreeing, CONFIG, ahead=ahead), others)
    engine = engine_of(agreeing, CONFIG, ahead=ahead)
    break_for_the_bad(monkeypatch, owner, name)
    ids = [engine.add_request(p, exit=e, sampling=s) for p, e, s in others[:6]]
    watching = SamplingParams(max_tokens=18, ignore_eos=True, stop=("\0never",))
    engine.add_request(PROMPTS[0], exit=policy, sampling=watching, request_id=BAD)
    ids += [engine.add_request(p, exit=e, sampling=s) for p, e, s in others[6:]]
    outputs = {step.request_id: step.output for step in engine.run() if step.output is not None}
    assert_idle(engine)
    bad = outputs.pop(BAD)
    assert (bad.finish_reason, bad.error) == ("error", "Fault: of this request")
    assert bad.stats.generated_tokens == len(bad.token_ids) < 18
    for request_id, output in zip(ids, expected, strict=True):
        got = outputs[request_id]
        assert (got.token_ids, got.text, got.error) == (output.token_ids, output.text, None)


def test_a_broken_device_ends_all_requests(
    agreeing: eecore.Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="eecore")
    engine = agreeing.engine(CONFIG)
    ids = [engine.add_request(prompt, sampling=GREEDY) for prompt in PROMPTS]
    engine.step()
    calls = []

    def broken(_: Iterations, works: list[Work], **_settings: Any) -> list[Outcome]:
        calls.append(len(works))
        raise Fault("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Iterations, "iterate", broken)
        steps = engine.step()
    assert [step.request_id for step in steps] == ids
    for step in steps:
        assert step.output is not None
        assert step.output.error == "Fault: the device is gone"
        assert len(step.output.token_ids) <= 1
    assert len(calls) <= 2 * len(ids)
    assert len([r for r in caplog.records if r.exc_info and r.levelname == "ERROR"]) == len(ids)
    assert_idle(engine)
    assert run_all(engine, [(PROMPTS[0], Full(), GREEDY)])[0].finish_reason == "length"


def test_generate_gives_an_output_with_the_error(
    agreeing: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = eecore.generate(agreeing, PROMPTS[0], sampling=GREEDY)[0]
    with monkeypatch.context() as patch:
        break_for_the_bad(patch, TextStream, "whole")
        stop = SamplingParams(max_tokens=18, ignore_eos=True, stop=("\0never",))
        good, bad = eecore.generate(agreeing, [PROMPTS[0]] * 2, sampling=[GREEDY, stop])
    assert (good.text, good.finish_reason) == (expected.text, "length")
    assert (bad.finish_reason, bad.error) == ("error", "Fault: of this request")
    assert bad.token_ids == expected.token_ids[: len(bad.token_ids)]


# Halving


def works_of(count: int) -> list[Work]:
    sequences = [
        Sequence(str(i), [1], SamplingParams(), Full(), i, frozenset()) for i in range(count)
    ]
    return [Work(sequence, 1) for sequence in sequences]


def names(works: list[Work]) -> list[str]:
    return [work.sequence.request_id for work in works]


@pytest.mark.parametrize("bad", [set(), {"0"}, {"3", "4"}, {"0", "6"}, set("0123456")])
def test_all_that_fail_are_found_and_the_rest_runs_together(bad: set[str]) -> None:
    runs: list[list[str]] = []

    def run(works: list[Work]) -> list[Outcome]:
        runs.append(names(works))
        if bad & set(runs[-1]):
            raise ValueError("bad")
        return [Outcome(work.sequence, len(works)) for work in works]

    works = works_of(7)
    failed: list[str] = []
    outcomes = isolated(run, works, failed.append)
    assert [outcome.sequence for outcome in outcomes] == [work.sequence for work in works]
    for outcome in outcomes:
        name = outcome.sequence.request_id
        assert (outcome.error is not None) == (name in bad)
        if name not in bad:
            assert outcome.num_computed == 7 - len(bad)  # all of them in one run
    good = [name for name in names(works) if name not in bad]
    assert not good or runs[-1] == good
    assert len(runs) <= 1 + 2 * len(works)
    assert failed == (["an iteration of 7 requests failed: once more"] if bad else [])


def test_what_does_not_come_back_is_nobodys_fault() -> None:
    left = [1]

    def run(works: list[Work]) -> list[Outcome]:
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError
        return [Outcome(work.sequence, 1) for work in works]

    assert all(outcome.error is None for outcome in isolated(run, works_of(1), print))


def test_interrupts_are_not_kept_back() -> None:
    def run(_: list[Work]) -> list[Outcome]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        isolated(run, works_of(3), print)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise OSError("no")


def test_errors_in_a_sentence() -> None:
    assert described(ModelError("layers: expected 1, got 2")) == "layers: expected 1, got 2"
    assert described(KeyError("x")) == "KeyError: 'x'"
    assert described(Unspeakable()) == "Unspeakable: an error that cannot be shown"
    assert len(described(ValueError("x" * 10**6))) == 2000


# NaN and infinity

WAYS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "logprobs": SamplingParams(max_tokens=18, ignore_eos=True, logprobs=3),
}


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    directory = write_model(tmp_path_factory.mktemp("fragile"), seed=3, num_hidden_layers=5)
    return load(scale_layers(directory, {2: 0.2, 3: 0.1, 4: 0.2}), kv_cache_tokens=2048)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_states_of_nan_end_their_own_request(
    fragile: eecore.Model, mode: str, way: str, value: float
) -> None:
    """Tokens whose embedding is broken: in a prompt, and one that a request generates."""
    policy, sampling = MODES[mode], WAYS[way]
    requests = [(prompt, policy, sampling) for prompt in PROMPTS]
    expected = run_all(fragile.engine(CONFIG), requests)
    embedding = fragile.network.weights.embed_tokens.weight  # type: ignore[union-attr]
    others = {t for o in expected[1:] for t in (*o.prompt_token_ids, *o.token_ids)}
    own = [t for t in expected[0].token_ids[2:] if t not in others | {*PROMPTS[0]}]
    if not own:
        pytest.skip("every token of it is one of the others' too")
    before = embedding[own[0]].clone()
    embedding[own[0]] = value
    engine = fragile.engine(CONFIG)
    outputs = run_all(engine, [*requests, ([1, own[0], 2], policy, sampling)])
    embedding[own[0]] = before
    assert_idle(engine)
    stop = expected[0].token_ids.index(own[0]) + 1
    count = len(outputs[0].token_ids)
    assert outputs[0].token_ids == expected[0].token_ids[:count]
    # A round accepts no draft that was verified together with a broken token.
    assert 0 < count <= stop if policy.max_drafts else count == stop
    assert outputs[-1].token_ids == []
    for output in (outputs[0], outputs[-1]):
        assert (output.finish_reason, output.error) == ("error", NOT_FINITE)
    for output, alone in zip(outputs[1:-1], expected[1:], strict=True):
        assert (output.token_ids, output.error) == (alone.token_ids, None)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "policy", [Full(), FixedExit(2), SelfSpeculative(2, 3), DraftAndVerify({3}, {1})]
)
def test_logits_of_nan_end_every_request(
    tmp_path: Path, policy: Exit, sampling: SamplingParams
) -> None:
    model = load(write_model(tmp_path), kv_cache_tokens=256)
    head = model.network.weights.lm_head.weight  # type: ignore[union-attr]
    engine = model.engine()
    engine.add_request([1, 2], exit=policy, sampling=sampling)
    engine.step()
    head[7] = torch.nan
    (*_, last) = engine.run()
    assert last.output is not None
    assert (last.output.finish_reason, last.output.error) == ("error", NOT_FINITE)
    assert last.output.text is not None
    assert last.output.text.endswith(last.text)
    (output,) = eecore.generate(model, [[1, 2]], exit=policy, sampling=sampling)
    assert (output.token_ids, output.error) == ([], NOT_FINITE)
