"""Model directories that claim what they do not hold: refused in little time and memory."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import eecore
from eecore.config import ModelConfig, RopeConfig, T5Config
from eecore.errors import (
    CheckpointError,
    ModelError,
    UnsupportedModelError,
)
from eecore.models import load_model
from eecore.models.readers.config_json import read_model_config
from tiny_models import write_model
from tiny_t5 import write_t5


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
