"""A GGUF file into a Hugging Face model directory: config, dequantised safetensors, tokenizer.

Read: the llama, qwen2 and qwen3 architectures in every tensor type that the ``gguf`` package
dequantises. The directory appears whole or not at all.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eecore.config import (
    MOST_HEADS,
    MOST_HIDDEN,
    MOST_INNER,
    MOST_LAYERS,
    MOST_POSITIONS,
    ModelConfig,
    RopeConfig,
)
from eecore.errors import CheckpointError, ModelError, UnsupportedModelError
from eecore.files import appearing
from eecore.models.checkpoint import INDEX, WHOLE, check_tensors
from eecore.models.config_json import FACTORS, THETAS, ConfigFields, model_config
from eecore.models.gguf_file import GGUFFile
from eecore.models.gguf_tokenizer import build_tokenizer, special_token_ids
from eecore.models.load import DTYPES
from eecore.models.rope import frequencies
from eecore.readable import kind_of, path_of, shown_path
from eecore.tensor_files import shown_name

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
BYTES_PER_SHARD = 2 << 30


def convert_gguf(
    file: str | Path, directory: str | Path, dtype: str | torch.dtype = torch.float32
) -> Path:
    """Convert a GGUF file into a new model directory, which is returned.

    Args:
        file: llama, qwen2 or qwen3 architecture.
        directory: must not exist, or be empty.
        dtype: of the written tensors. Only float32 keeps every dequantised value exactly.

    Raises:
        ModelError: the file is missing, not GGUF, truncated or of an unsupported kind, or the
            directory is in use. Nothing is left behind.
    """
    source, target = path_of(file, ModelError), path_of(directory, ModelError)
    stored_as = DTYPES.get(str(dtype).removeprefix("torch."))
    if stored_as is None:
        raise ModelError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype}")
    _check_unused(target)
    gguf_file = GGUFFile(source)
    values = _config_values(gguf_file)
    tensors = _Renamed(gguf_file)
    fields = ConfigFields(values, shown_path(source), CheckpointError)
    config = model_config(fields, ConfigFields({}, shown_path(source), CheckpointError))
    assert isinstance(config, ModelConfig)
    check_tensors(tensors, config)
    with appearing(target) as partial:
        values["dtype"] = str(stored_as).removeprefix("torch.")
        _write_json(partial / "config.json", values)
        ids = {name: value for name, value in values.items() if name.endswith("os_token_id")}
        _write_json(partial / "generation_config.json", ids)
        _write_tokenizer(gguf_file, partial, config.vocab_size)
        _write_tensors(tensors, config, partial, stored_as)
    return target


def _check_unused(target: Path) -> None:
    kind = kind_of(target)
    if kind != "nothing" and (kind != "a directory" or any(target.iterdir())):
        found = "one in use" if kind == "a directory" else kind
        raise ModelError(f"{shown_path(target)}: expected a new or empty directory, got {found}")


class _Renamed:
    """The tensors of a GGUF file under the names that a checkpoint gives them."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.stored_as = {
            _checkpoint_name(file, name): name for name in file.names if name != ROPE_FACTORS
        }

    @property
    def names(self) -> list[str]:
        return list(self.stored_as)

    @property
    def place(self) -> Path:
        return self.file.path

    def path_of(self, name: str) -> Path:  # noqa: ARG002 (of whichever tensor)
        return self.file.path

    def shape(self, name: str) -> tuple[int, ...]:
        return self.file.shape(self.stored_as[name])

    def dtype(self, name: str) -> torch.dtype:  # noqa: ARG002 (all are dequantised)
        return torch.float32

    def tensor(self, name: str, config: ModelConfig) -> Tensor:
        """A tensor with its rows in the order of a checkpoint.

        Llama's Q and K rows are stored for a rotary embedding of neighbouring pairs (2i, 2i+1);
        here pairs are (i, i + head_dim/2).
        """
        tensor = self.file.read(self.stored_as[name])
        num_heads = {"q_proj": config.num_q_heads, "k_proj": config.num_kv_heads}
        part = name.split(".")[-2]
        if self.file.architecture != "llama" or part not in num_heads:
            return tensor
        pairs = tensor.reshape(num_heads[part], config.head_dim // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)


def _config_values(file: GGUFFile) -> dict[str, Any]:
    """The config.json of a GGUF file's metadata."""
    architecture, fields = file.architecture, file.fields
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: general.architecture: supported are {', '.join(ARCHITECTURES)}, "
            f"got {shown_name(architecture)}"
        )
    if fields.integer(f"{architecture}.expert_count", default=0):
        raise UnsupportedModelError(f"{file.path}: expected a dense model, got one of experts")
    if fields.integer(f"{architecture}.attention.sliding_window", default=0):
        raise UnsupportedModelError(f"{file.path}: expected full attention, got a sliding window")
    if "token_embd.weight" not in file.names:
        raise CheckpointError(f"{file.path}: expected tensor token_embd.weight, got none")
    num_heads = fields.integer(f"{architecture}.attention.head_count", 1, MOST_HEADS)
    hidden_size = fields.integer(f"{architecture}.embedding_length", 1, MOST_HIDDEN)
    head_dim = fields.integer(
        f"{architecture}.attention.key_length", default=hidden_size // num_heads
    )
    max_position = fields.integer(f"{architecture}.context_length", 1, MOST_POSITIONS)
    bos, ends = special_token_ids(file)
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer(f"{architecture}.feed_forward_length", 1, MOST_INNER),
        "num_hidden_layers": fields.integer(f"{architecture}.block_count", 1, MOST_LAYERS),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer(
            f"{architecture}.attention.head_count_kv", 1, num_heads, num_heads
        ),
        "head_dim": head_dim,
        "vocab_size": file.shape("token_embd.weight")[0],
        "max_position_embeddings": max_position,
        "rms_norm_eps": _real(file, "attention.layer_norm_rms_epsilon", 0.0, 1.0, 1e-6),
        "tie_word_embeddings": "output.weight" not in file.names,
        "attention_bias": architecture == "llama" and "blk.0.attn_q.bias" in file.names,
        "mlp_bias": "blk.0.ffn_up.bias" in file.names,
        "rope_parameters": _rope_parameters(file, head_dim, max_position),
    }
    if bos is not None:
        config["bos_token_id"] = bos
    if ends:
        config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return config


