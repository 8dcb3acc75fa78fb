"""Heads that draft a block: what they draft, the tokens of full depth in any company, and files
that are not for a model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import eecore
from block_heads import BLOCK, CUT, LAYOUTS, BlockOracle, config_of, tensors_of, write_block_head
from devices import check_logprobs, cpu_only, engine_of, load
from eecore import (
    Auto,
    ConfidentExit,
    EngineConfig,
    Full,
    HeadDrafts,
    ModelError,
    PromptLookup,
    SamplingParams,
    SelfSpeculative,
)
from eecore.models import BlockHead, KVCache
from tiny_models import random_prompts, scale_layers, write_model
from workloads import Request, serve, tokens_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*expected a head for"),
]

PROMPTS = [[7, 8, 9] * 5, *random_prompts(1, 23, 9, 31, 4, 12, seed=4), [3, 4, 5, 6, 3, 4]]
NAMES = ["noisy", "following"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers add little: the next token hangs on the last one, mostly."""
    directory = write_model(tmp_path_factory.mktemp("model"), seed=5)
    return scale_layers(directory, dict.fromkeys(range(4), 0.04))


def with_head(directory: Path, head: Path, **settings: Any) -> eecore.Model:
    return load(directory, **{"kv_cache_tokens": 2048, "draft_head": head, **settings})


