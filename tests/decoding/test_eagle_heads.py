"""EAGLE-3 heads: what they draft, the tokens of full depth in any company, and files that are not
for a model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import eecore
from devices import check_logprobs, cpu_only, engine_of, load
from eagle_heads import Layout, reference_drafts, write_eagle
from eecore import Auto, EngineConfig, Full, HeadDrafts, SamplingParams
from eecore.models import KeyedHead, KVCache
from eecore.planning.proposal import MAX_AHEAD
from tiny_models import random_prompts, scale_layers, write_model
from workloads import tokens_of

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[7, 8, 9] * 5, *random_prompts(1, 23, 9, 31, seed=4), [3, 4, 5, 6, 3, 4]]
TAPS = (1, 2, 3)
LAYOUTS = {
    "raw": Layout(vocabulary_size=200),
    "own embeddings": Layout(own_embeddings=True, num_heads=(2, 1)),
    "narrow": Layout(own_embeddings=True, hidden_size=32, vocabulary_size=90, fc_norm=True),
    "speculators": Layout(listed=True, norm_before_residual=True, vocabulary_size=77),
    "3.1": Layout(listed=True, model_type="qwen3", fc_norm=True, norm_output=True),
    "norm before fc": Layout(listed=True, norm_before_fc=True, own_embeddings=True),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers add little: the next token hangs on the last one, mostly."""
    directory = write_model(tmp_path_factory.mktemp("model"), seed=5)
    scale_layers(directory, dict.fromkeys(range(4), 0.04))
    return directory


@pytest.fixture(scope="module")
def target(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return content


def with_head(directory: Path, head: Path, **settings: Any) -> eecore.Model:
    return load(directory, **{"kv_cache_tokens": 2048, "draft_head": head, **settings})


@pytest.fixture(scope="module")
def following(
    directory: Path, target: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> eecore.Model:
    """With a head that is mostly right."""
    follows = load_file(directory / "model.safetensors")
    head = tmp_path_factory.mktemp("following") / "head"
    layout = Layout(listed=True, norm_before_residual=True)
    return with_head(directory, write_eagle(head, target, layout, follows=follows))


@pytest.fixture(scope="module")
def noisy(
    directory: Path, target: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> eecore.Model:
    """With a head of noise that knows few tokens."""
    head = tmp_path_factory.mktemp("noise") / "head"
    return with_head(directory, write_eagle(head, target, LAYOUTS["raw"]))


def states_of(model: eecore.Model, tokens: list[int]) -> list[torch.Tensor]:
    """[num_tokens, hidden_size] after the layers of the head's taps."""
    network, count = model.network, len(tokens)
    kv = KVCache.allocate(network.config, 1, count, device=network.device, dtype=network.dtype)
    hidden, states = network.embed(torch.tensor(tokens)), []
    for layer in range(network.config.num_layers):
        hidden = network.layers(layer, layer + 1, hidden, kv, network.whole_text(count))
        states.append(hidden)
    return [states[tap - 1] for tap in network.draft_head.taps]


def check_drafts(engine: Any, model: eecore.Model, layout: Layout) -> int:
    """Whatever its requests have drafted is what the formula drafts; how many have."""
    checked = 0
    for sequence in engine.requests.values():
        ahead = sequence.draft and sequence.draft.ahead
        if ahead is None:
            continue
        tokens = sequence.tokens(0, sequence.num_tokens)
        assert ahead.num_tokens == len(tokens)
        assert len(ahead.tokens) == min(MAX_AHEAD, sequence.tokens_left - 1)
        drafts, probabilities, _ = reference_drafts(
            model.network.draft_head.path,
            layout,
            model.network.weights.embed_tokens.weight,
            states_of(model, tokens[:-1]),
            tokens[1:],
            len(ahead.tokens),
        )
        assert ahead.tokens == drafts
        assert ahead.probabilities == pytest.approx(probabilities, rel=2e-3)
        checked += 1
    return checked


@cpu_only
@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_are_those_of_the_formula(
    name: str, directory: Path, target: dict[str, Any], tmp_path: Path
) -> None:
    """At the end of every round, of all that there are in a batch, after prompts in chunks."""
    layout = LAYOUTS[name]
    model = with_head(directory, write_eagle(tmp_path / "head", target, layout, seed=3))
    head = model.network.draft_head
    assert isinstance(head, KeyedHead)
    assert head.taps == TAPS
    engine = engine_of(model, EngineConfig(kv_cache_tokens=2048, max_prefill_chunk=8))
    for i, prompt in enumerate(PROMPTS[:3]):
        policy = HeadDrafts(MAX_AHEAD, 0.0)
        sampling = SamplingParams(max_tokens=24, ignore_eos=True, temperature=float(i == 1), seed=i)
        engine.add_request(prompt, exit=policy, sampling=sampling)
    checked = 0
    while engine.has_unfinished:
        engine.step()
        checked += check_drafts(engine, model, layout)
    assert checked > 24


POLICIES = [HeadDrafts(), HeadDrafts(1, 0.0), HeadDrafts(99, 0.0), Auto(), Auto(lookup=False)]


def outputs_of(model: eecore.Model, exit: Any, **settings: Any) -> list[eecore.Output]:
    settings = {"max_tokens": 40, "ignore_eos": True, **settings}
    return eecore.generate(model, PROMPTS, exit=exit, **settings)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["following", "noisy"])
def test_greedy_output_is_that_of_full(
    name: str, policy: Any, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name)
    expected = outputs_of(model, Full())
    for _ in range(2):
        assert tokens_of(outputs_of(model, policy)) == tokens_of(expected)
    (alone,) = eecore.generate(model, PROMPTS[2], exit=policy, max_tokens=40, ignore_eos=True)
    assert alone.token_ids == expected[2].token_ids


def test_drafts_that_are_accepted_save_rounds(following: eecore.Model) -> None:
    for output in outputs_of(following, HeadDrafts(4, 0.0)):
        stats = output.stats
        assert stats.accepted > 0.6 * stats.drafted > 0


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 5, "repetition_penalty": 1.3},
        {"temperature": 2.0, "top_p": 0.8, "min_p": 0.01, "logprobs": 2},
        {"repetition_penalty": 1.5, "logprobs": 0},
    ],
)
@pytest.mark.parametrize("policy", [HeadDrafts(5, 0.0), Auto()])
def test_what_is_drawn_is_drawn_without_drafts(
    following: eecore.Model, filters: dict[str, Any], policy: Any
) -> None:
    sampling = [
        SamplingParams(max_tokens=40, ignore_eos=True, seed=seed, **filters)
        for seed in range(len(PROMPTS))
    ]
    expected, got = (
        eecore.generate(following, PROMPTS, exit=exit, sampling=sampling)
        for exit in (Full(), policy)
    )
    assert tokens_of(got) == tokens_of(expected)
    for one, other in zip(got, expected, strict=True):
        check_logprobs(one, other)
