"""Heads that draft a block: what they draft, and files that are not for a model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import eecore
from block_heads import (
    BLOCK,
    CUT,
    LAYOUTS,
    MASK,
    BlockOracle,
    config_of,
    tensors_of,
    write_block_head,
)
from devices import engine_of, load
from eecore import EngineConfig, HeadDrafts, ModelError, SamplingParams
from eecore.heads.block import BlockHead
from published_heads import PROMPTS, drafts_of, states_of, write_head, write_target
from tiny_models import write_model

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*expected a head for"),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("model"))


def with_head(directory: Path, head: Path, **settings: Any) -> eecore.Model:
    return load(directory, **{"kv_cache_tokens": 2048, "draft_head": head, **settings})


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
        for tokens, _, ahead in drafts_of(engine):
            if len(ahead.tokens) < head_of(model).num_at_once:
                continue  # a block is cut where the text is to end, or where pages are few
            drafted = oracle.drafts(states_of(model, tokens[:-1]), tokens[-1])
            assert ahead.tokens == drafted.tokens
            assert ahead.probabilities == pytest.approx(drafted.scores, rel=1e-3, abs=1e-5)
            checked += 1
    return checked


DRAFTING: list[tuple[str, dict[str, Any]]] = [
    *((layout, {}) for layout in LAYOUTS),
    ("speculators dspark", {"sample_from_anchor": False}),
]


@pytest.mark.parametrize(("layout", "fields"), DRAFTING)
def test_drafts_are_those_of_the_formula(
    layout: str, fields: dict[str, Any], directory: Path, tmp_path: Path
) -> None:
    model = with_head(directory, write_block_head(tmp_path, layout, **fields))
    head, cut = head_of(model), CUT if layout.startswith("speculators") else 320
    from_last = layout in ("DeepSpec", "speculators dspark")
    from_last = fields.get("sample_from_anchor", from_last)
    assert head.kind == ("DFlash" if layout in ("z-lab", "speculators dflash") else "DSpark")
    assert head.taps == (1, 3)
    assert head.num_at_once == BLOCK - (not from_last)
    assert head.settings.draft_vocab_size == cut
    assert check_drafts(model, PROMPTS[:3], kv_cache_tokens=2048) > 8


def test_an_early_file_of_specforge_is_a_dspark(directory: Path, tmp_path: Path) -> None:
    """The architecture in the file is that of DFlash."""
    early = {"architectures": ["DFlashDraftModel"]}
    model = with_head(directory, write_block_head(tmp_path, "SpecForge DSpark", **early))
    assert head_of(model).kind == "DSpark"
    assert check_drafts(model, PROMPTS[:1], kv_cache_tokens=2048) > 4


def test_keys_of_shared_pages_are_the_same(directory: Path, tmp_path: Path) -> None:
    """A prompt in the prefix cache, and a request that was preempted, draft as before."""
    noisy = with_head(directory, write_block_head(tmp_path))
    prompts = [PROMPTS[4] + [token] for token in (5, 6, 7)]
    settings = {"max_num_seqs": 1, "page_size": 4, "kv_cache_tokens": 400}
    assert check_drafts(noisy, [PROMPTS[4], *prompts], **settings) > 8
    assert check_drafts(noisy, PROMPTS[:4], page_size=4, kv_cache_tokens=120) > 8


def test_logits_of_many_places_are_made_draft_by_draft(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eecore.heads.block_drafts.MAX_ROWS_OF_LOGITS", 8)
    model = with_head(directory, write_head(tmp_path, "dspark", directory, follows=True))
    assert check_drafts(model, PROMPTS[:3], kv_cache_tokens=2048) > 8


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("z-lab", {"hidden_size": 96}, "hidden_size: expected 64, as the model has it, got 96"),
    ("z-lab", {"vocab_size": 100}, "vocab_size: expected 320, as the model has it, got 100"),
    ("z-lab", {"num_target_layers": 9}, "num_target_layers: expected 4, as the model has it"),
    ("DeepSpec", {"target_layer_ids": [1, 4]}, "target_layer_ids: expected a list of integers of"),
    ("DeepSpec", {"target_layer_ids": [1, 1]}, "target_layer_ids: expected numbers of layers"),
    ("DeepSpec", {"mask_token_id": 320}, "mask_token_id: expected an integer of 0..319, got 320"),
    *(
        ("DeepSpec", {"markov_head_type": kind}, f"supported are vanilla, got '{kind}'")
        for kind in ("gated", "rnn")
    ),
    *(
        (layout, fields, f"supported draft heads are EAGLE-3, DFlash, DSpark, .*, got {kind}")
        for layout, fields, kind in (
            ("z-lab", {"architectures": ["DominoDraftModel"]}, "Domino"),
            ("z-lab", {"dflash_config": {"projector_type": "domino"}}, "Domino"),
            ("z-lab", {"architectures": ["PEagleDraftModel"], "draft_vocab_size": 9}, "P-EAGLE"),
            ("speculators dflash", {"speculators_model_type": "peagle"}, "P-EAGLE"),
        )
    ),
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
        refused(f"expected tensor {name}")
    stored(norm_weight=torch.ones(65))
    refused("norm.weight: expected [64] as config.json says, got [65]")
    stored(prefix_gru=torch.ones(2))
    refused("expected the tensors of a DSpark, got prefix_gru, too")
    stored(d2t=torch.full((CUT,), 300))
    refused("d2t: expected tokens of 0..319, got 320 for draft 20")
    stored(d2t=torch.full((CUT,), -1))
    refused("d2t: expected tokens of 0..319, got -1")
    stored(d2t=torch.zeros(CUT))
    refused(f"d2t: expected whole numbers [draft_vocab_size={CUT}], got F32")
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


def test_usual_taps_are_those_of_the_package(tmp_path: Path) -> None:
    """Where a file of z-lab's names none."""
    model = write_model(tmp_path / "model", num_hidden_layers=12)
    own = {"dflash_config": {"mask_token_id": MASK}, "num_target_layers": 12}
    head = write_block_head(tmp_path / "head", "z-lab", **own)
    assert head_of(with_head(model, head)).taps == (2, 10)
