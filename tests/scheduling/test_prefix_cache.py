"""The prefix cache: shared pages, evicted pages, and outputs that do not depend on either."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import eecore
from devices import cpu_only, engine_of
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
from eecore.decoding.iterate import Iterations
from eecore.errors import RequestError
from eecore.exits import Exit
from eecore.scheduling.scheduler import Work
from head_packs import write_pack
from tiny_models import random_prompts, scale_layers, write_model
from tripwire import Fault
from workloads import check_books

pytestmark = [pytest.mark.usefixtures("one_thread"), cpu_only]

PAGE = 4
CONFIG = EngineConfig(kv_cache_tokens=512, page_size=PAGE, max_prefill_chunk=16)
SIX = SamplingParams(max_tokens=6, ignore_eos=True)
FORMATS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "weights": "int8"},
    "int8-bfloat16": {"dtype": "bfloat16", "weights": "int8"},
    "int4": {"dtype": "float32", "weights": "int4"},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers, the last two of which change little, and a draft head."""
    directory = write_model(tmp_path_factory.mktemp("prefixes"), num_hidden_layers=3, seed=8)
    scale_layers(directory, {1: 0.3, 2: 0.3})
    write_pack(directory / "exits", eecore.load(directory), taps=(2,), follows_tokens=True)
    return directory


@pytest.fixture(scope="module")
def model(directory: Path) -> eecore.Model:
    return eecore.load(directory, device="cpu", engine=CONFIG)


def prompt_of(count: int, seed: int = 0) -> list[int]:
    return random_prompts(count, seed=seed)[0]


def run(engine: Engine, prompt: list[int], exit: Exit | None = None, **fields: Any) -> Output:
    """The output of one request that runs alone."""
    settings = {"max_tokens": 6, "ignore_eos": True, **fields}
    name = engine.add_request(prompt, exit=exit, sampling=SamplingParams(**settings))
    outputs = {step.request_id: step.output for step in engine.run()}
    check_books(engine)
    output = outputs[name]
    assert output is not None
    assert output.error is None
    return output


def cached(engine: Engine, prompt: list[int], exit: Exit | None = None) -> int:
    """The number of a prompt's positions that come from the cache."""
    return run(engine, prompt, exit, max_tokens=1).stats.cached_tokens


def bits(output: Output) -> tuple[Any, ...]:
    """All of a request's output except its times and its work."""
    given = (output.token_ids, output.text, output.finish_reason)
    given += (output.logprobs, output.top_logprobs)
    return (*given, output.exit_layers, output.confidences)


# What is shared


def test_a_prompt_begins_after_the_prefix_it_shares(model: eecore.Model) -> None:
    engine = engine_of(model)
    prompt = prompt_of(23)
    first, again = run(engine, prompt), run(engine, prompt)
    assert (first.stats.cached_tokens, again.stats.cached_tokens) == (0, 20)
    assert (first.stats.prompt_layers_run, again.stats.prompt_layers_run) == (23 * 3, 3 * 3)
    assert again.stats.prompt_tokens == 23
    assert bits(first) == bits(again)
    assert cached(engine, [*prompt[:10], 7, 7, 7, 7]) == 8
    assert cached(engine, [7, *prompt]) == 0
    assert cached(engine, prompt[:3]) == 0


def test_the_last_position_of_a_prompt_is_always_computed(model: eecore.Model) -> None:
    engine = engine_of(model)
    prompt = prompt_of(24)
    run(engine, prompt)
    for count, hits in ((24, 20), (21, 20), (20, 16), (5, 4), (4, 0), (1, 0)):
        assert cached(engine, prompt[:count]) == hits


@pytest.mark.parametrize("policy", [Full(), SelfSpeculative(2, 4)], ids=["full", "speculative"])
def test_the_next_turn_of_a_chat_finds_the_answer_before(model: eecore.Model, policy: Exit) -> None:
    engine = engine_of(model)
    prompt = prompt_of(9)
    answer = run(engine, prompt, policy, max_tokens=16).token_ids
    assert len(answer) == 16
    # All but the last token of the answer, which was never computed.
    assert cached(engine, [*prompt, *answer, 1, 2, 3]) == 24


