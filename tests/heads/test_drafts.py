"""Heads that others publish: what they draft, and the keys that they keep."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

import eagle_heads
import eecore
import mtp_heads
from block_heads import BLOCK, CUT, MASK, BlockOracle, config_of, tensors_of, write_block_head
from coded_calls import floats_of
from devices import cpu_only, engine_of, load
from eagle_heads import Layout, write_eagle
from eecore import (
    Auto,
    ConfidentExit,
    EngineConfig,
    ExitError,
    Full,
    HeadDrafts,
    SamplingParams,
    SelfSpeculative,
    ops,
)
from eecore.cli.info import info, model_facts
from eecore.errors import ModelError
from eecore.models import bytes_per_token
from eecore.models.readers.gguf_checkpoint import GGUFCheckpoint
from eecore.models.readers.gguf_file import GGUFFile
from eecore.planning.proposal import MAX_AHEAD
from published_heads import PROMPTS, Oracle, check_drafts, write_head, write_target
from tiny_families import SHAPES
from tiny_models import random_prompts, write_model
from workloads import Request, serve, tokens_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*expected a head for .*someone/model"),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def target(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return content


def with_head(directory: Path, head: Path, **settings: Any) -> eecore.Model:
    return load(directory, **{"kv_cache_tokens": 2048, "draft_head": head, **settings})


# What each head drafts in plain PyTorch


def eagle_oracle(layout: Layout) -> Callable[[eecore.Model], Oracle]:
    def of(model: eecore.Model) -> Oracle:
        path = model.network.draft_head.path
        table = model.network.weights.embed_tokens.weight
        return lambda states, tokens, count: eagle_heads.reference_drafts(
            path, layout, table, states, tokens[1:], count
        )

    return of


def block_oracle(model: eecore.Model) -> Oracle:
    path, weights = model.network.draft_head.path, model.network.weights
    stored = load_file(path / "model.safetensors").items()
    tensors = {name: tensor.to(model.network.device) for name, tensor in stored}
    config = json.loads((path / "config.json").read_text())
    oracle = BlockOracle(config, tensors, weights.embed_tokens.weight, weights.lm_head.weight)

    return lambda states, tokens, _: oracle.drafts(states, tokens[-1])


def mtp_oracle(reference: Callable[..., Any]) -> Callable[[eecore.Model], Oracle]:
    def of(model: eecore.Model) -> Oracle:
        network = model.network

        def drafts(states: list[torch.Tensor], tokens: list[int], count: int) -> Any:
            normed = network.linear.normed(states[0], network.weights.final_norm).cpu()
            return reference(network.draft_head.path, normed, tokens, count)

        return drafts

    return of


class Case(NamedTuple):
    """A head as somebody writes it."""

    write: Callable[[Path, dict[str, Any]], Path]
    """Takes a directory, and the config of the model."""
    oracle: Callable[[eecore.Model], Oracle]
    kind: str
    taps: tuple[int, ...]
    at_once: int = 0


def eagle(layout: Layout, **fields: Any) -> Case:
    return Case(
        lambda path, target: write_eagle(path, target, layout, seed=3, **fields),
        eagle_oracle(layout),
        "EAGLE-3.1" if layout.fc_norm else "EAGLE-3",
        (1, 2, 3),
    )


def block(kind: str, layout: str, at_once: int, **fields: Any) -> Case:
    return Case(
        lambda path, _: write_block_head(path, layout, **fields),
        block_oracle,
        kind,
        (1, 3),
        at_once,
    )


def qwen3_5(family: str, *, in_gguf: bool = False) -> Case:
    def write(path: Path, _: dict[str, Any]) -> Path:
        directory = mtp_heads.write_qwen3_5(path, family)
        return mtp_heads.write_gguf(directory, family) if in_gguf else directory

    return Case(write, mtp_oracle(mtp_heads.reference_qwen3_5), "MTP", (4,))


EAGLES = {
    # It is no limit.
    "raw": eagle(Layout(vocabulary_size=200), max_position_embeddings=16),
    "own embeddings": eagle(Layout(own_embeddings=True, num_heads=(2, 1))),
    "narrow": eagle(Layout(own_embeddings=True, hidden_size=32, vocabulary_size=90, fc_norm=True)),
    "speculators": eagle(Layout(listed=True, norm_before_residual=True, vocabulary_size=77)),
    "3.1": eagle(Layout(listed=True, model_type="qwen3", fc_norm=True, norm_output=True)),
    "norm before fc": eagle(
        Layout(listed=True, norm_before_fc=True, own_embeddings=True, window=9)
    ),
}
EARLY = {"architectures": ["DFlashDraftModel"]}
OTHERS = {
    "z-lab": block("DFlash", "z-lab", BLOCK - 1),
    "SpecForge DSpark": block("DSpark", "SpecForge DSpark", BLOCK - 1),
    "early SpecForge DSpark": block("DSpark", "SpecForge DSpark", BLOCK - 1, **EARLY),
    "DeepSpec": block("DSpark", "DeepSpec", BLOCK),
    "speculators dflash": block("DFlash", "speculators dflash", BLOCK - 1),
    "speculators dspark": block("DSpark", "speculators dspark", BLOCK),
    "anchored": block("DSpark", "speculators dspark", BLOCK - 1, sample_from_anchor=False),
    "mtp": Case(
        lambda path, _: mtp_heads.write_mimo(path),
        mtp_oracle(mtp_heads.reference_drafts),
        "MTP",
        (4,),
    ),
    "mtp of qwen3_5": qwen3_5("qwen3_5"),
    "mtp of qwen3_5_odd": qwen3_5("qwen3_5_odd"),
    "mtp of a GGUF file": qwen3_5("qwen3_5_odd", in_gguf=True),
}
CASES = EAGLES | OTHERS


def drafted(model: eecore.Model, oracle: Oracle, prompts: list[list[int]], **settings: Any) -> int:
    """The number of drafts, all those of a batch at the end of every round, that were checked."""
    engine = engine_of(model, EngineConfig(**{"kv_cache_tokens": 2048, **settings}))
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=24, ignore_eos=True, temperature=float(i == 1), seed=i)
        engine.add_request(prompt, exit=HeadDrafts(99, 0.0), sampling=sampling)
    checked = 0
    while engine.has_unfinished:
        engine.step()
        checked += check_drafts(engine, model, oracle)
    return checked


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=cpu_only) for name in EAGLES), *OTHERS]
)
def test_drafts_are_those_of_the_formula(
    name: str, directory: Path, target: dict[str, Any], tmp_path: Path
) -> None:
    """After prompts in chunks."""
    case = CASES[name]
    path = case.write(tmp_path / "head", target)
    model = with_head(path if name.startswith("mtp") else directory, path)
    head = model.network.draft_head
    assert (head.kind, head.taps, head.num_at_once) == (case.kind, case.taps, case.at_once)
    if name.startswith("speculators d"):
        assert head.settings.draft_vocab_size == CUT
    assert drafted(model, case.oracle(model), PROMPTS[:3], max_prefill_chunk=8) > 8


@pytest.mark.parametrize(
    "name", [pytest.param("raw", marks=cpu_only), "z-lab", "mtp", "mtp of qwen3_5"]
)
def test_keys_of_shared_pages_are_the_same(
    name: str, directory: Path, target: dict[str, Any], tmp_path: Path
) -> None:
    """A prompt in the prefix cache, and a request that was preempted, draft as before."""
    case = CASES[name]
    path = case.write(tmp_path / "head", target)
    model = with_head(path if name.startswith("mtp") else directory, path)
    oracle = case.oracle(model)
    prompts = [PROMPTS[4] + [token] for token in (5, 6, 7)]
    one_by_one = {"max_num_seqs": 1, "page_size": 4, "kv_cache_tokens": 400}
    assert drafted(model, oracle, [PROMPTS[4], *prompts], **one_by_one) > 8
    if case.at_once:  # steps make fewer drafts where pages are few
        assert drafted(model, oracle, PROMPTS[:4], page_size=4, kv_cache_tokens=120) > 8


@cpu_only
def test_pages_that_are_shared_have_the_keys_of_the_head(
    directory: Path, target: dict[str, Any], tmp_path: Path
) -> None:
    """What another request computed, under any policy that runs all layers, is drafted from."""
    case = EAGLES["raw"]
    model = with_head(directory, case.write(tmp_path / "head", target))
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
            checked += check_drafts(engine, model, case.oracle(model))
        assert checked > 2
        # Prompts have the keys under every policy; what is generated, where all layers ran.
        assert (length >= len(text) - 8) if shares else (16 <= length < 18 + 4)
        engine.reset_prefix_cache()


@cpu_only
def test_its_keys_are_counted(directory: Path, target: dict[str, Any], tmp_path: Path) -> None:
    noisy = with_head(directory, EAGLES["raw"].write(tmp_path / "head", target))
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
    for policy in (Full(), HeadDrafts(4, 0.0)):
        engine = engine_of(model)
        sampling = SamplingParams(max_tokens=20, ignore_eos=True)
        prompts = [[3, 4, 5], [3, 11, 4], [9, 8]]
        outputs = serve(engine, [Request(p, policy, sampling) for p in prompts])
        assert [output.finish_reason for output in outputs] == ["length", "error", "length"]


def test_logits_of_many_places_are_made_draft_by_draft(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eecore.heads.block_drafts.MAX_ROWS_OF_LOGITS", 8)
    model = with_head(directory, write_head(tmp_path, "dspark", directory, follows=True))
    assert drafted(model, block_oracle(model), PROMPTS[:3]) > 8


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
    assert model.network.draft_head.measure.lm_head is model.network.weights.lm_head.weight
    assert drafted(model, block_oracle(model), PROMPTS[:1]) > 4


def test_usual_taps_are_those_of_the_package(tmp_path: Path) -> None:
    """Where a file of z-lab's names none."""
    model = write_model(tmp_path / "model", num_hidden_layers=12)
    own = {"dflash_config": {"mask_token_id": MASK}, "num_target_layers": 12}
    head = write_block_head(tmp_path / "head", "z-lab", **own)
    assert with_head(model, head).network.draft_head.taps == (2, 10)


