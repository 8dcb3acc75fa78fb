"""Metadata of GGUF files: read as llama.cpp reads it, or an error or a warning."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eecore.config import RopeConfig
from eecore.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from eecore.models import convert_gguf, load_model, load_tokenizer, model_digest, read_config
from eecore.models.readers.gguf_checkpoint import GGUFCheckpoint
from tiny_gguf import ALPHABET, write_gguf
from tiny_models import FAMILIES, write_model

SMALL = {"num_hidden_layers": 1}
MESSAGES = [{"role": "user", "content": "hi"}]


def gguf_file(folder: Path, family: str = "llama", **metadata: Any) -> Path:
    """A model of one layer, with fields of its architecture by short names."""
    original = write_model(folder / "original", family, **SMALL)
    kind = FAMILIES[family]["model_type"]
    fields = {
        name if name.startswith(("tokenizer.", "general.")) else f"{kind}.{name}": value
        for name, value in metadata.items()
    }
    return write_gguf(folder / "tiny.gguf", original, architecture=kind, metadata=fields)


def rope_of(folder: Path, family: str = "llama", **fields: Any) -> RopeConfig:
    """The rotary embedding of a file, which must be that of the directory it converts to."""
    file = gguf_file(folder, family, **{f"rope.{name}": value for name, value in fields.items()})
    rope = GGUFCheckpoint(file).config.ropes[0]
    assert read_config(convert_gguf(file, folder / "converted")).ropes == (rope,)
    return rope


YARN = {
    "scaling.type": "yarn",
    "scaling.factor": 4.0,
    "scaling.original_context_length": 64,
}
LOG = 0.1 * math.log(4) + 1


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({}, {}),
        ({"attn_factor": 0.5}, {"attention_factor": 0.5 * LOG}),
        ({"yarn_attn_factor": LOG}, {}),
        ({"yarn_attn_factor": 1.3}, {"attention_factor": 1.3}),
        ({"attn_factor": 0.5, "yarn_attn_factor": 1.3}, {"attention_factor": 0.65}),
        ({"yarn_beta_fast": 16.0}, {"beta_fast": 16.0}),
        ({"yarn_beta_slow": 2.0}, {"beta_slow": 2.0}),
        ({"yarn_log_multiplier": 1.0}, {"attention_factor": 1.0}),
        ({"yarn_ext_factor": 0.5, "finetuned": True}, {}),
    ],
)
def test_factors_of_yarn(
    family: str, fields: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    scaling = {f"scaling.{name}": value for name, value in fields.items()}
    got = rope_of(tmp_path, family, **YARN, **scaling)
    usual = RopeConfig(
        "yarn", rotary_dim=64, factor=4.0, original_max_position=64, attention_factor=LOG
    )
    wanted = replace(usual, **changes)
    assert replace(got, attention_factor=1.0) == replace(wanted, attention_factor=1.0)
    assert got.attention_factor == pytest.approx(wanted.attention_factor)


LINEAR = RopeConfig("linear", rotary_dim=64, factor=4.0)
PLAIN = RopeConfig(rotary_dim=64)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"scaling.factor": 4.0}, LINEAR),
        ({"scaling.factor": 4.0, "scaling.yarn_ext_factor": 1.0}, LINEAR),
        ({"scale_linear": 4.0}, LINEAR),
        ({"scale_linear": 4.0, "scaling.factor": 4.0, "scaling.type": "linear"}, LINEAR),
        ({"scale_linear": 1.0}, PLAIN),
        ({"scaling.factor": 0.0, "scaling.alpha": 0.0}, PLAIN),
        ({"scaling.type": "none", "scaling.factor": 4.0}, PLAIN),
    ],
)
def test_linear_scaling(fields: dict[str, Any], wanted: RopeConfig, tmp_path: Path) -> None:
    assert rope_of(tmp_path, **fields) == wanted


def test_a_table_of_divisors_goes_with_no_other_scaling(tmp_path: Path) -> None:
    divisors = {"rope_freqs.weight": torch.ones(32).numpy()}
    original = write_model(tmp_path / "o", **SMALL)
    metadata = {"llama.rope.scaling.factor": 4.0}
    file = write_gguf(tmp_path / "t.gguf", original, extra=divisors, metadata=metadata)
    with pytest.raises(
        UnsupportedModelError, match=r"scaling.factor: supported is 1 beside rope_fr"
    ):
        GGUFCheckpoint(file)


def test_fields_that_are_switched_off_are_no_fields(tmp_path: Path) -> None:
    off = {"logit_scale": 0.0, "expert_count": 0, "use_parallel_residual": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = gguf_file(tmp_path, **off, **{"tokenizer.ggml.add_sep_token": False})
        assert load_tokenizer(file, 320) is not None


def test_a_field_of_the_tokenizer_that_is_not_read_is_named(tmp_path: Path) -> None:
    file = gguf_file(tmp_path, **{"tokenizer.ggml.suppress_tokens": [5]})
    with pytest.warns(UserWarning, match=r"ggml.suppress_tokens: expected a field that is read"):
        load_tokenizer(file, 320)


@pytest.mark.parametrize(
    ("names", "kind", "given", "ends"),
    [
        (["<|eot_id|>", "<|eom_id|>"], 3, {}, (257, 258, 259)),
        (["<end_of_turn>", "other"], 3, {}, (257, 258)),
        (["<|end|>", "<|endoftext|>"], 4, {}, (257, 258, 259)),
        (["<|eot_id|>", "<|im_end|>"], 1, {}, (257, 258, 259)),
        (["<｜end▁of▁sentence｜>", "other"], 1, {}, (257, 258)),
        (["<|file_sep|>", "<|fim_prefix|>"], 1, {}, (257, 258)),
        (["<|end|>", "<|return|>", "<|call|>"], 3, {}, (257, 259, 260)),
        (["<|tool_response>", "<turn|>"], 4, {}, (258, 259)),  # then </s> is a word
        (["<a>", "<b>"], 3, {"eot_token_id": 258, "eom_token_id": 259}, (257, 258, 259)),
    ],
)
def test_tokens_that_end_a_turn(
    names: list[str], kind: int, given: dict[str, int], ends: tuple[int, ...], tmp_path: Path
) -> None:
    tokens = [*ALPHABET[:254], "ll", "he", "<s>", "</s>", *names]
    fields = {"tokens": tokens, "token_type": [1] * 256 + [3, 3] + [kind] * len(names)}
    fields |= {"eos_token_id": 257, "eot_token_id": 257, **given}
    file = gguf_file(tmp_path, **{f"tokenizer.ggml.{name}": v for name, v in fields.items()})
    assert GGUFCheckpoint(file).config.eos_token_ids == ends
    tokenizer = load_tokenizer(file, 320)
    assert tokenizer is not None
    for token in {tokens[end] for end in ends} - {"</s>"}:
        assert tokenizer.encode(token, add_special_tokens=False) == [tokens.index(token)]
        assert tokenizer.decode([tokens.index(token)]) == ""
    assert read_config(convert_gguf(file, tmp_path / "out")).eos_token_ids == ends


def test_templates_have_names(tmp_path: Path) -> None:
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    listed = {"tokenizer.chat_templates": ["tool_use"]}
    file = gguf_file(tmp_path, **templates, **listed)
    converted = convert_gguf(file, tmp_path / "out")
    for place in (file, converted):
        tokenizer = load_tokenizer(place, 320)
        assert tokenizer is not None
        assert tokenizer.apply_chat_template(MESSAGES) == "plain"
        assert tokenizer.apply_chat_template(MESSAGES, tools=[{}]) == "tools"
    lone = gguf_file(tmp_path / "lone", **listed)
    with pytest.raises(
        CheckpointError, match=r"chat_templates: expected a field tokenizer.chat_te"
    ):
        load_tokenizer(lone, 320)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"rms_norm_eps": 3e-5, "max_position_embeddings": 77, "intermediate_size": 160}),
        ("llama", {"head_dim": 32, "num_key_value_heads": 1, "vocab_size": 300}),
        ("llama", {"rope_theta": 123456.0, "hidden_size": 96}),
        ("llama_tied", {}),
        ("llama_biased", {}),
        ("llama_linear_rope", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen2_yarn", {}),
        ("qwen3", {"tie_word_embeddings": False}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_a_file_is_the_model_of_its_directory(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    directory = write_model(tmp_path / "original", family, **{**SMALL, **overrides})
    kind = FAMILIES[family]["model_type"]
    scaling = FAMILIES[family].get("rope_scaling") or {}
    names = {"original_max_position_embeddings": "original_context_length"}
    metadata = {f"{kind}.rope.scaling.{names.get(n, n)}": value for n, value in scaling.items()}
    file = write_gguf(tmp_path / "t.gguf", directory, architecture=kind, metadata=metadata)
    expected, got = read_config(directory), GGUFCheckpoint(file).config
    ends = (257, 259)  # the file names what ends a turn
    assert got == replace(expected, dtype=None, eos_token_ids=ends)
    assert read_config(convert_gguf(file, tmp_path / "out")) == replace(got, dtype="float32")


# Models in several files


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """The first of several parts."""
    original = write_model(tmp_path / "original", **SMALL)
    return write_gguf(tmp_path / "tiny.gguf", original, tensors_per_part=5)


def parts_of(first: Path) -> list[Path]:
    return sorted(first.parent.glob("tiny-*.gguf"))


def test_a_model_in_several_files(split: Path, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tmp_path / "original")
    assert len(parts_of(split)) == 3
    config, model, tokenizer = load_model(split, "cpu")
    expected = load_model(whole, "cpu")
    assert config == expected[0]
    assert tokenizer is not None
    for name in ("qkv", "down", "embed_tokens", "lm_head"):
        got, wanted = (getattr(each.weights, name).weight for each in (model, expected[1]))
        assert torch.equal(got, wanted), name
    digest = model_digest(split)
    last = parts_of(split)[-1]
    last.write_bytes(last.read_bytes()[:-1] + b"\1")
    assert model_digest(split) != digest


def test_any_but_the_first_of_several_files_is_refused(split: Path) -> None:
    message = r"split.no: expected the first of 3 files, tiny-00001-of-00003.gguf, got number 2"
    with pytest.raises(CheckpointError, match=message):
        load_model(parts_of(split)[1], "cpu")


def test_a_part_that_is_missing_or_another_is_named(split: Path, tmp_path: Path) -> None:
    first, second, third = parts_of(split)
    kept = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(CheckpointError, match=r"00002-of-00003.gguf: split.no: expected an integ"):
        load_model(first, "cpu")
    second.write_bytes(kept[:-64])
    with pytest.raises(CheckpointError, match=r"00002-of-00003.gguf: expected a whole GGUF file"):
        load_model(first, "cpu")
    second.unlink()
    with pytest.raises(ModelNotFoundError, match=r"00002-of-00003.gguf: expected a GGUF file, got"):
        load_model(first, "cpu")
    renamed = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"split.count: expected a name NAME-00001-of-00003"):
        load_model(renamed, "cpu")


def test_sampling_settings_of_a_file(tmp_path: Path) -> None:
    names = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1}
    file = gguf_file(tmp_path, **{f"general.sampling.{n}": value for n, value in names.items()})
    own = dict(read_config(file).sampling)
    assert own == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    }
    assert dict(read_config(convert_gguf(file, tmp_path / "converted")).sampling) == own


def test_sampling_settings_of_a_file_that_are_not_used(tmp_path: Path) -> None:
    file = gguf_file(tmp_path, **{"general.sampling.mirostat": 2, "general.sampling.temp": -1.0})
    with pytest.warns(UserWarning, match=r"general\.sampling\.mirostat: expected no such setting"):
        config = read_config(file)
    assert dict(config.sampling) == {"temperature": 0.0}


def test_a_sampling_setting_of_a_file_that_cannot_be(tmp_path: Path) -> None:
    file = gguf_file(tmp_path, **{"general.sampling.top_p": 3.0})
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: top_p: expected"):
        read_config(file)