def test_prompts_that_come_while_others_run_find_what_these_have_computed(
    model: eecore.Model,
) -> None:
    engine = engine_of(model)
    prompt = prompt_of(40)
    engine.add_request(prompt, sampling=SIX, request_id="first")
    engine.step()  # a chunk of 16
    engine.add_request(prompt, sampling=SIX, request_id="second")
    outputs = {step.request_id: step.output for step in engine.run() if step.output}
    assert outputs["second"].stats.cached_tokens == 16
    assert bits(outputs["first"]) == bits(outputs["second"])


# What is not shared: pages of another computation


@pytest.mark.parametrize("policy", [FixedExit(1), FixedExit(2)], ids=str)
def test_a_fixed_exit_caches_no_page(model: eecore.Model, policy: Exit) -> None:
    engine = engine_of(model)
    prompt = prompt_of(30)
    alone = run(engine_of(model), prompt, policy, logprobs=2)
    assert bits(run(engine, prompt, policy, logprobs=2)) == bits(alone)
    assert engine.num_cached_pages == 0
    run(engine, prompt)
    # The layers that it runs are those of the whole model.
    shallow = run(engine, prompt, policy, logprobs=2)
    assert shallow.stats.cached_tokens == 28
    assert shallow.stats.prompt_layers_run == 2 * policy.exit_layer  # type: ignore[attr-defined]
    assert bits(shallow) == bits(alone)


def test_what_was_filled_from_an_exit_is_never_found(model: eecore.Model) -> None:
    engine = engine_of(model)
    prompt = prompt_of(18)
    early = run(engine, prompt, ConfidentExit(0.0), max_tokens=20)
    assert set(early.exit_layers[1:]) == {1}
    text = [*prompt, *early.token_ids]
    assert cached(engine, text) == 16  # of the prompt's own pages
    full = run(engine, text)
    assert bits(full) == bits(run(engine_of(model), text))


# Outputs do not depend on the cache


def check_pages(engine: Engine, plain: EngineConfig, outputs: list[Output]) -> None:
    """Every page that is found has to hold the bits of a prompt's pass."""
    cache = engine.pages._cache
    assert cache is not None
    seen = set()
    for output in outputs:
        text = [*output.prompt_token_ids, *output.token_ids, 0]
        sequence = engine.prepare(text, sampling=SamplingParams(max_tokens=1))
        found = cache.find(sequence)
        if seen >= set(found):
            continue
        seen |= set(found)
        fresh = Engine(engine.network, None, plain)
        name = fresh.add_request(text, sampling=SamplingParams(max_tokens=2, ignore_eos=True))
        while not fresh.requests[name].output_ids:
            fresh.step()
        own = fresh.requests[name].pages[: len(found)]
        for ours, theirs in ((engine.kv.k, fresh.kv.k), (engine.kv.v, fresh.kv.v)):
            assert torch.equal(ours[:, found], theirs[:, own])
    assert seen == set(cache._keys)


@pytest.mark.parametrize("settings", FORMATS.values(), ids=FORMATS)
def test_no_output_of_a_long_text_depends_on_it(settings: dict[str, str], tmp_path: Path) -> None:
    """The keys of a long text are split, and hits begin where no chunk began before."""
    directory = write_model(tmp_path, num_hidden_layers=2, max_position_embeddings=4096)
    model = eecore.load(directory, device="cpu", kv_cache_tokens=4096, **settings)
    plain = model.without_prefix_cache()
    engine, prompt = model.engine(), prompt_of(1100)
    outputs = []
    for count in (700, 1003, 1100):
        text, policy = prompt[:count], SelfSpeculative(1, 3) if count == 700 else Full()
        outputs.append(run(engine, text, policy, max_tokens=40, logprobs=3))
        assert bits(outputs[-1]) == bits(
            run(plain.engine(), text, policy, max_tokens=40, logprobs=3)
        )
    assert [output.stats.cached_tokens for output in outputs] == [0, 688, 992]
    check_pages(engine, plain.engine_config, outputs)


# Which pages are evicted


