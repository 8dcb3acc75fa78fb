"""A GGUF file as a checkpoint: its config, and its tensors under a checkpoint's names."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eecore import ops
from eecore.config import (
    MOST_HEADS,
    MOST_HIDDEN,
    MOST_INNER,
    MOST_LAYERS,
    MOST_POSITIONS,
    ModelConfig,
    RopeConfig,
)
from eecore.errors import CheckpointError, UnsupportedModelError
from eecore.models.checkpoint import check_tensors
from eecore.models.config_json import FACTORS, THETAS, ConfigFields, model_config
from eecore.models.gguf_file import GGUFFile
from eecore.models.gguf_tokenizer import special_token_ids
from eecore.models.rope import frequencies
from eecore.readable import shown_path
from eecore.tensor_files import shown_name

__all__ = ["TENSOR_NAMES", "GGUFCheckpoint"]

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


class GGUFCheckpoint:
    """The config of a GGUF file, and its tensors under the names that a checkpoint gives them.

    Attributes:
        file: the file.
        values: its config.json.
        config: of the model; the tensors have been held to it.

    Raises:
        ModelError: the file is missing, not GGUF, truncated or of an unsupported kind.
    """

    def __init__(self, path: Path) -> None:
        self.file = GGUFFile(path)
        self.values = _config_values(self.file)
        self.stored_as = {
            _checkpoint_name(self.file, name): name
            for name in self.file.names
            if name != ROPE_FACTORS
        }
        where = shown_path(path)
        fields = ConfigFields(self.values, where, CheckpointError)
        config = model_config(fields, ConfigFields({}, where, CheckpointError))
        assert isinstance(config, ModelConfig)
        self.config = config
        check_tensors(self, config)

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

    def kind(self, name: str) -> str:
        """What a tensor is stored in, "Q4_0" or "F16" for one."""
        return self.file.kind(self.stored_as[name])

    def forms(self, name: str) -> tuple[str, ...]:
        """Its kind, where that is one of blocks."""
        kind = self.kind(name)
        return (kind,) if kind in ops.BLOCK_FORMATS else ()

    def num_bytes(self, name: str) -> int:
        """That a tensor takes in the file."""
        return self.file.num_bytes(self.stored_as[name])

    def tensor(self, name: str) -> Tensor:
        """A tensor in float32, with its rows in the order of a checkpoint."""
        return self._reordered(name, self.file.read(self.stored_as[name]))

    def blocks(self, name: str) -> Tensor:
        """uint8 [num_rows, row_bytes]: a matrix as it is stored, its rows in that order."""
        return self._reordered(name, self.file.blocks(self.stored_as[name]))

    def _reordered(self, name: str, rows: Tensor) -> Tensor:
        """Llama's Q and K rows are stored for a rotary embedding of neighbouring pairs (2i, 2i+1).

        In a checkpoint pairs are (i, i + head_dim/2).
        """
        part = name.split(".")[-2]
        if self.file.architecture != "llama" or part not in self._num_heads:
            return rows
        pairs = rows.reshape(self._num_heads[part], self.config.head_dim // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)

    @cached_property
    def _num_heads(self) -> dict[str, int]:
        return {"q_proj": self.config.num_q_heads, "k_proj": self.config.num_kv_heads}


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