@pytest.fixture(scope="module")
def noisy(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    return with_head(directory, write_block_head(tmp_path_factory.mktemp("noisy")))


def write_following(directory: Path, model: Path) -> Path:
    """A head whose table by the token before is the model's own embeddings, normed, and LM head:
    about what the model's layers leave, so that it is mostly right."""
    write_block_head(directory, "DeepSpec", markov_rank=64)
    file = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    of_model = load_file(model / "model.safetensors")
    embeddings, norm = of_model["model.embed_tokens.weight"], of_model["model.norm.weight"]
    tensors["norm.weight"] *= 0.01
    tensors["markov_head.markov_w1.weight"] = torch.nn.functional.rms_norm(
        embeddings, norm.shape, norm, 1e-5
    )
    tensors["markov_head.markov_w2.weight"] = of_model["lm_head.weight"]
    tensors["confidence_head.proj.weight"].zero_()
    tensors["confidence_head.proj.bias"].fill_(2.0)
    save_file(tensors, file)
    return directory


@pytest.fixture(scope="module")
def following(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    """With a head that is mostly right."""
    return with_head(directory, write_following(tmp_path_factory.mktemp("following"), directory))


def outputs_of(model: eecore.Model, exit: Any, **settings: Any) -> list[eecore.Output]:
    settings = {"max_tokens": 40, "ignore_eos": True, **settings}
    return eecore.generate(model, PROMPTS, exit=exit, **settings)


def head_of(model: eecore.Model) -> BlockHead:
    head = model.network.draft_head
    assert isinstance(head, BlockHead)
    return head


def oracle_of(model: eecore.Model) -> BlockOracle:
    path, weights = head_of(model).path, model.network.weights
    config = json.loads((path / "config.json").read_text())
    tensors = {
        name: tensor.to(model.network.device)
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    return BlockOracle(config, tensors, weights.embed_tokens.weight, weights.lm_head.weight)


def states_of(model: eecore.Model, tokens: list[int]) -> list[torch.Tensor]:
    """After each of the taps, at all positions of a text: [num_tokens, hidden_size]."""
    network, count = model.network, len(tokens)
    kv = KVCache.allocate(network.config, 1, count, device=network.device, dtype=network.dtype)
    batch = network.whole_text(count)
    hidden, begin, states = network.embed(torch.tensor(tokens, device=network.device)), 0, []
    for end in head_of(model).taps:
        hidden = network.layers(begin, end, hidden, kv, batch)
        states.append(hidden.clone())
        begin = end
    return states


def check_drafts(model: eecore.Model, prompts: list[list[int]], **settings: Any) -> int:
    """At the end of every round, of all requests of a batch; how many were looked at."""
    oracle, engine = oracle_of(model), engine_of(model, EngineConfig(**settings))
    for prompt in prompts:
        engine.add_request(
            prompt,
            exit=HeadDrafts(99, 0.0),
            sampling=SamplingParams(max_tokens=24, ignore_eos=True),
        )
    checked = 0
    while engine.has_unfinished:
        engine.step()
        for sequence in engine.requests.values():
            ahead = sequence.draft and sequence.draft.ahead
            if ahead is None or len(ahead.tokens) < head_of(model).num_drafts:
                continue  # a block is cut where the text is to end, or where pages are few
            tokens = sequence.tokens(0, sequence.num_tokens)
            drafted = oracle.drafts(states_of(model, tokens[:-1]), tokens[-1])
            assert ahead.tokens == drafted.tokens
            assert ahead.probabilities == pytest.approx(drafted.scores, rel=1e-3, abs=1e-5)
            checked += 1
    return checked


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_are_those_of_the_formula(layout: str, directory: Path, tmp_path: Path) -> None:
    model = with_head(directory, write_block_head(tmp_path, layout))
    head, cut = head_of(model), CUT if layout.startswith("speculators") else 320
    from_last = layout in ("DeepSpec", "speculators dspark")
    assert head.kind == ("DSpark" if "park" in layout or layout == "DeepSpec" else "DFlash")
    assert head.taps == (1, 3)
    assert head.num_drafts == BLOCK - (not from_last)
    assert head.settings.draft_vocab_size == cut
    assert check_drafts(model, PROMPTS[:3], kv_cache_tokens=2048) > 8


def test_keys_of_shared_pages_are_the_same(noisy: eecore.Model) -> None:
    """A prompt in the prefix cache, and a request that was preempted, draft as before."""
    prompts = [PROMPTS[4] + [token] for token in (5, 6, 7)]
    settings = {"max_num_seqs": 1, "page_size": 4, "kv_cache_tokens": 400}
    assert check_drafts(noisy, [PROMPTS[4], *prompts], **settings) > 8
    assert check_drafts(noisy, PROMPTS[:4], page_size=4, kv_cache_tokens=120) > 8


@pytest.mark.parametrize(
    "policy", [HeadDrafts(), HeadDrafts(99, 0.0), HeadDrafts(3, 0.9), Auto(), Auto(lookup=False)]
)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_output_is_that_of_full(
    name: str, policy: Any, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name)
    expected = outputs_of(model, Full())
    for _ in range(2):
        assert tokens_of(outputs_of(model, policy)) == tokens_of(expected)
    (alone,) = eecore.generate(model, PROMPTS[2], exit=policy, max_tokens=40, ignore_eos=True)
    assert alone.token_ids == expected[2].token_ids


def test_drafts_that_are_accepted_save_rounds(following: eecore.Model, noisy: eecore.Model) -> None:
    found = {}
    for name, model in (("following", following), ("noisy", noisy)):
        outputs = outputs_of(model, HeadDrafts(6, 0.0))
        accepted, drafted = (
            sum(getattr(output.stats, count) for output in outputs)
            for count in ("accepted", "drafted")
        )
        found[name] = accepted / drafted
        rounds = [len(output.token_ids) - 1 - output.stats.accepted for output in outputs]
        assert (max(rounds) < 22) == (name == "following")
    assert found["following"] > 0.5
    assert found["noisy"] < 0.1
    assert sum(output.stats.drafted for output in outputs_of(noisy, HeadDrafts(4, 1.0))) == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 1.0, "logprobs": 1},
        {"temperature": 0.6, "top_k": 5, "repetition_penalty": 1.3},
        {"repetition_penalty": 1.5, "logprobs": 0},
    ],
)
@pytest.mark.parametrize("policy", [HeadDrafts(5, 0.0), Auto()])
def test_whatever_is_drawn_is_drawn_without_drafts(
    name: str, filters: dict[str, Any], policy: Any, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name)
    sampling = [
        SamplingParams(max_tokens=30, ignore_eos=True, seed=seed, **filters)
        for seed in range(len(PROMPTS))
    ]
    expected, got = (
        eecore.generate(model, PROMPTS, exit=exit, sampling=sampling) for exit in (Full(), policy)
    )
    assert tokens_of(got) == tokens_of(expected)
    for one, other in zip(got, expected, strict=True):
        check_logprobs(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_all_policies_share_a_batch_and_pages_are_few(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Preempted requests go on where they were; rows that exit leave the head no keys."""
    model = request.getfixturevalue(name)
    policies = [
        HeadDrafts(8, 0.0),
        Full(),
        PromptLookup(3),
        SelfSpeculative(2, 3),
        Auto(),
        ConfidentExit(0.9),
    ]
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    alone = [
        eecore.generate(model, prompt, exit=policy, sampling=sampling)[0]
        for prompt, policy in zip(PROMPTS, policies, strict=False)
    ]
    engine = engine_of(model, EngineConfig(kv_cache_tokens=100, page_size=4, max_num_seqs=4))
    requests = [Request(*asked, sampling) for asked in zip(PROMPTS, policies, strict=False)]
    outputs = serve(engine, requests)
    assert tokens_of(outputs) == tokens_of(alone)
    assert sum(output.stats.preemptions for output in outputs) > 0
    assert engine.pages.num_free == engine.pages.num_pages


@pytest.mark.parametrize("policies", [[HeadDrafts(99, 0.0)], [HeadDrafts(4, 0.5), Full()]])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_that_stay_on_the_device(
    name: str, policies: list[Any], request: pytest.FixtureRequest
) -> None:
    """A round that is launched before the last one is known drafts and accepts what it would."""
    model = request.getfixturevalue(name)
    found = []
    for ahead in (False, True):
        engine = engine_of(model, EngineConfig(kv_cache_tokens=2048), ahead=ahead)
        requests = [
            Request(
                prompt,
                policies[i % len(policies)],
                SamplingParams(max_tokens=17 + 5 * i, ignore_eos=True),
            )
            for i, prompt in enumerate(PROMPTS)
        ]
        found.append(serve(engine, requests))
    assert tokens_of(found[0]) == tokens_of(found[1])
    accepted = [[output.stats.accepted for output in outputs] for outputs in found]
    assert accepted[0] == accepted[1]


@cpu_only
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_models_in_few_bits(weights: str, directory: Path, tmp_path: Path) -> None:
    """The head is as few bits as the model; what it drafts is verified all the same."""
    head = write_following(tmp_path, directory)
    model = with_head(directory, head, weights=weights)
    assert head_of(model).markov.after.is_quantised
    got = outputs_of(model, HeadDrafts(6, 0.0))
    assert tokens_of(got) == tokens_of(outputs_of(model, Full()))
    assert sum(o.stats.accepted for o in got) > 0.3 * sum(o.stats.drafted for o in got)


def test_logits_of_many_places_are_made_draft_by_draft(
    following: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eecore.decoding.block_drafts.MAX_ROWS_OF_LOGITS", 8)
    assert check_drafts(following, PROMPTS[:3], kv_cache_tokens=2048) > 8


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("z-lab", {"hidden_size": 96}, "hidden_size: expected 64, as the model has it, got 96"),
    ("z-lab", {"vocab_size": 100}, "vocab_size: expected 320, as the model has it, got 100"),
    ("z-lab", {"num_target_layers": 9}, "num_target_layers: expected 4, as the model has it"),
    ("DeepSpec", {"target_layer_ids": [1, 4]}, "target_layer_ids: expected a list of integers of"),
    ("DeepSpec", {"target_layer_ids": [1, 1]}, "target_layer_ids: expected numbers of layers"),
    ("DeepSpec", {"mask_token_id": 320}, "mask_token_id: expected an integer of 0..319, got 320"),
    ("DeepSpec", {"markov_head_type": "rnn"}, "markov_head_type: supported are vanilla, got 'rnn'"),
    ("DeepSpec", {"markov_rank": 8}, r"markov_w1.weight: expected \[320, 8\] as config.json says"),
    ("DeepSpec", {"block_size": 1}, "block_size: expected an integer of 2..64, got 1"),
    (
        "DeepSpec",
        {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 8},
        "layer_types: supported are full_attention",
    ),
    ("speculators dflash", {"aux_hidden_state_layer_ids": [1, 5]}, "expected a list of integers"),
    ("speculators dflash", {"draft_vocab_size": 999}, "draft_vocab_size: expected an integer of"),
    (
        "speculators dflash",
        {"transformer_layer_config": None},
        "transformer_layer_config: expected",
    ),
]


@pytest.mark.parametrize(("layout", "fields", "message"), BAD)
def test_heads_of_other_models_are_refused(
    layout: str, fields: dict[str, Any], message: str, directory: Path, tmp_path: Path
) -> None:
    write_block_head(tmp_path, layout)
    content = {**config_of(layout), **fields}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=message):
        with_head(directory, tmp_path)


def test_files_that_are_not_whole_are_refused(directory: Path, tmp_path: Path) -> None:
    file = write_block_head(tmp_path, "speculators dspark") / "model.safetensors"
    whole, tensors = file.read_bytes(), tensors_of(config_of("speculators dspark"))

    def refused(message: str) -> None:
        with pytest.raises(ModelError, match=re.escape(message)):
            with_head(directory, tmp_path)

    def stored(**changed: torch.Tensor | None) -> None:
        made = {name.replace(".", "_"): tensor for name, tensor in tensors.items()}
        named = {name.replace(".", "_"): name for name in tensors}
        made |= changed
        save_file({named.get(n, n): t for n, t in made.items() if t is not None}, file)

    file.write_bytes(whole[: len(whole) // 2])
    refused("expected a whole safetensors file")
    for name in ("fc.weight", "layers.1.mlp.up_proj.weight", "d2t", "lm_head.weight"):
        stored(**{name.replace(".", "_"): None})
        refused(f"got none of the name {name}")
    stored(norm_weight=torch.ones(65))
    refused("norm.weight: expected [64] as config.json says, got [65]")
    stored(prefix_gru=torch.ones(2))
    refused("expected the tensors of a DSpark, got prefix_gru, too")
    stored(d2t=torch.full((CUT,), 300))
    refused("d2t: expected tokens of 0..319, got 399")
    stored(d2t=torch.full((CUT,), -1))
    refused("d2t: expected tokens of 0..319, got -1")
    stored(d2t=torch.zeros(CUT))
    refused("d2t: expected whole numbers, got torch.float32")
    stored()
    assert with_head(directory, tmp_path).network.draft_head is not None


def test_embeddings_and_an_lm_head_that_are_the_model_s_are_left_where_they_are(
    directory: Path, tmp_path: Path
) -> None:
    """As in DeepSpec's files, which have both once more."""
    file = write_block_head(tmp_path, "DeepSpec") / "model.safetensors"
    own = load_file(directory / "model.safetensors")
    more = {"embed_tokens.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
    tensors = tensors_of(config_of("DeepSpec")) | {name: own[of] for name, of in more.items()}
    save_file(tensors, file)
    model = with_head(directory, tmp_path)
    assert head_of(model).measure.lm_head is model.network.weights.lm_head.weight
    assert check_drafts(model, PROMPTS[:1], kv_cache_tokens=512) > 4


@cpu_only
def test_a_guide_keeps_what_it_allows(following: eecore.Model) -> None:
    settings: dict[str, Any] = {"max_tokens": 24, "guide": eecore.Guide.regex("[a-z ]{10,20}")}
    full, got = (
        eecore.generate(following, PROMPTS[:3], exit=exit, **settings)
        for exit in (Full(), HeadDrafts(6, 0.0))
    )
    assert tokens_of(got) == tokens_of(full)


def test_usual_taps_are_those_of_the_package(tmp_path: Path) -> None:
    """Where a file of z-lab's names none."""
    model = write_model(tmp_path / "model", num_hidden_layers=12)
    own = {"dflash_config": {"mask_token_id": 319}, "num_target_layers": 12}
    head = write_block_head(tmp_path / "head", "z-lab", **own)
    assert head_of(with_head(model, head)).taps == (2, 10)
