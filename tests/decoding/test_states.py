"""Texts with states beside their pages: shared beginnings, failing company, fills and probes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_gated_delta import Sizes, gated_delta, in_tiles
from torch import Tensor
from torch.nn import functional

import eecore
from devices import cpu_only, engine_of
from eecore import EngineConfig, FixedExit, Full, Output, RequestError, SamplingParams, ThoughtStop
from eecore.calibration.exit_scores import Scored, forced_states
from eecore.calibration.skip_search import search_skipped_sublayers
from eecore.decoding.prefill import Prefill
from eecore.errors import ModelError, OutOfMemoryError
from eecore.integrations.layer_drafts import LayerDrafter
from eecore.models import KVCache
from eecore.scheduling.states import StatePool
from eecore.thought_stop import normalised
from thinking_models import ALWAYS, CLOSES, write_thinking_model
from tiny_families import write_family
from tiny_models import random_prompts
from tripwire import Fault
from workloads import Driver, Request, check_books, serve

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:think. expected a rule that was calibrated"),
    cpu_only,
]

CONFIG = EngineConfig(kv_cache_tokens=1024, page_size=4, max_prefill_chunk=16)
SIX = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    directory = tmp_path_factory.mktemp("states")
    write_family(directory, "qwen3_5_grouped")
    return eecore.load(directory, device="cpu", engine=CONFIG)


def run(engine: eecore.Engine, prompt: list[int], **fields: Any) -> Output:
    """The output of one request that runs alone."""
    name = engine.add_request(prompt, exit=Full(), sampling=SIX, **fields)
    outputs = {step.request_id: step.output for step in engine.run()}
    check_books(engine)
    output = outputs[name]
    assert output is not None
    return output


def cached(engine: eecore.Engine, prompt: list[int]) -> int:
    """How many positions of a prompt come from the cache; its output is that without one."""
    output = run(engine, prompt)
    assert (output.token_ids, output.logprobs) == alone(engine, prompt)
    stats, num_layers = output.stats, engine.num_layers
    assert stats.prompt_layers_run == (len(prompt) - stats.cached_tokens) * num_layers
    return stats.cached_tokens


def alone(engine: eecore.Engine, prompt: list[int]) -> tuple[list[int], list[float] | None]:
    fresh = eecore.Engine(engine.network, None, EngineConfig(1024, prefix_cache=False))
    output = run(fresh, prompt)
    return output.token_ids, output.logprobs


# Shared beginnings


def test_a_text_goes_on_where_another_prompt_ended(model: eecore.Model) -> None:
    engine, prompt = engine_of(model), random_prompts(38, seed=1)[0]
    first = run(engine, prompt)
    assert first.stats.cached_tokens == 0
    assert cached(engine, [*prompt, *first.token_ids, 5, 6, 7]) == 36
    assert cached(engine, prompt) == 36


def test_a_beginning_is_kept_when_a_second_text_has_it(model: eecore.Model) -> None:
    engine, common = engine_of(model), random_prompts(33, seed=2)[0]
    given = [[*common, *random_prompts(9, seed=seed)[0]] for seed in (3, 4, 5)]
    assert [cached(engine, prompt) for prompt in given] == [0, 0, 32]
    assert cached(engine, common) == 32


def test_the_least_recently_used_beginning_is_given_up(model: eecore.Model) -> None:
    config = EngineConfig(1024, page_size=4, max_num_seqs=1)
    engine = engine_of(model, config)  # two states: that of a text, and of one beginning
    one, other = random_prompts(9, 10, seed=6)
    assert [cached(engine, each) for each in (one, one, other, other, one)] == [0, 8, 0, 8, 0]


def test_a_reset_forgets_beginnings(model: eecore.Model) -> None:
    """They would be those of other weights, where weights have changed."""
    engine, prompt = engine_of(model), random_prompts(9, seed=6)[0]
    assert [cached(engine, prompt) for _ in range(2)] == [0, 8]
    engine.reset_prefix_cache()
    assert engine.pages.states is not None
    assert not engine.pages.states._kept
    check_books(engine)
    assert [cached(engine, prompt) for _ in range(2)] == [0, 8]


@pytest.mark.parametrize("page_size", [64, 80, 96, 200])
def test_pages_longer_than_what_is_kept(model: eecore.Model, page_size: int) -> None:
    engine = engine_of(model, EngineConfig(2048, page_size=page_size))
    for count in (page_size - 1, page_size + 7, 2 * page_size - 3):
        prompt = random_prompts(count, seed=count)[0]
        cached(engine, prompt)
        cached(engine, [*prompt, 5, 6])


def test_states_of_requests_on_hold_are_taken(model: eecore.Model) -> None:
    prompts = random_prompts(6, 7, 8, 9, seed=7)
    driver = Driver(engine_of(model, EngineConfig(1024, page_size=4, max_num_seqs=1)))
    expected = [alone(driver.engine, prompt)[0] for prompt in prompts]
    for number, prompt in enumerate(prompts):
        driver.add(Request(prompt, Full(), SIX), str(number))
        driver.step()
        driver.step()
        driver.hold(str(number))
        check_books(driver.engine)
    assert sum(s.state > 0 for s in driver.engine.requests.values()) == 2
    for number in range(len(prompts)):
        driver.resume(str(number))
    driver.finish()
    assert [driver.outputs[str(n)].token_ids for n in range(len(prompts))] == expected


def test_a_pool_hands_out_each_state_once() -> None:
    copies: list[tuple[int, int]] = []
    pool = StatePool(2, lambda *numbers: copies.append(numbers))
    first = pool.take()
    pool.keep(b"a", first)
    pool.keep(b"a", first)
    assert pool.num_free == 1
    assert b"a" in pool
    pool.give_back(first)
    second = pool.take(b"a")
    pool.keep(b"b", second)  # none is left but that of a
    assert (b"a" in pool, b"b" in pool) == (False, True)
    third = pool.take(b"b")  # the kept one itself
    assert {second, third} == {1, 2}
    with pytest.raises(MemoryError, match="expected a free state, got none"):
        pool.take()
    pool.keep(b"c", third)
    assert b"c" not in pool
    assert len(copies) == 3


# A pass that runs again


def test_a_chunk_that_runs_again_begins_anew(
    model: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request makes a pass fail after its layers have run."""
    prompts = random_prompts(45, 44, seed=8)
    engine = engine_of(model)
    expected = [alone(engine, prompt)[0] for prompt in prompts]
    whole, passes = Prefill.run, list[int]()

    def failing(self: Prefill, most: int | None = None) -> Any:
        outcomes = whole(self, most)
        passes.append(len(outcomes))
        is_bad = any(outcome.sequence.request_id == "bad" for outcome in outcomes)
        if len(passes) > 1 and is_bad:
            raise Fault("of this request")
        return outcomes

    monkeypatch.setattr(Prefill, "run", failing)
    driver = Driver(engine)
    driver.add(Request(prompts[0], Full(), SIX), "good")
    driver.add(Request(prompts[1], Full(), SIX), "bad")
    driver.finish()
    assert driver.outputs["good"].token_ids == expected[0]
    assert driver.outputs["bad"].error == "Fault: of this request"
    assert passes[:2] == [2, 2]


