"""Log-probabilities of prompts: a plain model's, whatever the engine does with the prompt."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import eecore
from devices import cpu_only, engine_of, load
from eecore import (
    Auto,
    ConfidentExit,
    DraftAndVerify,
    Engine,
    EngineConfig,
    FixedExit,
    Full,
    Output,
    PromptLogprob,
    PromptLookup,
    SamplingParams,
    SelfSpeculative,
)
from eecore.decoding import prompt_logprobs
from eecore.errors import RequestError
from eecore.exits import Exit
from eecore.models import LlamaModel
from reference_decoding import ReferenceModel
from tiny_models import random_prompts
from tiny_t5 import write_t5
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


@cpu_only
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_text_scores_as_it_was_written(tiny_directory: Path, dtype: str) -> None:
    model = eecore.load(tiny_directory, device="cpu", dtype=dtype, kv_cache_tokens=1024)
    prompt = PROMPTS[5]
    wrote = scored(model.engine(), prompt, max_tokens=20, logprobs=2, temperature=1.2, seed=1)
    scores = of(scored(model.engine(), prompt + wrote.token_ids, max_tokens=0))[len(prompt) :]
    assert [entry and entry.logprob for entry in scores] == wrote.logprobs
    assert [entry and entry.top_logprobs for entry in scores] == wrote.top_logprobs


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


# Faults


# A prompt alone


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


# What is refused


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
