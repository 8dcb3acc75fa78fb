"""Sampled speculation has exactly the full model's distribution: a chi-square test.

The exact joint distribution of the first tokens comes from the full model's log-probabilities of
every prefix, filtered by transformers' own logits processors.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import eecore
from devices import load
from eecore import DraftAndVerify, EngineConfig, SamplingParams, SelfSpeculative
from eecore.exits import Exit
from tiny_models import scale_layers, write_model

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 11
NUM_TOKENS = 4
NUM_SAMPLES = 2500
PROMPT = [3, 1, 4]
FILTERS: dict[str, dict[str, Any]] = {
    "unfiltered": {"temperature": 1.0},
    "filtered": {"temperature": 1.3, "top_k": 6, "top_p": 0.9},
}
POLICIES: dict[str, Exit] = {
    "speculative": SelfSpeculative(1, 3),
    "verify": DraftAndVerify({1}, {1}, num_drafts=3, initial_threshold=0.3),
}
Joint = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    """A model with broad distributions whose drafts are accepted about half of the time."""
    directory = write_model(
        tmp_path_factory.mktemp("eleven"),
        tokenizer=False,
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=0,
        eos_token_id=0,
        max_position_embeddings=64,
    )
    scale_layers(directory, {1: 0.6})
    config = EngineConfig(kv_cache_tokens=16384, page_size=8, max_num_seqs=512)
    return load(directory, engine=config)


@pytest.fixture(scope="module")
def log_probs(model: eecore.Model) -> dict[tuple[int, ...], torch.Tensor]:
    """The full model's log-probabilities after each prefix of up to NUM_TOKENS - 1 tokens."""
    prefixes = [
        prefix
        for length in range(NUM_TOKENS)
        for prefix in itertools.product(range(VOCAB_SIZE), repeat=length)
    ]
    outputs = eecore.generate(
        model,
        [PROMPT + list(prefix) for prefix in prefixes],
        max_tokens=1,
        logprobs=VOCAB_SIZE,
        ignore_eos=True,
    )
    rows = {}
    for prefix, output in zip(prefixes, outputs, strict=True):
        assert output.top_logprobs is not None
        row = output.top_logprobs[0]
        rows[prefix] = torch.tensor([row[token] for token in range(VOCAB_SIZE)])
    return rows


def joint_distribution(
    log_probs: dict[tuple[int, ...], torch.Tensor], filters: dict[str, Any]
) -> Joint:
    """The exact probability of every run of NUM_TOKENS tokens."""
    warpers = [TemperatureLogitsWarper(filters["temperature"])]
    if "top_k" in filters:
        warpers += [TopKLogitsWarper(filters["top_k"]), TopPLogitsWarper(filters["top_p"])]
    logits = torch.stack(list(log_probs.values()))
    for warper in warpers:
        logits = warper(None, logits)
    probs = dict(zip(log_probs, logits.double().softmax(-1).tolist(), strict=True))
    joint: Joint = {(): 1.0}
    for _ in range(NUM_TOKENS):
        joint = {
            (*prefix, token): p * probs[prefix][token]
            for prefix, p in joint.items()
            for token in range(VOCAB_SIZE)
            if probs[prefix][token] > 0
        }
    return joint


def sample(model: eecore.Model, policy: Exit, filters: dict[str, Any]) -> list[eecore.Output]:
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed, **filters)
        for seed in range(NUM_SAMPLES)
    ]
    return eecore.generate(model, [PROMPT] * NUM_SAMPLES, exit=policy, sampling=params)


def p_value(outputs: list[eecore.Output], joint: Joint) -> float:
    """The chi-square test's p-value; runs expected fewer than 5 times share cells."""
    counts = Counter(tuple(output.token_ids) for output in outputs)
    if not set(counts) <= set(joint):
        return 0.0  # a run of probability zero
    observed: list[int] = []
    expected: list[float] = []
    pooled_observed, pooled_expected = 0, 0.0
    for run, probability in joint.items():
        pooled_observed += counts[run]
        pooled_expected += probability * len(outputs)
        if pooled_expected >= 5:
            observed.append(pooled_observed)
            expected.append(pooled_expected)
            pooled_observed, pooled_expected = 0, 0.0
    observed[-1] += pooled_observed
    expected[-1] += pooled_expected
    assert len(expected) > 20
    total = np.asarray(expected) * (sum(observed) / sum(expected))
    return float(chisquare(observed, total).pvalue)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_distribution_is_that_of_full(
    model: eecore.Model, log_probs: Any, policy: str, filters: str
) -> None:
    outputs = sample(model, POLICIES[policy], FILTERS[filters])
    drafted = sum(output.stats.drafted for output in outputs)
    accepted = sum(output.stats.accepted for output in outputs)
    assert 0.2 < accepted / drafted < 0.9, "both outcomes must matter"
    assert p_value(outputs, joint_distribution(log_probs, FILTERS[filters])) > 1e-3