def test_a_gguf_file_of_the_layer_alone_drafts(tmp_path: Path) -> None:
    path = mtp_heads.write_qwen3_5(tmp_path)
    model = with_head(path, mtp_heads.write_gguf(path, alone=True))
    oracle = mtp_oracle(mtp_heads.reference_qwen3_5)(model)
    assert drafted(model, oracle, PROMPTS[:2]) > 8
    assert model_facts(path, model.network.draft_head.path)["draft_head"]["kind"] == "MTP"
    with pytest.raises(ModelError, match=r"expected tensors of num_layers=4 layers, got 2"):
        load(model.network.draft_head.path)


KINDS = {
    "nextn.eh_proj": "Q8_0",
    "attn_q": "Q4_0",
    "attn_k": "Q5_0",
    "attn_v": "Q5_1",
    "attn_output": "Q4_1",
    "ffn_gate": "Q8_0",
    "ffn_up": "Q4_0",
    "ffn_down": "IQ4_NL",
}


def test_a_layer_in_blocks_keeps_its_bits(tmp_path: Path) -> None:
    kinds = {name: gguf.GGMLQuantizationType[kind] for name, kind in KINDS.items()}
    file = mtp_heads.write_gguf(mtp_heads.write_qwen3_5(tmp_path), kinds=kinds)
    model, stored = with_head(file, file), GGUFCheckpoint(file, drafts=True)
    weights = model.network.draft_head._weights
    halves = stored.tensor("mtp.fc.weight").chunk(2, 1)
    for matrix, half in zip((weights.of_token, weights.of_state), halves, strict=True):
        assert matrix.weight.numel() == ops.packed_bytes("Q8_0", *half.shape)
        assert torch.equal(floats_of(matrix.weight, matrix.table), half.double())
    down, gates = weights.layer.down, weights.layer.gate_up
    expected = stored.tensor("mtp.layers.0.mlp.down_proj.weight")
    assert torch.equal(floats_of(down.weight, down.table[0]), expected.double())
    assert len({int(place) >> 4 & 15 for place in gates.table.flatten()}) == 2
    settings: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
    drafted, full = (
        eecore.generate(model, PROMPTS[2], exit=exit, **settings)[0]
        for exit in (HeadDrafts(4, 0.0), Full())
    )
    assert drafted.stats.drafted > 0
    assert drafted.token_ids == full.token_ids


