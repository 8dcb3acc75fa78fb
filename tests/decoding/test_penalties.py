"""Presence and frequency penalties and logit bias: what they do to logits, in every exit mode."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import eecore
from devices import load
from eecore import (
    HeadDrafts,
    PromptLookup,
    RequestError,
    SamplingParams,
    SelfSpeculative,
)
from eecore.exits import Exit
from head_packs import write_pack
from reference_decoding import ReferenceModel
from tiny_models import random_prompts, scale_layers, write_model
from workloads import LOSSLESS

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_prompts(5, 1, 23, 9, seed=1)
SETTINGS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "reward": {"presence_penalty": -0.4, "frequency_penalty": 2.0},
    "bias": {"logit_bias": {7: 4.5, 300: -100.0, 11: 2.0}},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {token: (token % 7) / 2 for token in range(0, 320, 3)},
    },
}


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    """The model ``agreeing`` with a draft head."""
    directory = write_model(tmp_path_factory.mktemp("headed"), seed=3, num_hidden_layers=5)
    scale_layers(directory, {2: 0.2, 3: 0.1, 4: 0.2})
    write_pack(directory / "exits", load(directory), follows_tokens=True)
    return load(directory, kv_cache_tokens=2048)


def tokens_of(model: eecore.Model, **settings: Any) -> list[list[int]]:
    settings = {"exit": "full", "max_tokens": 24, "ignore_eos": True, **settings}
    return [output.token_ids for output in eecore.generate(model, PROMPTS, **settings)]


def changed(logits: torch.Tensor, prompt: list[int], output: list[int], **of: Any) -> torch.Tensor:
    """Logits with bias and penalties, as their definitions say."""
    for token, bias in of.get("logit_bias", {}).items():
        logits[token] += bias
    penalty = of.get("repetition_penalty", 1.0)
    for token in {*prompt, *output}:
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token, count in Counter(output).items():
        logits[token] -= of.get("frequency_penalty", 0.0) * count
        logits[token] -= of.get("presence_penalty", 0.0)
    return logits


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_greedy_output_is_the_reference(
    tiny: eecore.Model, reference: ReferenceModel, settings: dict[str, Any]
) -> None:
    for prompt, got in zip(PROMPTS, tokens_of(tiny, **settings), strict=True):
        sequence, h = reference.start(prompt)
        for _ in range(24):
            logits = changed(reference.head(h), prompt, sequence.new_tokens, **settings)
            sequence.tokens.append(int(logits.argmax()))
            h = reference.through(sequence)
        assert got == sequence.new_tokens
    assert tokens_of(tiny, **settings) != tokens_of(tiny)


def test_logprobs_are_of_the_logits_as_they_came(tiny: eecore.Model) -> None:
    (output,) = eecore.generate(tiny, [PROMPTS[0]], max_tokens=1, logprobs=0, logit_bias={9: 100})
    (plain,) = eecore.generate(tiny, [PROMPTS[0]], max_tokens=1, logprobs=320)
    assert output.token_ids == [9]
    assert plain.top_logprobs is not None
    assert output.logprobs == pytest.approx([plain.top_logprobs[0][9]], abs=1e-4)


GROWING: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "counts": {"frequency_penalty": 0.7, "presence_penalty": 0.5, "temperature": 1.0, "seed": 2},
}


@pytest.mark.parametrize("settings", GROWING.values(), ids=GROWING.keys())
@pytest.mark.parametrize(
    "policy",
    [*LOSSLESS[1:], HeadDrafts(3, 0.01), SelfSpeculative(3, 20)],
    ids=str,
)
def test_a_text_outgrows_the_program_that_it_began_with(
    headed: eecore.Model, policy: Exit, settings: dict[str, Any]
) -> None:
    """Seen tokens pass 2, 4, 8, ... and generated ones 64; no iteration fails (conftest)."""
    if not isinstance(policy, (PromptLookup, HeadDrafts)):  # other policies draw other tokens
        settings = {**settings, "temperature": 0.0}
    bias = dict.fromkeys(range(40, 320), -100.0)
    asked: dict[str, Any] = {"max_tokens": 140, "ignore_eos": True, "logit_bias": bias, **settings}
    prompts = [[3, 9], [5]]
    full, drafted = (
        [output.token_ids for output in eecore.generate(headed, prompts, exit=exit, **asked)]
        for exit in (eecore.Full(), policy)
    )
    assert drafted == full
    assert len(set(full[0])) > 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"presence_penalty": 2.5}, r"presence_penalty: expected -2\.\.2, got 2\.5"),
        ({"frequency_penalty": "1"}, r"frequency_penalty: expected -2\.\.2, got '1'"),
        ({"logit_bias": {3: 101}}, r"logit_bias: expected None or at most 1024 .*got \{3: 101\}"),
        ({"logit_bias": {"3": 1}}, "logit_bias: expected None or at most 1024 token ids"),
        ({"logit_bias": {-1: 1}}, "logit_bias: expected"),
        ({"logit_bias": {True: 1}}, "logit_bias: expected"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias: expected"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias: expected"),
        ({"logit_bias": ((1, 1.0, 2), 3)}, "logit_bias: expected"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias: expected None or at most"),
        ({"logit_bias": 3}, "logit_bias: expected None or at most 1024 token ids .*got 3"),
    ],
)
def test_what_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**settings)


def test_biases_are_of_tokens_that_the_model_has(tiny: eecore.Model) -> None:
    assert SamplingParams(logit_bias={5: 1, 2: -1}).logit_bias == ((2, -1.0), (5, 1.0))
    with pytest.raises(RequestError, match=r"logit_bias: expected token ids 0\.\.319, got 320"):
        eecore.generate(tiny, [[1]], logit_bias={0: 1, 320: 1})