def _real(file: GGUFFile, name: str, low: float, high: float, default: float) -> float:
    """A float32 value as the decimal number that was meant: 1e-05, not 9.99999975e-06."""
    value = file.fields.number(f"{file.architecture}.{name}", low, high, default)
    return float(f"{value:.7g}")


def _rope_parameters(file: GGUFFile, head_dim: int, max_position: int) -> dict[str, Any]:
    rope = f"{file.architecture}.rope"
    theta = _real(file, "rope.freq_base", *THETAS, 10000.0)
    kind = file.fields.text(f"{rope}.scaling.type", "none")
    rotary_dim = file.fields.integer(f"{rope}.dimension_count", default=head_dim)
    if rotary_dim != head_dim:
        raise UnsupportedModelError(
            f"{file.path}: rope.dimension_count: expected head_dim={head_dim}, got {rotary_dim}"
        )
    if ROPE_FACTORS in file.names:
        return _llama3_rope(file, theta, head_dim)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path}: rope.scaling.type: supported are none, linear, yarn, "
            f"got {shown_name(kind)}"
        )
    factor = _real(file, "rope.scaling.factor", *FACTORS, 1.0)
    scaled = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        scaled["original_max_position_embeddings"] = file.fields.integer(
            f"{rope}.scaling.original_context_length", 1, MOST_POSITIONS, max_position
        )
    return scaled


def _llama3_rope(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The settings behind a file's table of frequency divisors, found by making the table again.

    GGUF keeps only the table; of Llama 3.1's settings all but the factor are the same everywhere.
    """
    if file.shape(ROPE_FACTORS) != (head_dim // 2,):
        raise CheckpointError(
            f"{file.path}: {ROPE_FACTORS}: expected [{head_dim // 2}], got "
            f"{list(file.shape(ROPE_FACTORS))}"
        )
    divisors = file.read(ROPE_FACTORS)
    factor = float(divisors.max())
    if not FACTORS[0] <= factor <= FACTORS[1]:
        raise CheckpointError(
            f"{file.path}: {ROPE_FACTORS}: expected divisors up to {FACTORS[1]:g}, got {factor:g}"
        )
    llama3 = RopeConfig(
        "llama3",
        theta,
        head_dim,
        factor=float(f"{factor:.7g}"),
        original_max_position=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    plain = RopeConfig(theta=theta, rotary_dim=head_dim)
    expected = frequencies(plain) / frequencies(llama3)
    if not torch.allclose(divisors, expected, rtol=1e-3):
        raise UnsupportedModelError(
            f"{file.path}: {ROPE_FACTORS}: expected the divisors of Llama 3.1, got others"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": llama3.factor,
        "low_freq_factor": llama3.low_freq_factor,
        "high_freq_factor": llama3.high_freq_factor,
        "original_max_position_embeddings": llama3.original_max_position,
    }


def _checkpoint_name(file: GGUFFile, name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in TENSOR_NAMES:
        raise UnsupportedModelError(
            f"{file.path}: expected the tensors of a decoder, got {shown_name(name)}"
        )
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{TENSOR_NAMES[match[2]]}.{match[3]}"


def _write_tensors(
    stored: _Renamed, config: ModelConfig, directory: Path, dtype: torch.dtype
) -> None:
    """Shards of bounded size, so that a file larger than memory converts too."""
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name in stored.names:
        num_bytes = math.prod(stored.shape(name)) * dtype.itemsize
        if shards[-1] and shard_bytes + num_bytes > BYTES_PER_SHARD:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += num_bytes
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        path = WHOLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: stored.tensor(name, config).to(dtype).contiguous() for name in names}
        save_file(tensors, directory / path, {"format": "pt"})
        weight_map |= dict.fromkeys(names, path)
    if len(shards) > 1:
        _write_json(directory / INDEX, {"metadata": {}, "weight_map": weight_map})


def _write_tokenizer(file: GGUFFile, directory: Path, vocab_size: int) -> None:
    try:
        tokenizer, settings = build_tokenizer(file, vocab_size)
    except UnsupportedModelError as error:
        warnings.warn(f"{error}; the directory gets no tokenizer", stacklevel=3)
        return
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
