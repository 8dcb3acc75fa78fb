"""Filters as transformers', tokens drawn with the right frequencies, seeds that reproduce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import eecore
from devices import cpu_only, load
from eecore import Auto, FixedExit, PromptLookup, SamplingParams, SelfSpeculative, ops
from eecore.decoding.heads import head_fields
from eecore.decoding.memory import TwinMemory
from eecore.decoding.sampling import (
    DRAWS_TOKEN,
    head_sizes,
    sampling_fields,
    sampling_rows,
    write_sampling,
)
from eecore.planning.draft_state import draft_state
from eecore.scheduling.sequence import Sequence
from tiny_models import random_prompts, write_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_prompts(4, 19, 1, 8, seed=6)


def random_logits(vocab_size: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))


def filtered_probs(
    logits: torch.Tensor, params: SamplingParams, context: list[int] | None = None
) -> torch.Tensor:
    """The distribution [vocab_size] that a request with these settings draws from."""
    sequence = Sequence("0", context or [0], params, eecore.Full(), 0, frozenset())
    draft_state(sequence, range(1, 2))
    sizes = head_sizes([sequence])
    given = TwinMemory(logits.device, sampling_fields(1, sizes))
    results = TwinMemory(logits.device, head_fields(1, sizes))
    write_sampling(given.host(), [sequence])
    out = results.device
    probs = torch.empty(1, logits.numel())
    ops.sample_tokens(
        logits[None],
        sampling_rows(given.device),
        ops.SampledRows(out["token"], out["gap"], out["logprob"], out["logsumexp"], probs),
        purpose=DRAWS_TOKEN,
        positions=torch.zeros(1, dtype=torch.int64),
    )
    return probs[0]


def probs_of_transformers(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(None, logits[None])[0].softmax(-1)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.3},
        {"temperature": 2.5},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 5000},
        {"top_p": 0.05},
        {"top_p": 0.5},
        {"top_p": 0.99},
        {"min_p": 0.01},
        {"min_p": 1.0},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.8},
        {"temperature": 1.7, "top_k": 100, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab_size", [2, 320, 1001])
def test_filters_agree_with_transformers(fields: dict[str, Any], vocab_size: int) -> None:
    params = SamplingParams(**{"temperature": 1.0, **fields})
    for seed in range(5):
        logits = random_logits(vocab_size, seed)
        expected = probs_of_transformers(logits, params)
        got = filtered_probs(logits, params)
        assert torch.equal(got > 0, expected > 0)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7)
        assert float(got.sum()) == pytest.approx(1.0, abs=1e-5)


def test_repetition_penalty_agrees_with_transformers() -> None:
    """The prompt counts as seen, as in transformers; a token counts once."""
    logits, context = random_logits(320), [5, 9, 9, 300, 5]
    processor = RepetitionPenaltyLogitsProcessor(1.3)
    expected = processor(torch.tensor([context]), logits[None].clone())[0].softmax(-1)
    params = SamplingParams(temperature=1.0, repetition_penalty=1.3)
    torch.testing.assert_close(filtered_probs(logits, params, context), expected)


# In a request


def test_logprobs_are_of_the_raw_distribution(tiny: eecore.Model) -> None:
    """They precede temperature, penalties and filters, in every mode."""
    kinds: list[dict[str, Any]] = [
        {"logprobs": 4},
        {"logprobs": 4, "temperature": 0.5, "top_k": 3, "repetition_penalty": 1.5, "seed": 0},
    ]
    for fields in kinds:
        (output,) = eecore.generate(tiny, [PROMPTS[0]], max_tokens=6, ignore_eos=True, **fields)
        assert output.logprobs is not None
        assert output.top_logprobs is not None
        for i, token in enumerate(output.token_ids):
            (probe,) = eecore.generate(
                tiny, [PROMPTS[0] + output.token_ids[:i]], max_tokens=1, logprobs=320
            )
            assert probe.top_logprobs is not None
            whole = probe.top_logprobs[0]
            assert output.logprobs[i] == pytest.approx(whole[token], abs=1e-4)
            assert list(output.top_logprobs[i]) == list(whole)[:4]
            values = list(whole.values())
            assert list(output.top_logprobs[i].values()) == pytest.approx(values[:4], abs=1e-4)
            assert sum(torch.tensor(values).exp()).item() == pytest.approx(1, abs=1e-4)


@cpu_only  # on a GPU two sums of a logit may have different orders
@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_what_changes_no_logit_that_counts_changes_no_token(
    weights: str | None, tmp_path: Path
) -> None:
    """In bfloat16, where several of the largest logits would be equal if they were rounded."""
    directory = write_model(tmp_path, vocab_size=4096, tokenizer=False)
    model = load(directory, dtype="bfloat16", weights=weights)
    prompts = random_prompts(*range(3, 27), seed=8)

    def texts(mode: Any, *, every: int = 1, **fields: Any) -> list[list[int]]:
        """The texts where one request of ``every`` has the fields."""
        rows = [{} if i % every else fields for i in range(len(prompts))]
        sampling = [SamplingParams(max_tokens=12, ignore_eos=True, **row) for row in rows]
        outputs = eecore.generate(model, prompts, exit=mode, sampling=sampling)
        return [output.token_ids for output in outputs]

    for mode in (eecore.Full(), FixedExit(2), SelfSpeculative(2, 3), PromptLookup(2), Auto()):
        plain = texts(mode)
        unused = min(set(range(4096)).difference(*plain))
        for fields in ({"logprobs": 2}, {"logprobs": 0}, {"logit_bias": {unused: -100.0}}):
            assert texts(mode, **fields) == plain, (mode, fields)
        assert texts(mode, every=2, logprobs=2) == plain, mode
    for mode in (eecore.Full(), FixedExit(2)):
        warm = {"temperature": 0.9, "top_k": 50, "seed": 3}
        assert texts(mode, **warm) == texts(mode, **warm, logprobs=3), mode


def test_without_a_seed_each_request_draws_its_own(tiny: eecore.Model) -> None:
    outputs = eecore.generate(tiny, [PROMPTS[0]] * 4, max_tokens=12, temperature=2.0)
    assert len({tuple(output.token_ids) for output in outputs}) == 4
