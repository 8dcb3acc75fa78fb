"""Model directories: their contents, and how a bad one is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves

from eecore import ops
from eecore.config import ModelConfig, SamplingParams
from eecore.errors import (
    CheckpointError,
    EecoreError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from eecore.models import LlamaWeights, load_model
from eecore.models.readers.config_json import read_model_config
from eecore.models.readers.load import choose_device, choose_dtype
from eecore.models.rope import cos_sin_table
from eecore.models.weights import NewWeights
from tiny_models import FAMILIES, write_model


def edit_config(directory: Path, **changes: Any) -> None:
    """Change fields of config.json; None takes a field out."""
    path = directory / "config.json"
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: v for name, v in fields.items() if v is not None}))


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


# What is read


def test_shards_hold_the_same_model_as_one_file(tmp_path: Path) -> None:
    one = load_model(write_model(tmp_path / "one"), "cpu")[1].weights
    many = load_model(write_model(tmp_path / "many", num_shards=3), "cpu")[1].weights
    for a, b in zip(tree_leaves(vars(one)), tree_leaves(vars(many)), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_table_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    directory = write_model(tmp_path, family)
    config = read_model_config(directory)
    oracle = LlamaRotaryEmbedding(AutoConfig.from_pretrained(directory))
    positions = torch.arange(config.max_position)
    cos, sin = oracle(torch.zeros(1), positions[None])
    half = config.head_dim // 2
    table = cos_sin_table(config.ropes[0], config.max_position, torch.device("cpu"))
    assert table.shape == (config.max_position, config.head_dim)
    assert torch.equal(table[:, :half], cos[0, :, :half])
    assert torch.equal(table[:, half:], sin[0, :, :half])


@pytest.mark.parametrize(
    ("written", "own"),
    [
        ({}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"": 0, "do_sample": True}, {"temperature": 1.0}),
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"top_k": 20, "min_p": 0.1}, {"top_k": 20, "min_p": 0.1, "temperature": 1.0}),
        ({"do_sample": True, "top_k": -1, "temperature": None}, {"top_k": 0, "temperature": 1.0}),
        ({"do_sample": False, "temperature": 1.0, "top_k": 50}, {"temperature": 0.0}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        (
            {"do_sample": False, "repetition_penalty": 1.2},
            {"repetition_penalty": 1.2, "temperature": 0.0},
        ),
        ({"num_beams": 1, "max_new_tokens": 512, "no_repeat_ngram_size": 0, "_x": 2}, {}),
    ],
)
def test_sampling_settings_of_a_generation_config(
    written: dict[str, Any], own: dict[str, Any], model_dir: Path, recwarn: Any
) -> None:
    (model_dir / "generation_config.json").write_text(json.dumps(written))
    config = read_model_config(model_dir)
    assert dict(config.sampling) == own
    assert not recwarn.list
    sampling = SamplingParams.of(SimpleNamespace(config=config), max_tokens=3)
    assert sampling == SamplingParams(max_tokens=3, **own)
    greedy = SamplingParams.of(SimpleNamespace(config=config), temperature=0.0)
    assert greedy.temperature == 0.0


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"num_beams": 4}, "num_beams: expected no such setting, got 4; it is not used"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size: expected no such setting, got 3"),
        ({"do_sample": False, "top_p": 0.8}, "top_p: expected none without do_sample, got 0.8"),
    ],
)
def test_settings_that_are_not_used_are_named(
    written: dict[str, Any], said: str, model_dir: Path
) -> None:
    (model_dir / "generation_config.json").write_text(json.dumps(written))
    with pytest.warns(UserWarning, match=re.escape(f"generation_config.json: {said}")):
        own = read_model_config(model_dir).sampling
    assert own == ((("temperature", 0.0),) if "do_sample" in written else ())


def test_end_tokens_come_from_the_generation_config_first(model_dir: Path) -> None:
    assert read_model_config(model_dir).eos_token_ids == (257,)
    edit_config(model_dir, eos_token_id=[257, 259])
    assert read_model_config(model_dir).eos_token_ids == (257, 259)
    (model_dir / "generation_config.json").write_text('{"eos_token_id": [259, 258]}')
    assert read_model_config(model_dir).eos_token_ids == (259, 258)
    (model_dir / "generation_config.json").write_text("{}")
    assert read_model_config(model_dir).eos_token_ids == (257, 259)


def test_theta_is_ten_thousand_unless_the_config_says_otherwise(model_dir: Path) -> None:
    path = model_dir / "config.json"
    values = json.loads(path.read_text())
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        values.pop(name, None)
    path.write_text(json.dumps(values))
    assert read_model_config(model_dir).ropes[0].theta == 10000.0  # type: ignore[union-attr]


def test_yarn_reaches_as_far_as_its_factor(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "qwen2_yarn", max_position_embeddings=64)
    assert read_model_config(directory).max_position == 256


def test_parameters_are_counted(tmp_path: Path) -> None:
    for family in FAMILIES:
        directory = write_model(tmp_path / family, family)
        stored = load_file(directory / "model.safetensors").values()
        counted = read_model_config(directory).num_parameters
        assert counted == sum(tensor.numel() for tensor in stored), family


def test_a_head_that_differs_from_the_embeddings_is_not_tied(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "llama_tied")
    head = torch.randn(320, 64)
    edit_tensors(directory, lambda t: t.update({"lm_head.weight": head}))
    config, model, _ = load_model(directory, "cpu")
    assert not config.tie_word_embeddings
    assert torch.equal(model.weights.lm_head.weight, head)
    assert not torch.equal(model.weights.embed_tokens.weight, head)


def test_tensors_of_no_layer_are_noted(model_dir: Path) -> None:
    edit_tensors(model_dir, lambda t: t.update({"vision.weight": torch.zeros(3)}))
    with pytest.warns(UserWarning, match=r"unused: vision.weight"):
        load_model(model_dir, "cpu")


# Device and dtype


@pytest.mark.parametrize(
    ("stored", "capabilities", "expected"),
    [
        (torch.float32, ["portable", "avx512_bf16"], torch.float32),
        (torch.float16, ["portable", "avx512_bf16"], torch.float32),
        (torch.bfloat16, ["portable", "avx512"], torch.float32),
        (torch.bfloat16, ["portable", "avx512_bf16"], torch.bfloat16),
    ],
)
def test_the_cpu_keeps_bfloat16_only_where_it_is_fast(
    stored: torch.dtype,
    capabilities: list[str],
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(ops, "build_info", lambda: {"cpu_capabilities": capabilities})
    config = read_model_config(write_model(tmp_path / "model"))
    assert choose_dtype(None, torch.device("cpu"), stored, config) == expected
    assert choose_dtype(None, torch.device("cuda"), stored, config) == stored
    assert choose_dtype("bfloat16", torch.device("cpu"), stored, config) == torch.bfloat16


def test_unknown_dtypes_and_devices_are_refused(model_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"dtype: expected one of float32, .*, got int8"):
        load_model(model_dir, "cpu", torch.int8)
    with pytest.raises(ModelError, match="device: expected cpu or cuda, got 'tpu9'"):
        choose_device("tpu9")
    with pytest.raises(ModelError, match="device: expected cpu or cuda, got meta"):
        choose_device("meta")


# Refusals


@pytest.fixture
def refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Loading the directory fails with the error and message, before weights are allocated."""
    empty = LlamaWeights.empty

    def no_allocation(config: ModelConfig, new: NewWeights) -> LlamaWeights:
        assert new.device == "meta", "weights were allocated before the checkpoint was checked"
        return empty(config, new)

    def check(error: type[EecoreError], match: str) -> None:
        monkeypatch.setattr(LlamaWeights, "empty", no_allocation)
        with pytest.raises(error, match=match):
            load_model(model_dir, "cpu")

    return check


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"nowhere: expected a model directory .*nothing"):
        load_model(tmp_path / "nowhere")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(CheckpointError, match=r"file: expected a GGUF file .*got b''"):
        load_model(file)
    assert issubclass(ModelNotFoundError, FileNotFoundError)
    assert issubclass(ModelNotFoundError, ValueError)


def test_windows_without_a_size(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "qwen2", layer_types=["sliding_attention"] * 4)
    with pytest.raises(CheckpointError, match="use_sliding_window: expected true for its layers"):
        read_model_config(directory)
    edit_config(directory, layer_types=["chunked_attention"] * 4)
    with pytest.raises(UnsupportedModelError, match="got 'chunked_attention'"):
        read_model_config(directory)
    edit_config(directory, layer_types=["full_attention"])
    with pytest.raises(CheckpointError, match="layer_types: expected a list of 4 kinds"):
        read_model_config(directory)
