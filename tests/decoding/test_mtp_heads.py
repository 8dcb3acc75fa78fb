"""The layer of a checkpoint that drafts further tokens: its drafts, the tokens of full depth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import eecore
from devices import check_logprobs, engine_of, load
from eecore import Auto, EngineConfig, Full, HeadDrafts, ModelError, SamplingParams
from eecore.models import KVCache
from mtp_heads import LAYER, reference_drafts, write_mimo
from tiny_models import random_prompts, write_model
from workloads import tokens_of

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[7, 8, 9] * 5, *random_prompts(2, 23, 9, 31, seed=4)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mimo(tmp_path_factory.mktemp("mimo"))


@pytest.fixture(scope="module")
def model(directory: Path) -> eecore.Model:
    return load(directory, kv_cache_tokens=2048, draft_head=directory)


def normed_states(model: eecore.Model, tokens: list[int]) -> torch.Tensor:
    network, count = model.network, len(tokens)
    kv = KVCache.allocate(network.config, 1, count, device=network.device, dtype=network.dtype)
    hidden = network.embed(torch.tensor(tokens, device=network.device))
    hidden = network.layers(0, network.config.num_layers, hidden, kv, network.whole_text(count))
    return network.linear.normed(hidden, network.weights.final_norm).cpu()


def test_drafts_are_those_of_the_formula(model: eecore.Model, directory: Path) -> None:
    assert model.network.draft_head.kind == "MTP"
    engine = engine_of(model)
    for prompt in PROMPTS[:3]:
        sampling = SamplingParams(max_tokens=16, ignore_eos=True)
        engine.add_request(prompt, exit=HeadDrafts(3, 0.0), sampling=sampling)
    checked = 0
    while engine.has_unfinished:
        engine.step()
        for sequence in engine.requests.values():
            ahead = sequence.draft and sequence.draft.ahead
            if ahead is None:
                continue
            tokens = sequence.tokens(0, sequence.num_tokens)
            states = normed_states(model, tokens[:-1])
            drafts, chances = reference_drafts(directory, states, tokens, len(ahead.tokens))
            assert ahead.tokens == drafts
            assert ahead.probabilities == pytest.approx(chances, rel=1e-3)
            checked += 1
    assert checked > 8


@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 1.0, "logprobs": 1}, {"repetition_penalty": 1.5}]
)
@pytest.mark.parametrize("policy", [HeadDrafts(5, 0.0), Auto()])
def test_the_text_is_that_of_full(
    model: eecore.Model, filters: dict[str, Any], policy: Any
) -> None:
    sampling = [
        SamplingParams(max_tokens=24, ignore_eos=True, seed=seed, **filters)
        for seed in range(len(PROMPTS))
    ]
    expected, got = (
        eecore.generate(model, PROMPTS, exit=exit, sampling=sampling) for exit in (Full(), policy)
    )
    assert tokens_of(got) == tokens_of(expected)
    for one, other in zip(got, expected, strict=True):
        check_logprobs(one, other)


def test_it_is_there_when_it_is_asked_for(directory: Path, model: eecore.Model) -> None:
    plain = load(directory, kv_cache_tokens=256)
    assert plain.network.draft_head is None
    engine = engine_of(model, EngineConfig(kv_cache_tokens=256))
    # A layer more of keys and values.
    assert engine.kv.of_head.k.numel() * 4 == engine.kv.k.numel()


def test_what_is_not_whole_or_of_another_model_is_refused(directory: Path, tmp_path: Path) -> None:
    content = json.loads((directory / "config.json").read_text())
    tensors = {n: t.clone() for n, t in load_file(directory / "model.safetensors").items()}

    def refused(message: str, left_out: str = "", **fields: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**content, **fields}))
        kept = {name: tensor for name, tensor in tensors.items() if name != left_out}
        save_file(kept, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=message):
            load(directory, draft_head=tmp_path)

    refused("num_nextn_predict_layers: expected a layer", num_nextn_predict_layers=0)
    refused("num_hidden_layers: expected 4, as the model has it, got 5", num_hidden_layers=5)
    refused("hidden_size: expected 64, as the model has it, got 96", hidden_size=96)
    refused("expected tensor model.mtp_layers.0.input_proj.weight", f"{LAYER}input_proj.weight")
    llama = write_model(tmp_path / "llama")
    with pytest.raises(ModelError, match="architectures: expected that of the model, LlamaFor"):
        load(llama, draft_head=directory)
    other = write_model(tmp_path / "other", "qwen2", vocab_size=300, bos_token_id=1, eos_token_id=2)
    with pytest.raises(ModelError, match="vocab_size: expected 300, as the model has it, got 320"):
        load(other, draft_head=directory)