# Fills


def rows_of(model: eecore.Model, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """What a layer's rule takes of states, by plain PyTorch."""
    weights, config = model.network.weights, model.network.config
    place = config.delta.layers.index(layer)
    norm = weights.attention_norm[layer]
    x = functional.rms_norm(hidden, norm.shape, norm, config.rms_norm_eps)
    return x @ weights.deltas.first.weight[place].T, x @ weights.deltas.gates.weight[place].T


@pytest.mark.parametrize("count", [7, 40])
def test_a_fill_is_each_layers_own_projection(model: eecore.Model, count: int) -> None:
    """Rows that skipped some layers, and a later row of the same text."""
    network = model.network
    delta = network.config.delta
    kv = KVCache.allocate(
        network.config, 4, 16, device=network.device, dtype=network.dtype, deltas=(2, network.dtype)
    )
    hidden = torch.randn(count + 1, 64, generator=torch.Generator().manual_seed(0))

    def numbers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    places = torch.arange(count)
    texts = numbers(2, count)[None], numbers(count), numbers(0, count)
    network.fill_kv(hidden[:count], numbers(*[1] * count), kv, places, places, texts)
    sizes = Sizes(
        *(getattr(delta, name) for name in ("num_key_heads", "num_value_heads")),
        delta.key_dim,
        delta.value_dim,
        delta.taps,
    )
    for layer in delta.layers:
        kept = kv.state_of(layer)
        if layer < 1:
            assert kept.applied[1].tolist() == [0] * delta.num_key_heads
            continue
        qkvz, ba = rows_of(model, layer, hidden)
        weights = network._deltas[layer][1]
        expected, states = gated_delta(sizes, weights, qkvz, ba, network.config.rms_norm_eps)
        got = eecore.ops.gated_delta(
            qkvz[count:],
            ba[count:],
            kept,
            numbers(2, count + 1)[None],
            weights,
            numbers(count + 1),
            numbers(0, 1),
        )
        torch.testing.assert_close(got, expected[count:].float(), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(
            kept.state[1], in_tiles(states[-1]).float(), rtol=1e-3, atol=1e-4
        )


def test_a_fixed_exit_after_each_layer(model: eecore.Model) -> None:
    """A replay after preemption gives the text of the first time."""
    prompt = random_prompts(21, seed=9)[0]
    for exit in (FixedExit(1), FixedExit(2), eecore.ConfidentExit(0.02)):
        (expected,) = serve(engine_of(model), [Request(prompt, exit, SIX)])
        for steps in (2, 4):
            driver = Driver(engine_of(model))
            driver.add(Request(prompt, exit, SIX), "a")
            for _ in range(steps):
                driver.step()
            driver.engine.scheduler.preempt(driver.engine.scheduler.running[0])
            driver.finish()
            assert driver.outputs["a"].token_ids == expected.token_ids


# Probes of thoughts


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    directory = write_thinking_model(tmp_path_factory.mktemp("thinker"), ALWAYS)
    write_family(directory, "qwen3_5")
    return eecore.load(directory, device="cpu", kv_cache_tokens=4096)


LETTERS = {token: -100 for token in range(320) if not (33 <= token < 91 or token == 198)}
THOUGHT: dict[str, Any] = {
    "max_tokens": 90,
    "ignore_eos": True,
    "logit_bias": {**LETTERS, CLOSES: -100, 198: 3},
}


def test_probes_leave_a_thought_as_it_is(thinker: eecore.Model) -> None:
    assert thinker.tokenizer is not None
    prompt = thinker.tokenizer.encode_chat([{"role": "user", "content": "Why?"}])
    stop = ThoughtStop(math.inf, every=6, stem=" A", max_answer=5)
    plain, probed = (
        eecore.generate(thinker, prompt, exit=Full(), think=think, **THOUGHT)[0]
        for think in (None, stop)
    )
    assert probed.token_ids[:70] == plain.token_ids[:70]  # then room is left for an answer
    assert len(probed.thought_probes) > 5
    encode = thinker.tokenizer.encode
    for probe in probed.thought_probes[:-1:3]:
        begin = [*prompt, *plain.token_ids[: probe.num_tokens]]
        text = thinker.tokenizer.decode(plain.token_ids[: probe.num_tokens])
        closed = "</think>\n\n" if text.endswith("\n") else "\n</think>\n\n"
        asked = [*begin, *encode(closed), *encode(" A")]
        (answer,) = eecore.generate(thinker, asked, exit=Full(), max_tokens=5)
        assert probe.answer == normalised(answer.text or "")


def test_a_probe_that_is_too_long_is_refused(thinker: eecore.Model) -> None:
    assert thinker.tokenizer is not None
    prompt = thinker.tokenizer.encode_chat([{"role": "user", "content": "Why?"}])
    stop = ThoughtStop(0.9, max_answer=80)
    with pytest.raises(RequestError, match=r"think: expected probes of at most \d+ tokens .* got"):
        eecore.generate(thinker, prompt, think=stop, max_tokens=20)


# What runs without an engine


def test_texts_that_are_run_whole_have_no_state(model: eecore.Model) -> None:
    """Calibration and the search of sublayers run whole texts, layer by layer."""
    prompt = random_prompts(20, seed=10)[0]
    network, last = model.network, model.network.config.num_layers
    states = dict(forced_states(network, Scored(prompt), [1, 2, last]))
    (output,) = eecore.generate(model, prompt, exit=Full(), max_tokens=1)
    assert int(network.logits(states[last][-1:]).argmax()) == output.token_ids[0]
    found = search_skipped_sublayers(model, [prompt, prompt[:9]], max_skipped=2)
    assert found.path


def test_drafts_of_other_engines_need_keys(model: eecore.Model) -> None:
    with pytest.raises(ModelError, match=r"model: expected layers whose keys .* got the gated del"):
        LayerDrafter(model.network, 2, max_length=64, max_texts=1, kv_cache_tokens=64)


# Memory


def test_the_bytes_of_a_state(model: eecore.Model) -> None:
    network = model.network
    kv = engine_of(model).iterations.kv
    assert kv.deltas is not None
    count = kv.deltas.applied.shape[1]
    one = KVCache.bytes_per_state(network.config, network.dtype)
    assert sum(each.nbytes for each in kv.deltas) == count * one
    pages = CONFIG.kv_cache_tokens * KVCache.bytes_per_token(network.config, network.dtype)
    assert count == CONFIG.max_num_seqs + max(1, pages // one)


def test_states_that_do_not_fit_are_named(model: eecore.Model) -> None:
    with pytest.raises(OutOfMemoryError, match=r"max_num_seqs: expected .* states of texts, \d+"):
        engine_of(model, EngineConfig(1024, max_num_seqs=2**31 - 1))
