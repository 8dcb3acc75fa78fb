"""Model directories that claim what they do not hold: refused in little time and memory."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import eecore
from eecore.config import ModelConfig, RopeConfig, T5Config
from eecore.errors import (
    CheckpointError,
    EecoreError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from eecore.models import load_model
from eecore.models.readers.config_json import read_model_config
from eecore.models.rope import RopeTables, cos_sin_table, frequencies
from tiny_models import FAMILIES, write_model
from tiny_t5 import write_t5

CPU = torch.device("cpu")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def edited(directory: Path, **changes: Any) -> Path:
    """The directory, with fields of config.json set to what JSON can say, or to a text as it is."""
    path = directory / "config.json"
    values = json.loads(path.read_text()) | changes
    raw = {name: value for name, value in values.items() if isinstance(value, Raw)}
    text = json.dumps(values | {name: f"raw {name}" for name in raw})
    for name, value in raw.items():
        text = text.replace(f'"raw {name}"', value)
    path.write_text(text)
    return directory


class Raw(str):
    """JSON text that is written as it is."""


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

WRONG_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 10**9}, r"num_hidden_layers: expected an integer of 1\.\.4096, got 100"),
    ({"num_hidden_layers": 4096}, r"expected tensors of num_layers=4096 layers, got 39 tensors"),
    ({"num_hidden_layers": Raw("9" * 5000)}, "expected JSON, got: an integer of 5000 digits"),
    ({"num_hidden_layers": 4.0}, r"num_hidden_layers: expected an integer of .*, got 4\.0"),
    ({"hidden_size": -64}, r"hidden_size: expected .*, got -64"),
    ({"hidden_size": 2**63}, r"hidden_size: expected .*, got 9223372036854775808"),
    ({"hidden_size": 10**200}, r"hidden_size: expected an integer of 1\.\.1048576, got 100"),
    ({"hidden_size": [64]}, r"hidden_size: expected .*, got \[64\]"),
    ({"intermediate_size": 10**9}, "intermediate_size: expected"),
    ({"vocab_size": 1}, "vocab_size: expected"),
    ({"vocab_size": 2**40}, "vocab_size: expected"),
    ({"vocab_size": 2**30}, r"weight: expected \[1073741824, 64\] as config.json says, got \[320"),
    ({"num_attention_heads": 0}, "num_attention_heads: expected"),
    ({"num_key_value_heads": 0}, r"num_key_value_heads: expected an integer of 1\.\.4, got 0"),
    ({"num_key_value_heads": 8}, r"num_key_value_heads: expected an integer of 1\.\.4, got 8"),
    ({"num_key_value_heads": 3}, "num_kv_heads: expected a divisor of num_q_heads=4, got 3"),
    ({"head_dim": 0}, "head_dim: supported are multiples of 8 up to 256, got 0"),
    ({"head_dim": 12}, "head_dim: supported are multiples of 8 up to 256, got 12"),
    ({"head_dim": 512}, "head_dim: supported are multiples of 8 up to 256, got 512"),
    ({"head_dim": 32}, r"q_proj.weight: expected \[128, 64\] as config.json says, got \[256, 64\]"),
    ({"head_dim": None, "hidden_size": 4}, "head_dim: supported are multiples of 8 up to 256, got"),
    ({"max_position_embeddings": 0}, "max_position_embeddings: expected"),
    ({"max_position_embeddings": 2**31}, "max_position_embeddings: expected"),
    ({"rms_norm_eps": -1e-6}, r"rms_norm_eps: expected a number of 0\.\.1, got -1e-06"),
    ({"rms_norm_eps": math.nan}, r"rms_norm_eps: expected a number of 0\.\.1, got nan"),
    ({"rms_norm_eps": Raw("1e999")}, r"rms_norm_eps: expected a number of 0\.\.1, got inf"),
    ({"rms_norm_eps": "1e-6"}, r"rms_norm_eps: expected a number of 0\.\.1, got '1e-6'"),
    ({"rope_theta": 0}, "rope_theta: expected a number of 1"),
    ({"rope_theta": math.inf}, "rope_theta: expected a number of 1.*, got inf"),
    ({"rope_theta": 1, "rope_scaling": YARN}, "rope.theta: expected more than 1 for yarn, got 1"),
    ({"rope_scaling": [YARN]}, "rope_scaling: expected an object, got"),
    ({"rope_scaling": YARN | {"factor": -4}}, "rope_scaling.factor: expected"),
    ({"rope_scaling": YARN | {"original_max_position_embeddings": 2**31 - 1}}, "max_position: exp"),
    ({"rope_scaling": YARN | {"original_max_position_embeddings": 0}}, "original_max_position_em"),
    ({"rope_scaling": YARN | {"beta_slow": 64}}, r"beta_slow: expected at most beta_fast=32.0, go"),
    ({"rope_scaling": YARN | {"beta_fast": -1}}, "beta_fast: expected"),
    ({"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor: expected"),
    ({"rope_scaling": YARN | {"mscale": -10, "mscale_all_dim": -10}}, "mscale: expected"),
    ({"rope_scaling": YARN | {"truncate": "no"}}, "truncate: expected true or false, got 'no'"),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "low_freq_factor: expected less than"),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 0}}, "low_freq_factor: expected"),
    ({"eos_token_id": [257, -1]}, "eos_token_id: expected a list of integers of 0"),
    ({"eos_token_id": 2**63}, "eos_token_id: expected an integer of 0"),
    ({"eos_token_id": [[257]]}, "eos_token_id: expected a list of integers"),
    ({"eos_token_id": [257] * 2000}, "eos_token_id: expected a list of at most 1024 integers"),
    ({"bos_token_id": "<s>"}, "bos_token_id: expected an integer"),
    ({"architectures": "LlamaForCausalLM"}, "architectures: expected a list of strings, got 'Lla"),
    ({"architectures": [["x"]]}, "architectures: expected a list of strings"),
    ({"architectures": ["x" * 10**5]}, r"architectures: supported are .*xxx.*\.\.\."),
    ({"architectures": None, "model_type": 7}, "model_type: expected a string, got 7"),
    ({"hidden_act": 3}, "hidden_act: expected a string, got 3"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, got 1"),
    ({"attention_bias": "yes"}, "attention_bias: expected true or false, got 'yes'"),
    ({"torch_dtype": 16}, "torch_dtype: expected a string, got 16"),
    ({"quantization_config": []}, r"quantization_config: expected an object, got \[\]"),
    ({"x": Raw("[" * 10**5 + "]" * 10**5)}, "expected JSON, got brackets nested too deeply"),
    ({"x": Raw('1, "hidden_size": 64')}, "expected JSON, got: the field 'hidden_size' twice"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG_FIELDS)
def test_a_field_that_cannot_be_is_named(
    changes: dict[str, Any], message: str, model_dir: Path
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_model(edited(model_dir, **changes), "cpu")
    assert str(model_dir) in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 10**9}, r"num_layers: expected an integer of 1\.\.4096"),
        ({"num_layers": 4000}, "expected tensors of num_encoder_layers=4000 layers"),
        ({"num_decoder_layers": 4000}, "expected tensors of num_layers=4000 layers"),
        ({"num_decoder_layers": 0}, "num_decoder_layers: expected"),
        ({"d_model": 0}, "d_model: expected"),
        ({"quantization_config": {"quant_method": "gptq"}}, "T5 models in floats, got 'gptq'"),
        ({"d_ff": -1}, "d_ff: expected"),
        ({"d_kv": 10}, "d_kv: supported are multiples of 8 up to 256, got 10"),
        ({"num_heads": 10**9}, "num_heads: expected"),
        ({"layer_norm_epsilon": -1}, "layer_norm_epsilon: expected"),
        ({"relative_attention_num_buckets": 10**9}, "relative_attention_num_buckets: expected"),
        ({"relative_attention_max_distance": 2**40}, "relative_attention_max_distance: expected"),
        ({"n_positions": -1}, "n_positions: expected"),
        ({"decoder_start_token_id": -1}, "decoder_start_token_id: expected"),
        ({"feed_forward_proj": ["relu"]}, "feed_forward_proj: expected a string"),
        ({"scale_decoder_outputs": 1}, "scale_decoder_outputs: expected true or false"),
        ({"eos_token_id": 1.5}, "eos_token_id: expected an integer"),
    ],
)
def test_a_t5_that_cannot_be(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(edited(write_t5(tmp_path / "t5"), **changes), "cpu")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", r"generation_config.json: expected a JSON object, got \[\]"),
        ('{"eos_token_id": {}}', "generation_config.json: eos_token_id: expected"),
        ('{"eos_token_id": [1e3]}', "generation_config.json: eos_token_id: expected"),
        ('{"bos_token_id": 99999999999}', "generation_config.json: bos_token_id: expected"),
        ("", "generation_config.json: expected JSON"),
        ("{}" + " " * (5 << 20), "generation_config.json: expected at most 4194304 bytes, got 52"),
    ],
)
def test_a_generation_config_that_cannot_be(content: str, message: str, model_dir: Path) -> None:
    (model_dir / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_model(model_dir, "cpu")


# Files that are no files


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"],
)
@pytest.mark.parametrize("kind", ["directory", "pipe", "loop", "device"])
def test_what_is_no_file_is_not_opened(name: str, kind: str, model_dir: Path) -> None:
    path = model_dir / name
    path.unlink(missing_ok=True)
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(name if kind == "loop" else "/dev/zero")
    with pytest.raises(ModelError, match=rf"{name}: expected a file, got an? "):
        load_model(model_dir, "cpu")


@pytest.mark.parametrize(
    "path", ["a" * 300, "a/" * 3000, "no\0where", "\ud800", "~no-such-user/x", ""]
)
def test_paths_that_nothing_can_have(path: str) -> None:
    with pytest.raises(ModelError, match="expected"):
        eecore.load(path)


# Weights


def test_an_index_cannot_lead_out_of_the_directory(model_dir: Path, tmp_path: Path) -> None:
    (model_dir / "model.safetensors").rename(tmp_path / "other.safetensors")
    for shard in (
        "../other.safetensors", str(tmp_path / "other.safetensors"), "..", ".", "", "a\0b",
        "./other.safetensors", "a" * 300,
    ):  # fmt: skip
        index = {"weight_map": {"model.norm.weight": shard}}
        (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelError, match="expected a file"):
            load_model(model_dir, "cpu")


def test_an_index_has_names_of_files_alone(model_dir: Path) -> None:
    for value in (None, 7, ["model.safetensors"], {}):
        index = {"weight_map": {"model.norm.weight": value}}
        (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=r"model.norm.weight: expected a string, got"):
            load_model(model_dir, "cpu")


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "F7"},
        {"dtype": "I64"},
        {"shape": [2**62, 2**62]},
        {"shape": [-1]},
        {"shape": []},
        {"shape": [64.0]},
        {"data_offsets": [0, 256]},
        {"data_offsets": [256, 0]},
        {"data_offsets": [2**63, 2**63 + 256]},
        {"data_offsets": [0]},
    ],
)
def test_a_header_of_safetensors_that_cannot_be(change: dict[str, Any], model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    header, data = header_of(path)
    header["model.norm.weight"] |= change
    packed = json.dumps(header).encode()
    path.write_bytes(len(packed).to_bytes(8, "little") + packed + data)
    with pytest.raises(ModelError, match=r"model.safetensors"):
        load_model(model_dir, "cpu")


def test_a_file_without_tensors(model_dir: Path) -> None:
    save_file({}, model_dir / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected tensors, got none"):
        load_model(model_dir, "cpu")


@pytest.mark.parametrize("size", [0, 7, 2**20, 2**40, 2**63, 2**64 - 1])
def test_a_header_of_a_size_that_cannot_be(size: int, model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    path.write_bytes(size.to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="expected a whole safetensors file"):
        load_model(model_dir, "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_head_of_another_dtype_is_not_tied(dtype: torch.dtype, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", "llama_tied")
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].to(dtype)
    save_file(tensors, directory / "model.safetensors")
    assert not load_model(directory, "cpu")[0].tie_word_embeddings
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"lm_head.weight: supported are F32"):
        load_model(directory, "cpu")


def test_a_t5_whose_copies_of_the_embeddings_differ_in_dtype(tmp_path: Path) -> None:
    directory = write_t5(tmp_path / "t5")
    tensors = load_file(directory / "model.safetensors")
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"].half()
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"encoder.embed_tokens.weight: supported is"):
        load_model(directory, "cpu")


def test_names_of_tensors_are_shown_as_text(model_dir: Path) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    tensors["model.layers.0.\x1b[31m" + "x" * 1000] = torch.zeros(1)
    save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(model_dir, "cpu")
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 1000


# Memory


def test_a_claim_takes_no_memory_before_it_is_believed(model_dir: Path) -> None:
    """The process may have little more memory than it has already."""
    for changes in ({"max_position_embeddings": 10**8}, {"num_hidden_layers": 10**9}):
        edited(model_dir, **changes)
        program = f"""