def in_chain(engine: Engine, text: list[int]) -> list[int]:
    """The pages of a text, from its beginning."""
    cache = engine.pages._cache
    assert cache is not None
    return cache.find(engine.prepare([*text, 0], sampling=SIX))


def test_a_used_prefix_stays_where_a_request_cannot_begin_yet(model: eecore.Model) -> None:
    engine = engine_of(model, EngineConfig(kv_cache_tokens=16 * PAGE, page_size=PAGE))
    prompt = prompt_of(24)
    run(engine, prompt, max_tokens=1)
    engine.add_request(prompt_of(24, 1), sampling=SIX)
    engine.step()
    engine.add_request([*prompt, *prompt_of(24, 2)], sampling=SIX)
    engine.step()
    assert engine.num_waiting == 1
    kept = list(engine.pages._kept)
    assert kept == in_chain(engine, prompt)[::-1]
    assert len(kept) == 6


# Requests that end in the middle


@pytest.mark.parametrize("chunks", [0, 2])
def test_pages_of_a_failed_request_are_not_kept(
    model: eecore.Model,
    chunks: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, logger="eecore")
    engine = engine_of(model)
    prompt = prompt_of(60)
    whole = Iterations.iterate

    def fails(self: Iterations, works: list[Work], **settings: Any) -> Any:
        outcomes = whole(self, works, **settings)  # keys and values are written by now
        bad = [work.sequence for work in works if work.sequence.request_id == "bad"]
        if bad and bad[0].num_computed >= 16 * chunks:
            raise Fault
        return outcomes

    monkeypatch.setattr(Iterations, "iterate", fails)
    run(engine, prompt[:8])
    engine.add_request(prompt, sampling=SIX, request_id="bad")
    other = engine.add_request(prompt_of(50, 3), sampling=SIX)
    outputs = {step.request_id: step.output for step in engine.run() if step.output}
    check_books(engine)
    assert outputs["bad"].finish_reason == "error"
    monkeypatch.undo()
    assert cached(engine, prompt) == 0
    assert bits(outputs[other]) == bits(run(engine_of(model), prompt_of(50, 3)))


def test_positions_after_the_end_of_a_text_are_not_shared(model: eecore.Model) -> None:
    """A round may have computed more positions than the text has."""
    prompt, policy = prompt_of(10), SelfSpeculative(2, 6)
    whole = run(engine_of(model), prompt, max_tokens=40).text
    assert whole is not None
    lengths = set()
    for start in range(len(whole) - 1):
        engine = engine_of(model, EngineConfig(512, page_size=1))
        output = run(engine, prompt, policy, max_tokens=40, stop=(whole[start : start + 2],))
        text = [*prompt, *output.token_ids]
        assert len(text) - 1 <= engine.num_cached_pages <= len(text)
        lengths.add(engine.num_cached_pages - len(text))
        longer = [*text, *prompt_of(6, 9)]
        assert bits(run(engine, longer)) == bits(run(engine_of(model), longer))
    assert lengths == {-1, 0}


# Books


def test_a_page_is_back_when_its_last_owner_gives_it_back(model: eecore.Model) -> None:
    engine = engine_of(model)
    prompt = prompt_of(24)
    run(engine, prompt, max_tokens=1)
    pages, sequences = engine.pages, [engine.prepare([*prompt, tail]) for tail in (1, 2)]
    for sequence in sequences:
        sequence.pages = pages.share(sequence)
    assert pages.num_free == pages.num_pages - 6
    first = sequences[0].pages
    assert pages.num_freed_by(first) == 0
    assert pages.num_freed_by([*first, *first]) == 6
    pages.free(first)
    assert pages.num_free == pages.num_pages - 6
    pages.free(first)
    assert pages.num_free == pages.num_pages
    pages.share(sequences[0])
    pages.free([*pages.share(sequences[1]), *first])
    check_books(engine)
    with pytest.raises(ValueError, match=f"page {first[0]} is not allocated"):
        pages.free(first)


# Switching it off, and emptying it


def test_the_setting_is_a_flag() -> None:
    with pytest.raises(RequestError, match="prefix_cache: expected True or False, got 1"):
        EngineConfig(prefix_cache=1)  # type: ignore[arg-type]
