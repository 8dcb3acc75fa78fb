"""The prefix cache: shared pages, evicted pages, and outputs that do not depend on either."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from test_confident_exit import mlp_classifier

import eecore
from devices import as_on_cuda, cpu_only, engine_of
from eecore import (
    Auto,
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
from tiers import in_all
from tiny_models import random_prompts, scale_layers, write_model
from tiny_t5 import write_t5
from tripwire import Fault, Interrupt
from workloads import Driver, Request, check_books, policies, same

pytestmark = [pytest.mark.usefixtures("one_thread"), cpu_only]

POLICIES = policies(mlp_classifier())
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


def test_requests_of_one_call_share_nothing_that_is_not_computed_yet(model: eecore.Model) -> None:
    engine = engine_of(model)
    prompt = prompt_of(30)
    for name in "abc":
        engine.add_request(prompt, sampling=SIX, request_id=name)
    outputs = [step.output for step in engine.run() if step.output]
    assert [output.stats.cached_tokens for output in outputs] == [0, 0, 0]
    assert cached(engine, prompt) == 28
    # One of three equal copies is kept.
    assert engine.num_cached_pages == (30 + 6 - 1) // PAGE


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


def test_a_fixed_exit_at_the_last_layer_is_the_whole_model(model: eecore.Model) -> None:
    engine = engine_of(model)
    run(engine, prompt_of(30), FixedExit(3))
    assert cached(engine, prompt_of(30)) == 28


def test_what_was_filled_from_an_exit_is_never_found(model: eecore.Model) -> None:
    engine = engine_of(model)
    prompt = prompt_of(18)
    early = run(engine, prompt, ConfidentExit(0.0), max_tokens=20)
    assert set(early.exit_layers[1:]) == {1}
    text = [*prompt, *early.token_ids]
    assert cached(engine, text) == 16  # of the prompt's own pages
    full = run(engine, text)
    assert bits(full) == bits(run(engine_of(model), text))


def test_nothing_after_a_filled_position_is_found(model: eecore.Model) -> None:
    """Not even positions that ran all layers, if one before them did not."""
    policy = ConfidentExit(0.35, decay_tau=0.0)
    for seed in range(20):
        engine = engine_of(model, EngineConfig(512, page_size=2))
        prompt = prompt_of(8, seed)
        output = run(engine, prompt, policy, max_tokens=24)
        depths = [3] * len(prompt) + output.exit_layers[1:]
        pages = [depths[i : i + 2] for i in range(0, len(depths) - 1, 2)]
        exact = [set(page) == {3} for page in pages]
        if not all(exact) and any(exact[exact.index(False) :]):
            assert engine.num_cached_pages == exact.index(False)
            return
    pytest.fail("expected a full page after one that was filled, got none")


def test_a_replay_takes_no_exact_page_where_a_token_exited_early(model: eecore.Model) -> None:
    policy, prompt = ConfidentExit(0.35, decay_tau=0.0), prompt_of(10)
    alone = run(engine_of(model), prompt, policy, max_tokens=24)
    assert {1, 3} <= set(alone.exit_layers[1:14])
    engine = engine_of(model)
    run(engine, [*prompt, *alone.token_ids])
    assert engine.num_cached_pages >= 8
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    name = engine.add_request(prompt, exit=policy, sampling=sampling)
    for _ in range(14):
        engine.step()
    engine.scheduler.preempt(engine.requests[name])
    (output,) = [step.output for step in engine.run() if step.output]
    assert output.stats.preemptions == 1
    assert bits(output) == bits(alone)


# Outputs do not depend on the cache


def conversations(engine: Engine, able: list[Exit]) -> Iterator[tuple[Exit, Output]]:
    """Rounds of requests that go on where those of the last round ended, all at once."""
    random = Random(6)
    histories = [prompt_of(37, seed=seed) for seed in range(2)]
    for _ in range(3):
        names = {}
        for number, policy in enumerate(able):
            sampling = SamplingParams(
                max_tokens=random.choice((5, 12)),
                ignore_eos=True,
                logprobs=random.choice((0, 3)),
                temperature=random.choice((0.0, 0.8)) if not isinstance(policy, Auto) else 0.0,
                repetition_penalty=random.choice((1.0, 1.2)),
                seed=number,
            )
            prompt = [*histories[number % 2], *prompt_of(random.randrange(1, 9), seed=number)]
            names[engine.add_request(prompt, exit=policy, sampling=sampling)] = policy
        outputs = {step.request_id: step.output for step in engine.run()}
        for name, policy in names.items():
            output = outputs[name]
            assert output is not None
            yield policy, output
        for i in range(2):
            said = outputs[list(names)[i]]
            assert said is not None
            histories[i] = [*said.prompt_token_ids, *said.token_ids]


def check_conversations(model: eecore.Model) -> None:
    able = [p for p in POLICIES if model.network.draft_head is not None or not p.needs_head]
    plain = EngineConfig(4096, PAGE, max_prefill_chunk=16, prefix_cache=False)
    shared = EngineConfig(4096, PAGE, max_prefill_chunk=16)
    expected = list(conversations(engine_of(model, plain), able))
    engine = engine_of(model, shared)
    got = list(conversations(engine, able))
    for (policy, output), (_, alone) in zip(got, expected, strict=True):
        if isinstance(policy, Auto):  # which drafts there are depends on time
            assert bits(output)[:-2] == bits(alone)[:-2]
        else:
            assert bits(output) == bits(alone), policy
    assert sum(output.stats.cached_tokens for _, output in got) > 900
    assert not any(output.stats.cached_tokens for _, output in expected)
    check_pages(engine, plain, [output for _, output in got])


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
def test_no_output_depends_on_the_cache(directory: Path, settings: dict[str, str]) -> None:
    check_conversations(eecore.load(directory, device="cpu", kv_cache_tokens=64, **settings))


@pytest.mark.parametrize("family", ["llama_biased", "mistral", "qwen2_windows", "qwen3"])
def test_no_output_of_other_families_depends_on_it(family: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path, family, num_hidden_layers=3, seed=8)
    check_conversations(eecore.load(directory, device="cpu", kv_cache_tokens=64))


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


def test_pages_without_an_owner_are_free(model: eecore.Model) -> None:
    engine = engine_of(model)
    run(engine, prompt_of(40))
    assert engine.num_cached_pages == 11
    assert engine.pages.num_free == engine.pages.num_pages
    assert engine.num_used_pages == 0


def test_what_was_not_used_for_longest_goes_first_and_ends_before_beginnings(
    model: eecore.Model,
) -> None:
    engine = engine_of(model, EngineConfig(kv_cache_tokens=16 * PAGE, page_size=PAGE))
    old, young = prompt_of(25, 1), prompt_of(21, 2)
    for prompt in (old, young, old):  # 6 pages, 5 pages, the first once more
        run(engine, prompt, max_tokens=1)
    assert engine.num_cached_pages == 11
    run(engine, prompt_of(27, 3), max_tokens=1)  # 7 pages, of which 5 are empty
    assert engine.num_cached_pages == 6 + 3 + 6
    sequences = [engine.prepare(prompt, sampling=SIX) for prompt in (old, young)]
    cache = engine.pages._cache
    assert cache is not None
    assert [len(cache.find(sequence)) for sequence in sequences] == [6, 3]
    assert cached(engine, young) == 12


def in_chain(engine: Engine, text: list[int]) -> list[int]:
    """The pages of a text, from its beginning."""
    cache = engine.pages._cache
    assert cache is not None
    return cache.find(engine.prepare([*text, 0], sampling=SIX))


def test_the_beginning_of_a_used_prefix_stays_longer(
    model: eecore.Model,
) -> None:
    """Two requests compute the same text at once: the pages of the one that ends first are kept."""
    engine = engine_of(model)
    prompt = prompt_of(16)
    for tokens in (1, 12):
        engine.add_request(prompt, sampling=SamplingParams(max_tokens=tokens, ignore_eos=True))
    outputs = [step.output for step in engine.run() if step.output]
    text = [*prompt, *outputs[-1].token_ids]
    assert len(in_chain(engine, text)) == engine.num_cached_pages == 6
    assert list(engine.pages._kept) == in_chain(engine, text)[::-1]


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


def test_no_request_loses_pages_while_cached_ones_are_left(model: eecore.Model) -> None:
    engine = engine_of(model, EngineConfig(kv_cache_tokens=16 * PAGE, page_size=PAGE))
    run(engine, prompt_of(48))
    assert engine.num_cached_pages == 13
    ids = [engine.add_request(prompt_of(18, seed), sampling=SIX) for seed in (1, 2)]
    engine.step()
    engine.hold(ids[0])
    third = engine.add_request(prompt_of(9, 3), sampling=SIX)
    while third in engine.requests:
        engine.step()
        check_books(engine)
    assert engine.requests[ids[0]].has_pages
    engine.resume(ids[0])
    outputs = [step.output for step in engine.run() if step.output]
    assert [output.stats.preemptions for output in outputs] == [0] * len(outputs)


def test_pages_in_use_stay_when_others_run_out(model: eecore.Model) -> None:
    """Two requests share a beginning; a third one has room only when both are done."""
    config = EngineConfig(kv_cache_tokens=12 * PAGE, page_size=PAGE)
    engine = engine_of(model, config)
    prompt = prompt_of(24)
    run(engine, prompt, max_tokens=1)
    requests = [[*prompt, 1], [*prompt, 2], prompt_of(40, 5)]
    ids = [engine.add_request(each, sampling=SIX) for each in requests]
    engine.step()
    pages = [engine.requests[name].pages for name in ids]
    assert pages[0][:6] == pages[1][:6]
    assert not pages[2]
    assert engine.num_used_pages == len({*pages[0], *pages[1]})
    outputs = {}
    while engine.has_unfinished:
        check_books(engine)
        outputs.update({step.request_id: step.output for step in engine.step() if step.output})
    for name, each in zip(ids, requests, strict=True):
        assert bits(outputs[name]) == bits(run(engine_of(model), each))
    assert outputs[ids[0]].stats.cached_tokens == outputs[ids[1]].stats.cached_tokens == 24


@pytest.mark.parametrize("policy", POLICIES[:10], ids=lambda policy: type(policy).__name__)
def test_a_preempted_request_goes_on_from_what_is_left_of_it(
    model: eecore.Model, policy: Exit
) -> None:
    config = EngineConfig(64, PAGE, max_prefill_chunk=9, max_num_seqs=4)
    engine = engine_of(model, config)
    beginning = prompt_of(13)
    prompts = [[*beginning, *prompt_of(5, seed)] for seed in range(5)]
    sampling = SamplingParams(max_tokens=17, ignore_eos=True)
    ids = [engine.add_request(prompt, exit=policy, sampling=sampling) for prompt in prompts]
    outputs = {}
    while engine.has_unfinished:
        outputs.update({step.request_id: step.output for step in engine.step() if step.output})
        check_books(engine)
    assert sum(output.stats.preemptions for output in outputs.values()) > 0
    for name, prompt in zip(ids, prompts, strict=True):
        assert same(outputs[name], run(engine_of(model), prompt, policy, max_tokens=17))


def test_a_replay_is_no_hit_but_costs_less(model: eecore.Model) -> None:
    engine = engine_of(model)
    name = engine.add_request(prompt_of(22), sampling=SIX)
    for _ in range(4):
        engine.step()
    engine.scheduler.preempt(engine.requests[name])
    (output,) = [step.output for step in engine.run() if step.output]
    assert bits(output) == bits(run(engine_of(model), prompt_of(22)))
    assert output.stats.cached_tokens == 0
    # 22 positions, and of the 24 replayed ones those after the last full page but one.
    assert output.stats.prompt_layers_run == (22 + 4) * 3


# Requests that end in the middle


def test_pages_of_a_cancelled_request_are_found(model: eecore.Model) -> None:
    engine = engine_of(model)
    prompt = prompt_of(60)
    name = engine.add_request(prompt, sampling=SIX)
    engine.step()
    engine.step()
    engine.cancel(name)
    check_books(engine)
    assert cached(engine, prompt) == 32


def test_a_request_that_never_ran_caches_nothing(model: eecore.Model) -> None:
    engine = engine_of(model)
    engine.cancel(engine.add_request(prompt_of(60), sampling=SIX))
    assert engine.num_cached_pages == 0


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


SMALL = [
    EngineConfig(kv_cache_tokens=48, page_size=2, max_num_seqs=4, max_prefill_chunk=5),
    EngineConfig(kv_cache_tokens=40, page_size=1, max_batch_tokens=9, max_num_seqs=4),
    EngineConfig(kv_cache_tokens=64, page_size=4, max_num_seqs=3, max_batch_tokens=24),
    EngineConfig(kv_cache_tokens=96, page_size=8, max_num_seqs=5),
]


class Chance:
    """Requests that begin like others, and their outputs when they run alone."""

    def __init__(self, model: eecore.Model, seed: int) -> None:
        self.random = Random(seed)
        self._model = model
        self._texts = [prompt_of(26, seed=100 * seed + i) for i in range(3)]
        self._alone: dict[int, Output] = {}
        self.requests: list[Request] = []

    def request(self) -> int:
        """The number of a request that fits into the smallest cache."""
        random = self.random
        if self.requests and random.random() < 0.2:  # the very same once more
            return random.randrange(len(self.requests))
        start = random.choice(self._texts)[: random.randint(1, 20)]
        prompt = [*start, *prompt_of(random.randint(1, 5), seed=random.randrange(99))]
        temperature = random.choice((0.0, 0.0, 0.8))
        sampling = SamplingParams(
            max_tokens=random.choice((1, 3, 8, 12)),
            ignore_eos=True,
            temperature=temperature,
            logprobs=random.choice((None, 2)),
            stop_token_ids=tuple(random.sample(range(320), 5)),
            seed=random.getrandbits(40),
        )
        able = [p for p in POLICIES if not isinstance(p, Auto)]
        self.requests.append(Request(prompt, random.choice(able), sampling))
        return len(self.requests) - 1

    def alone(self, number: int) -> Output:
        if number not in self._alone:
            request = self.requests[number]
            engine = engine_of(self._model, EngineConfig(64, 4, prefix_cache=False))
            engine.add_request(request.prompt, exit=request.exit, sampling=request.sampling)
            (output,) = [step.output for step in engine.run() if step.output]
            self._alone[number] = output
            if not output.stats.drafted:  # texts that others may go on from
                text = [*request.prompt, *output.token_ids]
                self._texts = [*self._texts[-5:], text[:24]]
        return self._alone[number]

    def check(self, output: Output, number: int) -> None:
        expected = self.alone(number)
        if output.finish_reason in ("cancelled", "error"):
            assert output.token_ids == expected.token_ids[: len(output.token_ids)]
        elif output.stats.drafted or expected.stats.drafted:  # drafts depend on free pages
            assert bits(output)[:-2] == bits(expected)[:-2]
        else:
            assert bits(output) == bits(expected)


STEPS = [(size, kind) for size in (1, 2, 4, 8) for kind in ("calm", "interrupts", "faults")]
SHORT = [(1, "calm"), (2, "interrupts"), (4, "faults"), (8, "calm"), (1, "faults")]


@pytest.mark.parametrize(
    ("page_size", "kind"), [*SHORT, *in_all(*(each for each in STEPS if each not in SHORT))]
)
def test_random_steps(
    model: eecore.Model, page_size: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    (config,) = (config for config in SMALL if config.page_size == page_size)
    fault = {"calm": None, "interrupts": Interrupt, "faults": Fault}[kind]
    caplog.set_level(logging.CRITICAL, logger="eecore")
    chance = Chance(model, seed=SMALL.index(config))
    random = chance.random
    engine = engine_of(model, config, ahead=random.random() < 0.5)

    def faults() -> Iterator[tuple[int, type[BaseException]] | None]:
        while True:
            trips = fault is not None and random.random() < 0.2
            yield (random.randint(1, 900), fault) if trips and fault is not None else None

    driver = Driver(engine, faults())
    numbers: dict[str, int] = {}
    for step in range(400):
        happens = random.random()
        running = [name for name in numbers if name not in driver.outputs]
        if len(running) < 5 and happens < 0.4:
            number = chance.request()
            numbers[str(step)] = number
            driver.add(chance.requests[number], str(step))
        elif running and happens < 0.45:
            driver.cancel(random.choice(running))
        elif running and happens < 0.52:
            driver.hold(random.choice(running))
        elif running and happens < 0.6:
            driver.resume(random.choice(running))
        elif happens < 0.61:
            engine.reset_prefix_cache()
        else:
            driver.step()
        check_books(engine)
    for name in numbers:
        if name not in driver.outputs:
            driver.resume(name)
    driver.finish()
    for name, output in driver.outputs.items():
        chance.check(output, numbers[name])
    stats = [output.stats for output in driver.outputs.values()]
    assert sum(each.cached_tokens for each in stats) > 50
    assert (fault is None) == (not driver.tripped)
    engine.reset_prefix_cache()
    assert engine.num_cached_pages == 0
    assert engine.pages.num_free == len(engine.pages._free) == engine.pages.num_pages


# Switching it off, and emptying it


def test_reset_forgets_unused_pages(model: eecore.Model) -> None:
    engine = engine_of(model)
    used, idle = prompt_of(30, 1), prompt_of(30, 2)
    run(engine, idle)
    engine.add_request(used, sampling=SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.reset_prefix_cache()
    check_books(engine)
    assert engine.num_cached_pages == 7
    for _ in engine.run():
        pass
    assert cached(engine, idle) == 0
    assert cached(engine, used) == 28


def test_reset_from_another_thread_waits_for_nothing(directory: Path) -> None:
    model = eecore.load(directory, device="cpu", engine=CONFIG)
    prompts = [prompt_of(30, seed) for seed in range(4)]

    async def main() -> None:
        async with model.async_engine() as engine:
            await engine.generate(prompts[0], sampling=SIX)
            assert (await engine.generate(prompts[0], sampling=SIX)).stats.cached_tokens == 28
            long = SamplingParams(max_tokens=200, ignore_eos=True)
            stream = engine.stream(prompts[1], sampling=long)
            await anext(stream)
            threads = [threading.Thread(target=engine.reset_prefix_cache) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            async for _ in stream:
                pass
            engine.reset_prefix_cache()
            output = await engine.generate(prompts[0], sampling=SIX)
            assert output.stats.cached_tokens == 0

    asyncio.run(main())
    check_books(model.shared_engine().engine)


def test_without_it_nothing_is_shared(directory: Path) -> None:
    model = eecore.load(directory, device="cpu", kv_cache_tokens=512, prefix_cache=False)
    assert not model.engine_config.prefix_cache
    engine = model.engine()
    prompt = prompt_of(40)
    run(engine, prompt)
    assert cached(engine, prompt) == 0
    assert engine.num_cached_pages == 0
    engine.reset_prefix_cache()
    assert not engine.has_prefix_cache


def test_where_rows_round_by_their_number_nothing_is_shared(directory: Path) -> None:
    model = as_on_cuda(eecore.load(directory, device="cpu", kv_cache_tokens=512))
    engine = model.engine()
    first, again = (run(engine, prompt_of(40), Full()) for _ in range(2))
    assert bits(first) == bits(again)
    assert again.stats.cached_tokens == 0
    assert not engine.has_prefix_cache


def test_a_model_with_an_encoder_shares_nothing(tmp_path: Path) -> None:
    engine = eecore.load(write_t5(tmp_path), device="cpu", kv_cache_tokens=512).engine()
    first = run(engine, prompt_of(40))
    again = run(engine, prompt_of(40))
    assert bits(first) == bits(again)
    assert again.stats.cached_tokens == 0
    assert not engine.has_prefix_cache


def test_the_setting_is_a_flag() -> None:
    with pytest.raises(RequestError, match="prefix_cache: expected True or False, got 1"):
        EngineConfig(prefix_cache=1)  # type: ignore[arg-type]


def test_to_measure_every_prompt_is_computed(model: eecore.Model) -> None:
    plain = model.without_prefix_cache()
    assert plain.without_prefix_cache() is plain
    assert plain.network is model.network
    for _ in range(2):
        (output,) = eecore.generate(plain, prompt_of(40), max_tokens=1)
        assert output.stats.cached_tokens == 0
