"""Log-probabilities of prompts: a plain model's, whatever the engine does with the prompt."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import eecore
from devices import DEVICE, cpu_only, engine_of, load
from eecore import (
    Auto,
    ConfidentExit,
    DraftAndVerify,
    Engine,
    EngineConfig,
    FixedExit,
    Full,
    Guide,
    Output,
    PromptLogprob,
    PromptLookup,
    SamplingParams,
    SelfSpeculative,
)
from eecore.decoding import prefill, prompt_logprobs
from eecore.errors import RequestError
from eecore.exits import Exit
from eecore.models import LlamaModel
from reference_decoding import ReferenceModel
from tiny_models import random_prompts, write_model
from tiny_t5 import write_t5
from tripwire import Fault
from workloads import check_books

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE, CHUNK = 4, 16
CONFIG = EngineConfig(kv_cache_tokens=2048, page_size=PAGE, max_prefill_chunk=CHUNK)
# One token, a page, a chunk, two chunks, each with one more and one less, and over a slice.
LENGTHS = (1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 70)
PROMPTS = random_prompts(*LENGTHS, seed=11)
POLICIES: dict[str, Exit] = {
    "full": Full(),
    "confident": ConfidentExit(0.0),
    "together": ConfidentExit(0.3, batch="all"),
    "speculative": SelfSpeculative(2, 3),
    "verify": DraftAndVerify({2}, {1, 2}),
    "lookup": PromptLookup(3, min_ngram=1),
    "auto": Auto(3, exit_layers=(2,)),
    "fixed": FixedExit(2),
}
NONE: dict[str, Any] = {"prompt_logprobs": None}
Entries = list[PromptLogprob | None]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="eecore")


def run_all(engine: Engine, requests: list[tuple[list[int], Exit, SamplingParams]]) -> list[Output]:
    """The outputs of requests that run at once."""
    names = [engine.add_request(p, exit=e, sampling=s) for p, e, s in requests]
    outputs = {step.request_id: step.output for step in engine.run() if step.output is not None}
    check_books(engine)
    assert engine.num_used_pages == 0
    return [outputs[name] for name in names]


def scored(engine: Engine, prompt: list[int], exit: Exit | None = None, **fields: Any) -> Output:
    """The output of one request that runs alone."""
    settings = {"max_tokens": 3, "ignore_eos": True, "prompt_logprobs": 2, **fields}
    (output,) = run_all(engine, [(prompt, exit or Full(), SamplingParams(**settings))])
    return output


def of(output: Output) -> Entries:
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    return output.prompt_logprobs


def expected_rows(reference: ReferenceModel, prompt: list[int], num_layers: int) -> Tensor:
    """Log-probabilities [prompt_len, vocab_size] of the plain model, one position at a time."""
    sequence, h = reference.start(prompt[:1], num_layers)
    rows = [reference.head(h)]
    for token in prompt[1:]:
        sequence.tokens.append(token)
        rows.append(reference.head(reference.through(sequence, num_layers=num_layers)))
    return torch.stack(rows).log_softmax(-1)


def check_entries(entries: Entries, prompt: list[int], rows: Tensor, count: int) -> None:
    assert len(entries) == len(prompt)
    for entry, token, row in zip(entries[1:], prompt[1:], rows, strict=False):
        assert entry is not None
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=2e-4)
        best = row.topk(count) if count else None
        assert list(entry.top_logprobs) == ([] if best is None else best.indices.tolist())
        if best is not None:
            values = list(entry.top_logprobs.values())
            assert values == pytest.approx(best.values.tolist(), abs=2e-4)
            assert (entry.rank <= count) == (token in entry.top_logprobs)
        if token in entry.top_logprobs:
            assert entry.top_logprobs[token] == entry.logprob
            assert list(entry.top_logprobs)[entry.rank - 1] == token
        assert entry.rank == int((row > row[token]).sum()) + 1


@pytest.mark.parametrize("mode", POLICIES)
def test_they_agree_with_a_plain_model(
    tiny: eecore.Model, reference: ReferenceModel, mode: str
) -> None:
    """Prompts of awkward lengths, all at once, with and without drafts and exits."""
    policy = POLICIES[mode]
    depth = policy.exit_layer if isinstance(policy, FixedExit) else reference.num_layers
    requests = [
        (p, policy, SamplingParams(max_tokens=3, prompt_logprobs=i % 4, ignore_eos=True))
        for i, p in enumerate(PROMPTS)
    ]
    outputs = run_all(engine_of(tiny, CONFIG), requests)
    for i, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        assert len(output.token_ids) == 3
        check_entries(of(output), prompt, expected_rows(reference, prompt, depth), i % 4)


def test_tokens_are_those_of_a_request_that_does_not_ask(tiny: eecore.Model) -> None:
    for policy in POLICIES.values():
        for prompt in (PROMPTS[0], PROMPTS[7]):
            asks = scored(engine_of(tiny, CONFIG), prompt, policy, max_tokens=6)
            plain = scored(engine_of(tiny, CONFIG), prompt, policy, max_tokens=6, **NONE)
            assert plain.prompt_logprobs is None
            assert asks.token_ids == plain.token_ids
            if not isinstance(policy, Auto):  # which drafts there are depends on time
                assert asks.exit_layers == plain.exit_layers


@cpu_only
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(1024, PAGE, max_prefill_chunk=1),
        EngineConfig(1024, PAGE, max_prefill_chunk=7),
        EngineConfig(1024, PAGE, max_batch_tokens=19),
        EngineConfig(1024, 16, max_num_seqs=2, prefix_cache=False),
        EngineConfig(104, PAGE, max_prefill_chunk=9),
    ],
    ids=["one", "seven", "budget", "two", "preempted"],
)
def test_no_bit_depends_on_chunks_or_company(
    tiny_directory: Path, config: EngineConfig, dtype: str
) -> None:
    model = eecore.load(tiny_directory, device="cpu", dtype=dtype, kv_cache_tokens=1024)
    sampling = SamplingParams(max_tokens=9, prompt_logprobs=3, ignore_eos=True)
    alone = [of(scored(model.engine(), p, prompt_logprobs=3)) for p in PROMPTS]
    outputs = run_all(model.engine(config), [(p, Full(), sampling) for p in PROMPTS])
    assert [of(output) for output in outputs] == alone
    if config.num_pages < 30:
        assert sum(output.stats.preemptions for output in outputs)


@cpu_only
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_text_scores_as_it_was_written(tiny_directory: Path, dtype: str) -> None:
    model = eecore.load(tiny_directory, device="cpu", dtype=dtype, kv_cache_tokens=1024)
    prompt = PROMPTS[5]
    wrote = scored(model.engine(), prompt, max_tokens=20, logprobs=2, temperature=1.2, seed=1)
    scores = of(scored(model.engine(), prompt + wrote.token_ids, max_tokens=0))[len(prompt) :]
    assert [entry and entry.logprob for entry in scores] == wrote.logprobs
    assert [entry and entry.top_logprobs for entry in scores] == wrote.top_logprobs


def test_settings_of_sampling_leave_them_alone(tiny: eecore.Model) -> None:
    plain = of(scored(engine_of(tiny, CONFIG), PROMPTS[6]))
    for settings in (
        {"temperature": 0.3, "top_k": 2, "min_p": 0.2, "seed": 4},
        {"repetition_penalty": 2.0, "presence_penalty": 1.0, "logit_bias": {3: 100}},
        {"guide": Guide.regex("[ab]+")},
        {"logprobs": 4},
    ):
        found = of(scored(engine_of(tiny, CONFIG), PROMPTS[6], **settings))
        assert found == plain


# What it costs


def test_logits_of_a_slice_are_in_memory_at_once(
    tiny: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    whole = LlamaModel.logits

    def counted(self: LlamaModel, hidden: Tensor, **settings: Any) -> Tensor:
        rows.append(len(hidden))
        return whole(self, hidden, **settings)

    monkeypatch.setattr(LlamaModel, "logits", counted)
    (prompt,) = random_prompts(200)
    config = EngineConfig(2048, PAGE, max_batch_tokens=1024, max_prefill_chunk=512)
    scored(engine_of(tiny, config), prompt, max_tokens=0)
    assert prompt_logprobs.SLICE_ROWS == 64
    assert rows == [64, 64, 64, 7]
    # Rows of several requests share slices; who does not ask has none.
    rows.clear()
    asks = SamplingParams(max_tokens=1, prompt_logprobs=0)
    requests = [(prompt[:n], Full(), asks) for n in (1, 5, 9)]
    plain = SamplingParams(max_tokens=1)
    run_all(engine_of(tiny, config), [*requests, (prompt, Full(), plain)])
    assert rows == [12]
    rows.clear()
    run_all(engine_of(tiny, config), [(prompt, Full(), plain)])
    assert rows == []


# Preemption and the prefix cache


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["computed", "cached"])
@pytest.mark.parametrize("steps", [1, 2, 4, 5, 7])
def test_a_preempted_prompt_is_scored_once(
    tiny: eecore.Model, monkeypatch: pytest.MonkeyPatch, steps: int, prefix_cache: bool
) -> None:
    """Preemption comes in the middle of the prompt, at its end, and while it generates."""
    config = EngineConfig(256, PAGE, max_prefill_chunk=CHUNK, prefix_cache=prefix_cache)
    prompt = PROMPTS[-1]  # five chunks
    alone = scored(engine_of(tiny, config), prompt, max_tokens=6)
    tokens: list[int] = []
    whole = prompt_logprobs._of_slice

    def counted(model: Any, hidden: Tensor, token_ids: list[int], tops: list[int]) -> Any:
        tokens.extend(token_ids)
        return whole(model, hidden, token_ids, tops)

    monkeypatch.setattr(prompt_logprobs, "_of_slice", counted)
    engine = engine_of(tiny, config)
    sampling = SamplingParams(max_tokens=6, prompt_logprobs=2, ignore_eos=True)
    name = engine.add_request(prompt, exit=Full(), sampling=sampling)
    given = [engine.step() for _ in range(steps)]
    engine.scheduler.preempt(engine.requests[name])
    check_books(engine)
    given += [[step] for step in engine.run()]
    steps_ = [step for each in given for step in each]
    output = steps_[-1].output
    assert output is not None
    assert output.stats.preemptions == 1
    assert (output.token_ids, output.prompt_logprobs) == (alone.token_ids, alone.prompt_logprobs)
    assert tokens == prompt[1:]
    # Only the first step with a token has them.
    assert steps_[0].prompt_logprobs == output.prompt_logprobs
    assert all(step.prompt_logprobs is None for step in steps_[1:])
    if prefix_cache and engine.has_prefix_cache:  # scored positions may use its own pages
        replayed = output.stats.prompt_layers_run - alone.stats.prompt_layers_run
        assert replayed <= PAGE * tiny.config.num_layers


@cpu_only
def test_a_prompt_that_is_scored_is_computed_and_shared(tiny: eecore.Model) -> None:
    engine = engine_of(tiny, CONFIG)
    prompt = PROMPTS[-1]
    first = scored(engine, prompt)
    again = scored(engine, prompt)
    assert (first.stats.cached_tokens, again.stats.cached_tokens) == (0, 0)
    assert first.stats.prompt_layers_run == again.stats.prompt_layers_run
    plain = scored(engine, prompt, **NONE)
    assert plain.stats.cached_tokens == 68
    assert again.prompt_logprobs == first.prompt_logprobs
    assert plain.token_ids == first.token_ids == again.token_ids
    without = EngineConfig(2048, PAGE, max_prefill_chunk=CHUNK, prefix_cache=False)
    assert scored(engine_of(tiny, without), prompt).prompt_logprobs == first.prompt_logprobs


# Faults


def check_alike(outputs: list[Output], expected: list[Output]) -> None:
    """Outputs have to be the same; to some digits where rounding depends on the batch."""
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    for output, alone in zip(outputs, expected, strict=True):
        if DEVICE == "cpu":
            assert output.prompt_logprobs == alone.prompt_logprobs
        for one, other in zip(of(output)[1:], of(alone)[1:], strict=True):
            assert one is not None
            assert other is not None
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)


def test_a_step_that_fails_once_is_made_again(
    tiny: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        (p, Full(), SamplingParams(max_tokens=3, prompt_logprobs=1, ignore_eos=True))
        for p in PROMPTS[-4:]
    ]
    expected = run_all(engine_of(tiny, CONFIG), requests)
    whole, calls = prompt_logprobs._of_slice, []

    def fails(*given: Any) -> Any:
        calls.append(given)
        if len(calls) % 3 == 2:
            raise Fault
        return whole(*given)

    monkeypatch.setattr(prompt_logprobs, "_of_slice", fails)
    outputs = run_all(engine_of(tiny, CONFIG), requests)
    assert len(calls) > 5
    check_alike(outputs, expected)


def test_a_prompt_that_cannot_be_scored_ends_alone(
    tiny: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(max_tokens=3, prompt_logprobs=1, ignore_eos=True)
    good = [(p, Full(), sampling) for p in PROMPTS[-3:-1]]
    expected = run_all(engine_of(tiny, CONFIG), good)
    bad = random_prompts(40, seed=99)[0]
    whole = prefill.prompt_logprobs

    def fails(model: Any, hidden: Tensor, scored: Any) -> Any:
        if any(part.token_ids == bad[1 + 2 * CHUNK :] for part in scored):
            raise Fault("of this prompt")
        return whole(model, hidden, scored)

    monkeypatch.setattr(prefill, "prompt_logprobs", fails)
    first, ended, second = run_all(
        engine_of(tiny, CONFIG), [good[0], (bad, Full(), sampling), good[1]]
    )
    assert ended.error == "Fault: of this prompt"
    assert len(of(ended)) == 1 + 2 * CHUNK  # as far as it came
    check_alike([first, second], expected)


def test_logits_that_are_not_finite_end_the_request(tmp_path: Path) -> None:
    model = load(write_model(tmp_path), kv_cache_tokens=512)
    prompts = random_prompts(9, 9, seed=3)
    poison = next(t for t in prompts[0][1:-1] if t not in prompts[1])
    embedding = model.network.weights.embed_tokens.weight
    expected = scored(model.engine(), prompts[1])
    embedding[poison] = torch.nan
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=2)
    bad, good = run_all(model.engine(), [(p, Full(), sampling) for p in prompts])
    assert bad.finish_reason == "error"
    assert bad.error is not None
    assert "expected finite logits" in bad.error
    check_alike([good], [replace(expected, token_ids=[])])


# A prompt alone


def test_a_prompt_alone(tiny: eecore.Model) -> None:
    for policy in POLICIES.values():
        engine = engine_of(tiny, CONFIG)
        for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[6], PROMPTS[7]):
            wrote = scored(engine, prompt, policy, max_tokens=1)
            alone = scored(engine, prompt, policy, max_tokens=0)
            assert (alone.token_ids, alone.text, alone.finish_reason) == ([], "", "length")
            assert alone.prompt_logprobs == wrote.prompt_logprobs
            assert alone.stats.generated_tokens == alone.stats.layers_run == 0


def test_it_may_fill_all_pages_and_the_context(tiny: eecore.Model) -> None:
    (prompt,) = random_prompts(512)
    config = EngineConfig(kv_cache_tokens=512, page_size=16)
    requests = [
        (prompt, Full(), SamplingParams(max_tokens=0, prompt_logprobs=0)),
        (prompt[:20], Full(), SamplingParams(max_tokens=2)),
    ]
    whole, other = run_all(engine_of(tiny, config), requests)
    assert len(of(whole)) == 512
    assert len(other.token_ids) == 2
    with pytest.raises(RequestError, match="expected at most 512 together"):
        engine_of(tiny, config).add_request([*prompt, 1], sampling=requests[0][2])


def test_streams_have_them_with_their_first_step(tiny: eecore.Model) -> None:
    expected = of(scored(engine_of(tiny, CONFIG), PROMPTS[8]))

    async def main(max_tokens: int) -> list[eecore.StepOutput]:
        sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=2, ignore_eos=True)
        async with tiny.async_engine(CONFIG) as engine:
            return [step async for step in engine.stream(PROMPTS[8], sampling=sampling)]

    for max_tokens in (0, 1, 5):
        steps = asyncio.run(main(max_tokens))
        assert steps[0].prompt_logprobs == expected
        assert all(step.prompt_logprobs is None for step in steps[1:])
        assert steps[-1].output is not None
        assert steps[-1].output.prompt_logprobs == expected
    first, *others = eecore.stream(tiny, [PROMPTS[8]], max_tokens=3, prompt_logprobs=2)
    assert first.prompt_logprobs == expected
    assert others


def test_a_cancelled_request_has_those_of_its_chunks(tiny: eecore.Model) -> None:
    expected = of(scored(engine_of(tiny, CONFIG), PROMPTS[-1]))
    engine = engine_of(tiny, CONFIG)
    for steps in (0, 1, 2):
        sampling = SamplingParams(max_tokens=0, prompt_logprobs=2)
        name = engine.add_request(PROMPTS[-1], exit=Full(), sampling=sampling)
        for _ in range(steps):
            engine.step()
        output = engine.cancel(name)
        assert output is not None
        assert output.prompt_logprobs == expected[: 1 + steps * CHUNK]
    check_books(engine)


# What is refused


@pytest.mark.parametrize("value", [-1, True, 1.5, "2", 2**40])
def test_bad_values(value: Any) -> None:
    with pytest.raises(RequestError, match=r"prompt_logprobs: expected None or a whole number"):
        SamplingParams(prompt_logprobs=value)


def test_what_cannot_be_scored_is_refused(tiny: eecore.Model, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"max_tokens: expected a whole number, 1\.\."):
        SamplingParams(max_tokens=0)
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    with pytest.raises(RequestError, match="prompt_logprobs: expected at most 320, the size of"):
        eecore.generate(tiny, [[1]], prompt_logprobs=321)
    (output,) = eecore.generate(tiny, [[1, 2]], prompt_logprobs=320, max_tokens=0)
    entry = of(output)[1]
    assert entry is not None
    assert sorted(entry.top_logprobs) == list(range(320))
    t5 = load(write_t5(tmp_path), kv_cache_tokens=256)
    with pytest.raises(RequestError, match="prompt_logprobs: expected a model without an encoder"):
        eecore.generate(t5, [[1, 2]], prompt_logprobs=0)