def test_blocks_across_both_halves_of_the_projection_become_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "narrow", ("qwen3_5", {"hidden_size": 80}))
    kinds = {"nextn.eh_proj": gguf.GGMLQuantizationType.Q8_0}
    file = mtp_heads.write_gguf(mtp_heads.write_qwen3_5(tmp_path, "narrow"), "narrow", kinds=kinds)
    weights = with_head(file, file).network.draft_head._weights
    halves = GGUFCheckpoint(file, drafts=True).tensor("mtp.fc.weight").chunk(2, 1)
    for matrix, half in zip((weights.of_token, weights.of_state), halves, strict=True):
        assert torch.equal(matrix.weight.float(), half.to(matrix.weight.dtype).float())


def test_the_file_of_a_head_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = mtp_heads.write_qwen3_5(tmp_path)
    head, read = mtp_heads.write_gguf(path, alone=True), list[Path]()
    of_file = GGUFFile.__init__
    monkeypatch.setattr(
        GGUFFile, "__init__", lambda self, path: (read.append(path), of_file(self, path))[1]
    )
    with_head(path, head)
    assert read == [head]


def test_the_layer_of_a_multimodal_checkpoint_drafts_the_same(tmp_path: Path) -> None:
    path = mtp_heads.write_qwen3_5(tmp_path)
    settings: dict[str, Any] = {"exit": HeadDrafts(4, 0.0), "max_tokens": 12, "ignore_eos": True}
    outputs = [eecore.generate(with_head(path, path), PROMPTS[2], **settings)]
    mtp_heads.as_part(path)
    outputs.append(eecore.generate(with_head(path, path), PROMPTS[2], **settings))
    (one,), (other,) = outputs
    assert one.token_ids == other.token_ids
    assert one.stats.drafted == other.stats.drafted > 0


