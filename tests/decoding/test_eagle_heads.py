"""EAGLE-3 heads: what they draft, their keys, and files that are not for a model."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import eecore
from devices import cpu_only, engine_of, load
from eagle_heads import Layout, reference_drafts, write_eagle
from eecore import (
    Auto,
    ConfidentExit,
    EngineConfig,
    ExitError,
    Full,
    HeadDrafts,
    ModelError,
    SamplingParams,
    SelfSpeculative,
)
from eecore.cli.info import info, model_facts
from eecore.models import bytes_per_token
from eecore.planning.proposal import MAX_AHEAD
from published_heads import PROMPTS, drafts_of, states_of, write_target
from tiny_models import random_prompts
from workloads import Request, serve, tokens_of

pytestmark = pytest.mark.usefixtures("one_thread")

TAPS = (1, 2, 3)
LAYOUTS = {
    "raw": Layout(vocabulary_size=200),
    "own embeddings": Layout(own_embeddings=True, num_heads=(2, 1)),
    "narrow": Layout(own_embeddings=True, hidden_size=32, vocabulary_size=90, fc_norm=True),
    "speculators": Layout(listed=True, norm_before_residual=True, vocabulary_size=77),
    "3.1": Layout(listed=True, model_type="qwen3", fc_norm=True, norm_output=True),
    "norm before fc": Layout(listed=True, norm_before_fc=True, own_embeddings=True, window=9),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def target(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return content


def with_head(directory: Path, head: Path, **settings: Any) -> eecore.Model:
    return load(directory, **{"kv_cache_tokens": 2048, "draft_head": head, **settings})


@pytest.fixture(scope="module")
def noisy(
    directory: Path, target: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> eecore.Model:
    """With a head of noise that knows few tokens."""
    head = tmp_path_factory.mktemp("noise") / "head"
    return with_head(directory, write_eagle(head, target, LAYOUTS["raw"]))


def check_drafts(engine: Any, model: eecore.Model, layout: Layout) -> int:
    """Whatever its requests have drafted is what the formula drafts; how many have."""
    checked = 0
    for tokens, left, ahead in drafts_of(engine):
        assert len(ahead.tokens) == min(MAX_AHEAD, left)
        drafts, probabilities, _ = reference_drafts(
            model.network.draft_head.path,
            layout,
            model.network.weights.embed_tokens.weight,
            states_of(model, tokens[:-1]),
            tokens[1:],
            len(ahead.tokens),
        )
        count = len(ahead.tokens)
        assert ahead.tokens == drafts[:count]
        assert ahead.probabilities == pytest.approx(probabilities[:count], rel=2e-3)
        checked += 1
    return checked


@cpu_only
@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_are_those_of_the_formula(
    name: str, directory: Path, target: dict[str, Any], tmp_path: Path
) -> None:
    """At the end of every round, of all that there are in a batch, after prompts in chunks."""
    layout = LAYOUTS[name]
    short = {} if layout.listed else {"max_position_embeddings": 16}  # it is no limit
    model = with_head(directory, write_eagle(tmp_path / "head", target, layout, seed=3, **short))
    head = model.network.draft_head
    assert head.keys is not None
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


@cpu_only
def test_pages_that_are_shared_have_the_keys_of_the_head(
    directory: Path, target: dict[str, Any], tmp_path: Path
) -> None:
    """What another request computed, under any policy that runs all layers, is drafted from."""
    layout = LAYOUTS["raw"]
    model = with_head(directory, write_eagle(tmp_path / "head", target, layout))
    engine = engine_of(model, EngineConfig(kv_cache_tokens=2048, page_size=4))
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    asked, length = random_prompts(18, seed=9)[0], 0
    for policy in (Full(), ConfidentExit(0.3), SelfSpeculative(2, 3), Auto()):
        (first,) = serve(engine, [Request(asked, policy, sampling)])
        shares = isinstance(policy, (Full, Auto))
        text = asked + first.token_ids + [5]
        engine.add_request(
            text,
            exit=HeadDrafts(MAX_AHEAD, 0.0),
            sampling=SamplingParams(max_tokens=8, ignore_eos=True),
        )
        checked = 0
        while engine.has_unfinished:
            for step in engine.step():
                if step.output is not None:
                    length = step.output.stats.cached_tokens
            checked += check_drafts(engine, model, layout)
        assert checked > 2
        # Prompts have the keys under every policy; what is generated, where all layers ran.
        assert (length >= len(text) - 8) if shares else (16 <= length < 18 + 4)
        engine.reset_prefix_cache()


@cpu_only
def test_its_keys_are_counted(directory: Path, noisy: eecore.Model) -> None:
    plain, kv = load(directory, kv_cache_tokens=2048), engine_of(noisy).kv
    assert kv.of_head is not None
    assert kv.of_head.k.shape == (1, *kv.k.shape[1:])
    sizes = [bytes_per_token(model.network, torch.float32) for model in (plain, noisy)]
    assert sizes[1] == sizes[0] * 5 // 4
    assert bytes_per_token(noisy.network, torch.float8_e4m3fn) == 4 * 128 * 2 + 128 * 2 * 4
    narrow = with_head(directory, noisy.network.draft_head.path, kv_cache_dtype="fp8")
    asked = {"max_tokens": 40, "ignore_eos": True}
    expected, got = (
        eecore.generate(narrow, PROMPTS, exit=exit, **asked)
        for exit in (Full(), HeadDrafts(4, 0.0))
    )
    assert tokens_of(got) == tokens_of(expected)


def test_the_measure_cut_wants_another_head(noisy: eecore.Model) -> None:
    with pytest.raises(ExitError, match="expected a draft head that eecore train-exits made"):
        eecore.generate(noisy, [1], exit=ConfidentExit(0.5, measure="cut"))


@cpu_only
def test_a_request_without_a_next_token_ends_alone(
    directory: Path, target: dict[str, Any], tmp_path: Path
) -> None:
    """NaN in its states gives it no token, which the head is not asked to embed."""
    model = with_head(directory, write_eagle(tmp_path / "head", target))
    table = model.network.weights.embed_tokens.weight
    table[11] = torch.nan
    for policies in ([Full()], [HeadDrafts(4, 0.0)]):
        engine = engine_of(model)
        sampling = SamplingParams(max_tokens=20, ignore_eos=True)
        prompts = [[3, 4, 5], [3, 11, 4], [9, 8]]
        outputs = serve(engine, [Request(p, policies[0], sampling) for p in prompts])
        assert [output.finish_reason for output in outputs] == ["length", "error", "length"]


BAD = [
    ({"hidden_size": 32}, "target_hidden_size: expected 64, as the model has it, got 32"),
    ({"vocab_size": 321}, "vocab_size: expected 320, as the model has it, got 321"),
    ({"num_hidden_layers": 2}, "num_hidden_layers: supported are 1, a head of one layer, got 2"),
    ({"draft_vocab_size": 199}, r"lm_head.weight: expected \[199, 64\] as .*, got \[200, 64\]"),
    (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}},
        "eagle_aux_hidden_state_layer_ids: expected a list of integers of 0..3",
    ),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: supported are true"),
    ({"eagle_config": None}, "eagle_aux_hidden_state_layer_ids: expected layers of the 4"),
    ({"fc_norm": True}, "expected tensor fc_norm.0.weight, got none"),
    ({"fc_norm": True, "norm_before_fc": True}, "norm_before_fc: expected false beside fc_norm"),
    ({"model_type": "mamba"}, "model_type: supported are llama, qwen3, got 'mamba'"),
    ({"intermediate_size": 97}, r"mlp.gate_proj.weight: expected \[97, 64\]"),
    ({"speculators_model_type": "medusa"}, "supported are eagle3, .*, got 'medusa'"),
]


@cpu_only
@pytest.mark.parametrize(("fields", "message"), BAD)
def test_a_config_for_another_model_is_a_sentence(
    directory: Path,
    target: dict[str, Any],
    tmp_path: Path,
    fields: dict[str, Any],
    message: str,
) -> None:
    head = write_eagle(tmp_path / "head", target, LAYOUTS["raw"], **fields)
    if "hidden_size" in fields:
        content = json.loads((head / "config.json").read_text())
        (head / "config.json").write_text(json.dumps(content | {"target_hidden_size": 32}))
    with pytest.raises(ModelError, match=message):
        with_head(directory, head)


@cpu_only
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d2t": torch.full((200,), 121)}, "d2t: expected tokens of 0..319, got 320 for draft 199"),
        ({"d2t": torch.full((200,), -1)}, "d2t: expected tokens of 0..319, got -1 for draft 0"),
        ({"d2t": torch.zeros(199).long()}, r"d2t: expected whole numbers \[draft_vocab_size=200\]"),
        ({"d2t": torch.zeros(200)}, "d2t: expected whole numbers .*, got F32"),
        ({"d2t": None}, "expected tensor d2t, the model's token of each of 200 drafts, got none"),
        ({"midlayer.mlp.up_proj.weight": None}, "expected tensor midlayer.mlp.up_proj.weight, got"),
        ({"norm.weight": torch.ones(63)}, r"norm.weight: expected \[64\] .*, got \[63\]"),
        ({"fc.weight": torch.zeros(64, 192).int()}, "fc.weight: supported are F32, BF16, F16, got"),
        ({"midlayer.self_attn.q_norm.weight": torch.ones(64)}, "expected no tensor midlayer.self"),
        ({"layers.1.norm.weight": torch.ones(64)}, "expected no tensor layers.1.norm.weight"),
        ({"embed_tokens.weight": torch.ones(9, 64)}, r"embed_tokens.weight: expected \[320, 64\]"),
    ],
)
def test_tensors_of_another_head_are_a_sentence(
    directory: Path,
    target: dict[str, Any],
    tmp_path: Path,
    change: dict[str, torch.Tensor | None],
    message: str,
) -> None:
    head = write_eagle(tmp_path / "head", target, LAYOUTS["raw"])
    tensors = {**load_file(head / "model.safetensors"), **change}
    save_file({n: t for n, t in tensors.items() if t is not None}, head / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        with_head(directory, head)


@cpu_only
def test_what_is_no_head_is_a_sentence(
    directory: Path, target: dict[str, Any], tmp_path: Path
) -> None:
    head = write_eagle(tmp_path / "head", target)
    whole = (head / "model.safetensors").read_bytes()
    (head / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="expected a whole safetensors file, got"):
        with_head(directory, head)
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"got pytorch_model.bin, a pickle.*RedHatAI/"):
        with_head(directory, head)
    with pytest.raises(ModelError, match="expected the config of a draft head"):
        with_head(directory, directory)
    with pytest.raises(ModelError, match=r"expected the directory of a draft .* got nothing"):
        with_head(directory, tmp_path / "nothing")
    with pytest.raises(ModelError, match="exits: expected None beside draft_head"):
        with_head(directory, head, exits=head)


@cpu_only
def test_info_says_what_a_head_is(
    directory: Path,
    target: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    verifier = {"verifier": {"name_or_path": "org/Another-8B"}}
    head = write_eagle(tmp_path / "head", target, Layout(listed=True), speculators_config=verifier)
    facts = model_facts(directory, head)["draft_head"]
    assert (facts["kind"], facts["taps"], facts["for_another"]) == ("EAGLE-3", [1, 2, 3], True)
    assert info(str(directory), str(head)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "EAGLE-3 after layers 1, 2, 3; 320 tokens" in said
    assert "for org/Another-8B, another model" in said


@cpu_only
def test_the_name_of_another_model_is_a_warning(
    directory: Path, target: dict[str, Any], tmp_path: Path
) -> None:
    verifier = {"verifier": {"name_or_path": "org/Another-8B"}}
    layout = Layout(listed=True)
    head = write_eagle(tmp_path / "a", target, layout, speculators_config=verifier)
    with pytest.warns(UserWarning, match="expected a head for .*, got one for org/Another-8B"):
        with_head(directory, head)
    verifier = {"verifier": {"name_or_path": f"org/{directory.name}"}}
    head = write_eagle(tmp_path / "b", target, layout, speculators_config=verifier)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_head(directory, head)