import resource
import eecore, torch
from eecore.models import load_model
torch.set_num_threads(1)
torch.zeros(1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20),) * 2)
try:
    model = eecore.load({str(model_dir)!r}, device="cpu", kv_cache_tokens=256)
    print(eecore.generate(model, [[1, 2, 3]], max_tokens=4)[0].token_ids)
except eecore.ModelError as error:
    print("refused", error)
"""
        got = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert got.returncode == 0, got.stderr
        assert ("refused" in got.stdout) == ("num_hidden_layers" in changes)


def test_a_large_config_is_not_read(model_dir: Path) -> None:
    path = model_dir / "config.json"
    with path.open("ab") as file:
        file.truncate(1 << 40)  # a hole
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"config.json: expected at most 4194304 bytes"):
        read_model_config(model_dir)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_table_do_not_depend_on_how_long_it_is(family: str, tmp_path: Path) -> None:
    config = read_model_config(write_model(tmp_path, family))
    assert isinstance(config, ModelConfig)
    longest = cos_sin_table(config.ropes[0], 300, CPU)
    assert torch.isfinite(longest).all()
    for count in (1, 2, 3, 7, 64, 255):
        assert torch.equal(cos_sin_table(config.ropes[0], count, CPU), longest[:count]), count


def test_a_table_reaches_as_far_as_a_cache_and_no_further(tmp_path: Path) -> None:
    config = read_model_config(write_model(tmp_path, "llama"))
    assert isinstance(config, ModelConfig)
    far = replace(config, max_position=10**8)
    tables = RopeTables(far, CPU)
    first = tables.reaching(100)
    dim = config.head_dim
    assert first.shape == (1, 128, dim)
    assert tables.reaching(64) is first
    assert tables.reaching(129).shape == (1, 256, dim)
    assert torch.equal(tables.reaching(129)[:, :128], first)
    assert RopeTables(replace(far, max_position=70), CPU).reaching(100).shape == (1, 70, dim)


@pytest.mark.parametrize("policy", [eecore.Full(), eecore.SelfSpeculative(2, num_drafts=16)])
def test_a_request_may_fill_the_whole_cache(policy: eecore.Exit, model_dir: Path) -> None:
    """The last position has a row of the table, and drafts ask for none beyond it."""
    small = eecore.load(model_dir, device="cpu", kv_cache_tokens=64)
    large = eecore.load(model_dir, device="cpu", kv_cache_tokens=512)
    prompt = list(range(3, 43))
    got, expected = (
        eecore.generate(model, [prompt], exit=policy, max_tokens=24, ignore_eos=True)[0].token_ids
        for model in (small, large)
    )
    assert len(got) == 24
    assert got == expected


# Configs that somebody makes


@pytest.mark.parametrize(
    "changes",
    [
        {"theta": 0.0},
        {"theta": math.nan},
        {"theta": "1"},
        {"type": "yarn", "theta": 1.0, "original_max_position": 64},
        {"rotary_dim": 7},
        {"rotary_dim": 2**20},
        {"type": "linear", "factor": 0.5},
        {"type": "llama3", "low_freq_factor": 4.0, "original_max_position": 64},
        {"type": "yarn"},
        {"type": "dynamic"},
        {"attention_factor": math.inf},
    ],
)
def test_a_rotary_embedding_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"^rope\.\w+: expected"):
        RopeConfig(**{"rotary_dim": 64, **changes})


def test_frequencies_are_finite_at_the_edges_of_what_is_allowed() -> None:
    for theta in (1.0 + 1e-6, 1e12):
        for factor in (1.0, 1e6):
            for original in (1, 2**31 - 1):
                for kind in ("default", "linear", "llama3", "yarn"):
                    rope = RopeConfig(kind, theta, 64, factor, original)
                    assert torch.isfinite(frequencies(rope)).all(), rope


def test_configs_are_checked_however_they_are_made(tmp_path: Path) -> None:
    llama = read_model_config(write_model(tmp_path / "llama"))
    t5 = read_model_config(write_t5(tmp_path / "t5"))
    assert isinstance(llama, ModelConfig)
    assert isinstance(t5, T5Config)
    for config, changes in (
        (llama, {"num_layers": 10**9}),
        (llama, {"rms_norm_eps": -1.0}),
        (llama, {"rms_norm_eps": math.nan}),
        (llama, {"layer_windows": (1, 2)}),
        (llama, {"eos_token_ids": (2**63,)}),
        (llama, {"head_dim": "64"}),
        (t5, {"num_layers": 0}),
        (t5, {"max_distance": 2**40}),
        (t5, {"activation": "tanh"}),
    ):
        with pytest.raises(ModelError, match=rf"^{next(iter(changes))}: expected"):
            type(config)(**{**vars(config), **changes})


def test_errors_are_of_one_family() -> None:
    for error in (CheckpointError, ModelNotFoundError, UnsupportedModelError):
        assert issubclass(error, ModelError)
        assert issubclass(error, EecoreError)
