"""A GGUF file as a checkpoint: its config, and its tensors under a checkpoint's names."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from eecore import ops
from eecore.config import AnyModelConfig, ModelConfig
from eecore.errors import CheckpointError, UnsupportedModelError
from eecore.json_fields import JsonFields
from eecore.models.readers.checkpoint import StoredTensors, check_tensors
from eecore.models.readers.config_fields import ConfigFields
from eecore.models.readers.config_json import model_config, own_sampling
from eecore.models.readers.gguf_config import (
    ROPE_TENSORS,
    config_values,
    generation_values,
)
from eecore.models.readers.gguf_families import GGUF_FAMILIES
from eecore.models.readers.gguf_file import GGUFFile
from eecore.models.readers.gguf_tokenizer import build_tokenizer
from eecore.models.readers.stored_weights import field_of
from eecore.models.text.tokenizer import Tokenizer
from eecore.models.text.tokenizer_files import chat_settings
from eecore.readable import shown_path
from eecore.tensor_files import shown_name

__all__ = ["TENSOR_NAMES", "GGUFCheckpoint"]

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

FLOATS = {"F32": torch.float32, "F16": torch.float32, "BF16": torch.bfloat16}
"""What stored floats run as: float16's only in float32 is nothing lost."""


class GGUFCheckpoint(StoredTensors):
    """The config of a GGUF file, and its tensors under the names that a checkpoint gives them.

    Attributes:
        file: the file.
        values: its config.json.
        generation: its generation_config.json, but for the end tokens.
        config: of the model; the tensors have been held to it.

    Raises:
        ModelError: the file is missing, not GGUF, truncated or of an unsupported kind.
    """

    own_form = "a GGUF file"

    def __init__(self, path: Path) -> None:
        self.file = GGUFFile(path)
        self.values = config_values(self.file)
        self.stored_as = {
            _checkpoint_name(self.file, name): name
            for name in self.file.names
            if name not in ROPE_TENSORS
        }
        self.names, self.place = list(self.stored_as), path
        where = shown_path(path)
        fields = ConfigFields(self.values, where, CheckpointError)
        config = model_config(fields, ConfigFields({}, where, CheckpointError))
        assert isinstance(config, ModelConfig)
        self.generation = generation_values(self.file)
        own = own_sampling(ConfigFields(self.generation, where, CheckpointError))
        self.config = replace(config, sampling=own)
        check_tensors(self, self.config)

    @property
    def paths(self) -> list[Path]:
        return self.file.paths

    def path_of(self, name: str) -> Path:
        return self.file.path_of(self.stored_as[name])

    def shape(self, name: str) -> tuple[int, ...]:
        return self.file.shape(self.stored_as[name])

    def dtype(self, name: str) -> torch.dtype:  # noqa: ARG002 (all are dequantised)
        return torch.float32

    def kind(self, name: str) -> str:
        return self.file.kind(self.stored_as[name])

    def forms(self, name: str) -> tuple[str, ...]:
        """The kind of a tensor, where it is one of blocks."""
        kind = self.kind(name)
        return (kind,) if kind in ops.BLOCK_FORMATS else ()

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor in the file."""
        return self.file.num_bytes(self.stored_as[name])

    def tensor(self, name: str) -> Tensor:
        """A tensor in float32 as a checkpoint has it: rows in its order, norms without offset."""
        values = self._reordered(name, self.file.read(self.stored_as[name]))
        offset = GGUF_FAMILIES[self.file.architecture].norm_offset
        return values - offset if offset and values.ndim == 1 else values

    def blocks(self, name: str) -> Tensor:
        """uint8 [num_rows, row_bytes]: a matrix as it is stored, its rows in that order."""
        return self._reordered(name, self.file.blocks(self.stored_as[name]))

    def release(self, name: str) -> None:
        self.file.release(self.stored_as[name])

    def _reordered(self, name: str, rows: Tensor) -> Tensor:
        """Q and K rows of some are stored for a rotary embedding of neighbouring pairs (2i, 2i+1).

        In a checkpoint pairs are (i, i + head_dim/2).
        """
        part = name.split(".")[-2]
        interleaved = GGUF_FAMILIES[self.file.architecture].is_interleaved
        if not interleaved or part not in self._num_heads:
            return rows
        pairs = rows.reshape(self._num_heads[part], self.config.head_dim // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)

    def check_kinds(self) -> None:
        """Raise unless every tensor is of a type that runs as it is."""
        supported = (*ops.BLOCK_FORMATS, *FLOATS)
        for name, stored in self.stored_as.items():
            if (kind := self.kind(name)) not in supported:
                raise UnsupportedModelError(
                    f"{self.place}: {stored}: supported are {', '.join(supported)}, got {kind} "
                    "(eecore convert may read it)"
                )

    def model_dtype(self, config: AnyModelConfig, device: torch.device) -> torch.dtype:  # noqa: ARG002
        """What the states run in: bfloat16 where the matrices are that, on a GPU blocks too.

        Else float32: a CPU multiplies blocks with 8 bits of either, a GPU bfloat16 several times as
        fast.
        """
        kinds = {self.kind(name) for name in self.names if field_of(name) is not None}
        brief = {"BF16"} if device.type == "cpu" else {"BF16", *ops.BLOCK_FORMATS}
        return torch.bfloat16 if kinds <= brief else torch.float32

    def tokenizer(self, vocab_size: int) -> Tokenizer | None:
        """The file's own; None, with a warning, where it is of a kind that is not read."""
        try:
            backend, settings = build_tokenizer(self.file, vocab_size)
        except UnsupportedModelError as error:
            warnings.warn(f"{error}; the model gets no tokenizer", stacklevel=4)
            return None
        place = str(self.place)
        chat = chat_settings(JsonFields(settings, place, CheckpointError))
        return Tokenizer(backend, chat, place)

    @cached_property
    def _num_heads(self) -> dict[str, int]:
        return {"q_proj": self.config.num_q_heads, "k_proj": self.config.num_kv_heads}


def _checkpoint_name(file: GGUFFile, name: str) -> str:
    names = TENSOR_NAMES | dict(GGUF_FAMILIES[file.architecture].tensors)
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in names:
        raise UnsupportedModelError(
            f"{file.path}: expected the tensors of a decoder, got {shown_name(name)}"
        )
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{names[match[2]]}.{match[3]}"
