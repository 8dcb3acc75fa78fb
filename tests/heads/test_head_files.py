"""Heads whose files are not whole, not read, or of another model: each is refused by a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from block_heads import CUT, write_block_head
from devices import load
from eagle_heads import Layout, write_eagle
from eecore import ModelError
from mtp_heads import LAYER, write_mimo, write_qwen3_5
from published_heads import write_target
from tiny_models import write_model

EAGLE, MTP, QWEN = "eagle", "mtp", "qwen3_5"
"""Files in one layout; those of heads that draft a block are named by theirs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the models that heads are for: ``model``, ``mimo`` and ``qwen3_5``."""
    folder = tmp_path_factory.mktemp("models")
    write_target(folder / "model")
    write_mimo(folder / "mimo")
    write_qwen3_5(folder / QWEN)
    return folder


@pytest.fixture
def write(folder: Path, tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    def write(layout: str) -> tuple[Path, Path]:
        """Write a head; its model, and its directory."""
        head = tmp_path / "head"
        if layout == MTP:
            return folder / "mimo", write_mimo(head)
        if layout == QWEN:
            return folder / QWEN, write_qwen3_5(head)
        if layout == EAGLE:
            target = json.loads((folder / "model" / "config.json").read_text())
            return folder / "model", write_eagle(head, target, Layout(vocabulary_size=200))
        return folder / "model", write_block_head(head, layout)

    return write


READ = "supported draft heads are EAGLE-3, DFlash, DSpark, .*, got"
SLIDES = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}
FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (EAGLE, {"target_hidden_size": 32}, "target_hidden_size: expected 64, as the model has it"),
    (EAGLE, {"vocab_size": 321}, "vocab_size: expected 320, as the model has it, got 321"),
    (EAGLE, {"num_hidden_layers": 2}, "num_hidden_layers: supported are 1, a head of one layer"),
    (EAGLE, {"draft_vocab_size": 199}, r"lm_head.weight: expected \[199, 64\] as .*, got \[200"),
    (
        EAGLE,
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}},
        "eagle_aux_hidden_state_layer_ids: expected a list of integers of 0..3",
    ),
    (EAGLE, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: supported"),
    (EAGLE, {"eagle_config": None}, "eagle_aux_hidden_state_layer_ids: expected layers of the 4"),
    (EAGLE, {"fc_norm": True}, "expected tensor fc_norm.0.weight, got none"),
    (EAGLE, {"fc_norm": True, "norm_before_fc": True}, "norm_before_fc: expected false beside"),
    (EAGLE, {"model_type": "mamba"}, "model_type: supported are llama, qwen3, got 'mamba'"),
    (EAGLE, {"intermediate_size": 97}, r"mlp.gate_proj.weight: expected \[97, 64\]"),
    (EAGLE, {"speculators_model_type": "medusa"}, "supported are eagle3, .*, got 'medusa'"),
    ("z-lab", {"hidden_size": 96}, "hidden_size: expected 64, as the model has it, got 96"),
    ("z-lab", {"vocab_size": 100}, "vocab_size: expected 320, as the model has it, got 100"),
    ("z-lab", {"num_target_layers": 9}, "num_target_layers: expected 4, as the model has it"),
    ("DeepSpec", {"target_layer_ids": [1, 4]}, "target_layer_ids: expected a list of integers of"),
    ("DeepSpec", {"target_layer_ids": [1, 1]}, "target_layer_ids: expected numbers of layers"),
    ("DeepSpec", {"mask_token_id": 320}, "mask_token_id: expected an integer of 0..319, got 320"),
    ("DeepSpec", {"markov_head_type": "gated"}, "supported are vanilla, got 'gated'"),
    ("z-lab", {"architectures": ["DominoDraftModel"]}, f"{READ} Domino"),
    ("z-lab", {"dflash_config": {"projector_type": "domino"}}, f"{READ} Domino"),
    ("z-lab", {"architectures": ["PEagleDraftModel"], "draft_vocab_size": 9}, f"{READ} P-EAGLE"),
    ("speculators dflash", {"speculators_model_type": "peagle"}, f"{READ} P-EAGLE"),
    ("DeepSpec", {"markov_rank": 8}, r"markov_w1.weight: expected \[320, 8\] as config.json says"),
    ("DeepSpec", {"block_size": 1}, "block_size: expected an integer of 2..64, got 1"),
    ("DeepSpec", {**SLIDES, "sliding_window": 8}, "layer_types: supported are full_attention"),
    ("speculators dflash", {"aux_hidden_state_layer_ids": [1, 5]}, "expected a list of integers"),
    ("speculators dflash", {"draft_vocab_size": 999}, "draft_vocab_size: expected an integer of"),
    (
        "speculators dflash",
        {"transformer_layer_config": None},
        "transformer_layer_config: expected",
    ),
    (MTP, {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers: expected a layer"),
    (MTP, {"num_hidden_layers": 5}, "num_hidden_layers: expected 4, as the model has it, got 5"),
    (QWEN, {"mtp_num_hidden_layers": None}, "mtp_num_hidden_layers: expected a layer that drafts"),
    (QWEN, {"vocab_size": 321}, "vocab_size: expected 320, as the model has it, got 321"),
    (MTP, {"hidden_size": 96}, "hidden_size: expected 64, as the model has it, got 96"),
]


@pytest.mark.parametrize(("layout", "fields", "message"), FIELDS)
def test_a_config_of_another_head_is_refused(
    layout: str, fields: dict[str, Any], message: str, write: Any
) -> None:
    model, head = write(layout)
    file = head / "config.json"
    content = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({n: value for n, value in content.items() if value is not None}))
    with pytest.raises(ModelError, match=message):
        load(model, draft_head=head)


SPARK = "speculators dspark"
TENSORS: list[tuple[str, str, torch.Tensor | None, str]] = [
    (EAGLE, "d2t", torch.full((200,), 121), "d2t: expected tokens of 0..319, got 320 for draft"),
    (EAGLE, "d2t", torch.full((200,), -1), "d2t: expected tokens of 0..319, got -1 for draft 0"),
    (EAGLE, "d2t", torch.zeros(199).long(), r"d2t: expected whole numbers \[draft_vocab_size=200"),
    (EAGLE, "d2t", torch.zeros(200), "d2t: expected whole numbers .*, got F32"),
    (EAGLE, "d2t", None, "expected tensor d2t, the model's token of each of 200 drafts, got none"),
    (EAGLE, "midlayer.mlp.up_proj.weight", None, "expected tensor midlayer.mlp.up_proj.weight"),
    (EAGLE, "norm.weight", torch.ones(63), r"norm.weight: expected \[64\] .*, got \[63\]"),
    (EAGLE, "fc.weight", torch.zeros(64, 192).int(), "fc.weight: supported are F32, BF16, F16"),
    (EAGLE, "midlayer.self_attn.q_norm.weight", torch.ones(64), "expected no tensor midlayer.self"),
    (EAGLE, "layers.1.norm.weight", torch.ones(64), "expected no tensor layers.1.norm.weight"),
    (EAGLE, "embed_tokens.weight", torch.ones(9, 64), r"embed_tokens.weight: expected \[320, 64"),
    (SPARK, "fc.weight", None, "expected tensor fc.weight"),
    (SPARK, "layers.1.mlp.up_proj.weight", None, "expected tensor layers.1.mlp.up_proj.weight"),
    (SPARK, "d2t", None, "expected tensor d2t"),
    (SPARK, "d2t", torch.full((CUT,), 300), "d2t: expected tokens of 0..319, got 320 for draft 20"),
    (SPARK, "lm_head.weight", None, "expected tensor lm_head.weight"),
    (SPARK, "norm.weight", torch.ones(65), r"expected \[64\] as config.json says, got \[65\]"),
    (SPARK, "prefix_gru", torch.ones(2), "expected the tensors of a DSpark, got prefix_gru, too"),
    (QWEN, "mtp.fc.weight", None, "expected tensor mtp.fc.weight"),
    (QWEN, "mtp.norm.weight", torch.ones(63), r"mtp.norm.weight: expected \[64\] .*, got \[63\]"),
    (
        QWEN,
        "mtp.layers.0.self_attn.q_proj.weight",
        torch.ones(128, 64),
        r"q_proj.weight: expected \[256, 64\] .*, got \[128, 64\]",
    ),
    (MTP, f"{LAYER}input_proj.weight", None, f"expected tensor {LAYER}input_proj.weight"),
]


@pytest.mark.parametrize(("layout", "name", "tensor", "message"), TENSORS)
def test_tensors_of_another_head_are_refused(
    layout: str, name: str, tensor: torch.Tensor | None, message: str, write: Any
) -> None:
    model, head = write(layout)
    file = head / "model.safetensors"
    tensors = {n: t.clone() for n, t in load_file(file).items() if n != name}
    save_file(tensors if tensor is None else {**tensors, name: tensor}, file)
    with pytest.raises(ModelError, match=message):
        load(model, draft_head=head)


@pytest.mark.parametrize("layout", [EAGLE, "speculators dspark", MTP])
def test_half_a_file_a_pickle_and_nothing_are_refused(
    layout: str, write: Any, tmp_path: Path
) -> None:
    model, head = write(layout)
    file = head / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="expected a whole safetensors file"):
        load(model, draft_head=head)
    with pytest.raises(ModelError, match="exits: expected None beside draft_head"):
        load(model, draft_head=head, exits=head)
    file.rename(head / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"got pytorch_model.bin, a pickle.*RedHatAI/"):
        load(model, draft_head=head)
    if layout != MTP:
        with pytest.raises(ModelError, match="expected the config of a draft head"):
            load(model, draft_head=model)
    with pytest.raises(ModelError, match=r"expected the directory of a draft head .*got nothing"):
        load(model, draft_head=tmp_path / "nothing")


def test_the_layer_of_another_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    llama = write_model(tmp_path / "llama")
    with pytest.raises(ModelError, match="architectures: expected that of the model, LlamaFor"):
        load(llama, draft_head=folder / "mimo")
    for one, other in (("mimo", QWEN), (QWEN, "mimo")):
        with pytest.raises(ModelError, match="architectures: expected that of the model, "):
            load(folder / one, draft_head=folder / other)
    other = write_model(tmp_path / "other", "qwen2", vocab_size=300, bos_token_id=1, eos_token_id=2)
    with pytest.raises(ModelError, match="vocab_size: expected 300, as the model has it, got 320"):
        load(other, draft_head=folder / "mimo")