def test_a_layer_of_the_checkpoint_drafts_when_it_is_asked_for(tmp_path: Path) -> None:
    path = mtp_heads.write_mimo(tmp_path)
    assert load(path, kv_cache_tokens=256).network.draft_head is None
    engine = engine_of(with_head(path, path), EngineConfig(kv_cache_tokens=256))
    # A layer more of keys and values.
    assert engine.kv.of_head.k.numel() * 4 == engine.kv.k.numel()


@cpu_only
def test_info_says_what_a_head_is_and_another_model_is_a_warning(
    directory: Path,
    target: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def head_for(name: str) -> Path:
        verifier = {"verifier": {"name_or_path": name}}
        return write_eagle(
            tmp_path / "head", target, Layout(listed=True), speculators_config=verifier
        )

    head = head_for("org/Another-8B")
    facts = model_facts(directory, head)["draft_head"]
    assert (facts["kind"], facts["taps"], facts["for_another"]) == ("EAGLE-3", [1, 2, 3], True)
    assert info(str(directory), str(head)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "EAGLE-3 after layers 1, 2, 3; 320 tokens" in said
    assert "for org/Another-8B, another model" in said
    with pytest.warns(UserWarning, match="expected a head for .*, got one for org/Another-8B"):
        with_head(directory, head)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_head(directory, head_for(f"org/{directory.name}"))
