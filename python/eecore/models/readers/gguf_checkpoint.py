"""A GGUF file read as a checkpoint: its config, and its tensors under a checkpoint's names."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eecore import ops
from eecore.config import AnyModelConfig, ModelConfig
from eecore.errors import CheckpointError, UnsupportedModelError
from eecore.files.json_fields import JsonFields
from eecore.files.readable import shown_path
from eecore.files.tensors import shown_name
from eecore.models.readers.checkpoint import StoredTensors, check_tensors
from eecore.models.readers.config_fields import ConfigFields
from eecore.models.readers.config_json import model_config, own_sampling
from eecore.models.readers.gguf_config import (
    ROPE_TENSORS,
    config_values,
    drafting_layers,
    generation_values,
)
from eecore.models.readers.gguf_families import GGUF_FAMILIES
from eecore.models.readers.gguf_file import GGUFFile
from eecore.models.readers.gguf_tokenizer import build_tokenizer
from eecore.models.readers.stored_weights import field_of
from eecore.models.text.tokenizer import Tokenizer
from eecore.models.text.tokenizer_files import chat_settings

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

WHOLE_NAMES = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
"""Names of a layer's tensors that do not end as in a checkpoint."""
TAPS = (".conv.conv.weight", ".linear_attn.conv1d.weight")
"""Ends of names of taps, [num_features, 1, taps] in a checkpoint."""
PROJECTION = "mtp.fc.weight"
"""The matrix of a layer that drafts whose halves are read apart."""
DELTA_OUTPUT = ".linear_attn.out_proj.weight"
FLOATS = {"F32": torch.float32, "F16": torch.float32, "BF16": torch.bfloat16}
"""The dtypes that stored floats run in; float16 runs in float32, which loses nothing."""


class GGUFCheckpoint(StoredTensors):
    """The config of a GGUF file, and its tensors under their names in a checkpoint.

    Args:
        drafts: whether to have the tensors of the first layer that drafts further tokens instead,
            also where the file has no others.

    Attributes:
        file: the file.
        values: the file's metadata as a config.json.
        generation: the file's generation_config.json, without the end tokens.
        config: the model's config, against which the model's tensors have been checked.

    Raises:
        ModelError: the file is missing, not GGUF, truncated or of an unsupported kind.
    """

    own_form = "a GGUF file"

    def __init__(self, path: Path, *, drafts: bool = False) -> None:
        self.file = GGUFFile(path)
        self.values = config_values(self.file)
        drafting = tuple(f"blk.{layer}." for layer in drafting_layers(self.file))
        if drafts:
            self.values["mtp_num_hidden_layers"] = len(drafting)
            names = [name for name in self.file.names if name.startswith(drafting[:1])]
        else:
            others = (*ROPE_TENSORS, *drafting)
            names = [name for name in self.file.names if not name.startswith(others)]
        stored_as = {_checkpoint_name(self.file, name): name for name in names}
        self.stored_as = {_drafting_name(n) if drafts else n: s for n, s in stored_as.items()}
        self.names, self.place = list(self.stored_as), path
        where = shown_path(path)
        fields = ConfigFields(self.values, where, CheckpointError)
        config = model_config(fields, ConfigFields({}, where, CheckpointError))
        assert isinstance(config, ModelConfig)
        self.generation = generation_values(self.file)
        own = own_sampling(ConfigFields(self.generation, where, CheckpointError))
        delta = config.delta
        if delta is not None and delta.num_value_heads > delta.num_key_heads:
            delta = replace(delta, tiled_heads=True)
        self.config = replace(config, sampling=own, delta=delta)
        if not drafts:
            check_tensors(self, self.config)

    @property
    def paths(self) -> list[Path]:
        return self.file.paths

    def path_of(self, name: str) -> Path:
        return self.file.path_of(self.stored_as[name])

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self.file.shape(self.stored_as[name])
        return (shape[0], 1, *shape[1:]) if name.endswith(TAPS) else shape

    def dtype(self, name: str) -> torch.dtype:  # noqa: ARG002 (all tensors are dequantised)
        return torch.float32

    def kind(self, name: str) -> str:
        return self.file.kind(self.stored_as[name])

    def forms(self, name: str) -> tuple[str, ...]:
        """A tensor's kind, if it is a block format whose blocks the tensor's matrices fill."""
        kind = self.kind(name)
        return (kind,) if kind in ops.BLOCK_FORMATS and self._is_whole(name) else ()

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor in the file."""
        return self.file.num_bytes(self.stored_as[name])

    def tensor(self, name: str) -> Tensor:
        """A tensor in float32 as in a checkpoint: rows in its order but for tiled heads, norms
        without the offset."""
        values = self._reordered(name, self.file.read(self.stored_as[name]))
        if name.endswith(TAPS):
            return values[:, None]
        if name.endswith(".A_log"):
            return values.neg().log()
        is_norm = "norm" in name.split(".")[-2] and not name.endswith(".linear_attn.norm.weight")
        return values - self.config.norm_offset if is_norm else values

    def blocks(self, name: str) -> Tensor:
        """uint8 [num_rows, row_bytes]: a matrix as stored, its rows in a checkpoint's order."""
        return self._reordered(name, self.file.blocks(self.stored_as[name]))

    def release(self, name: str) -> None:
        self.file.release(self.stored_as[name])

    def _reordered(self, name: str, rows: Tensor) -> Tensor:
        """Rows in a checkpoint's order: pairs of Q or K rows that rotate are (i, i + head_dim/2).

        Some architectures store them as neighbouring pairs (2i, 2i+1).
        """
        part = name.split(".")[-2]
        interleaved = GGUF_FAMILIES[self.file.architecture].is_interleaved
        if not interleaved or part not in self._num_heads:
            return rows
        # numpy copies on one thread: torch's other threads would go on looking for work after each.
        pairs = rows.numpy().reshape(self._num_heads[part], -1, 2, *rows.shape[1:])
        return torch.from_numpy(pairs.swapaxes(1, 2).reshape(rows.shape))

    def whole_tensor(self, name: str) -> Tensor:
        """A tensor in float32 as in a checkpoint, the value heads of each key head side by side."""
        tensor, delta = self.tensor(name), self.config.delta
        is_of_heads = ".linear_attn." in name and not name.endswith(".norm.weight")
        if delta is None or not (delta.tiled_heads and is_of_heads):
            return tensor
        heads = (delta.num_value_heads // delta.num_key_heads, delta.num_key_heads)
        values = tensor.numpy()
        if name.endswith(DELTA_OUTPUT):
            columns = values.reshape(len(values), *heads, -1)
            return torch.from_numpy(columns.swapaxes(1, 2).reshape(values.shape))
        has_keys = name.endswith((".in_proj_qkv.weight", ".conv1d.weight"))
        keys, values = np.split(values, [2 * delta.key_size if has_keys else 0])
        apart = values.reshape(*heads, -1).swapaxes(0, 1).reshape(values.shape)
        return torch.from_numpy(np.concatenate([keys, apart]))

    def check_kinds(self) -> None:
        """Raise unless every tensor has a type that runs as stored."""
        supported = (*ops.BLOCK_FORMATS, *FLOATS)
        for name, stored in self.stored_as.items():
            if (kind := self.kind(name)) not in supported:
                raise UnsupportedModelError(
                    f"{self.place}: {stored}: supported are {', '.join(supported)}, got {kind} "
                    "(eecore convert may read it)"
                )

    def model_dtype(self, config: AnyModelConfig, device: torch.device) -> torch.dtype:  # noqa: ARG002
        """The dtype of states: bfloat16 if all matrices are bfloat16, or on a GPU also blocks.

        Otherwise float32: for blocks a CPU rounds states of either dtype to 8 bits, while a GPU
        multiplies bfloat16 several times as fast.
        """
        kinds = {self.kind(name) for name in self.names if field_of(name) is not None}
        brief = {"BF16"} if device.type == "cpu" else {"BF16", *ops.BLOCK_FORMATS}
        return torch.bfloat16 if kinds <= brief else torch.float32

    def tokenizer(self, vocab_size: int) -> Tokenizer | None:
        """The file's tokenizer; None, with a warning, if its kind is not read."""
        try:
            backend, settings = build_tokenizer(self.file, vocab_size)
        except UnsupportedModelError as error:
            warnings.warn(f"{error}; the model gets no tokenizer", stacklevel=4)
            return None
        place = str(self.place)
        chat = chat_settings(JsonFields(settings, place, CheckpointError))
        return Tokenizer(backend, chat, place)

    def _is_whole(self, name: str) -> bool:
        """Whether no block lies in both halves of a row, where each half is a matrix."""
        columns = self.file.block_columns(self.stored_as[name])
        return name != PROJECTION or self.shape(name)[-1] // 2 % columns == 0

    @cached_property
    def _num_heads(self) -> dict[str, int]:
        return {"q_proj": self.config.num_q_heads, "k_proj": self.config.num_kv_heads}


def _checkpoint_name(file: GGUFFile, name: str) -> str:
    names = TENSOR_NAMES | dict(GGUF_FAMILIES[file.architecture].tensors)
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?([\w.]+)", name)
    part, _, kind = ("" if match is None else match[2]).rpartition(".")
    if match is None or not (
        match[2] in WHOLE_NAMES or (part in names and kind in ("weight", "bias"))
    ):
        raise UnsupportedModelError(
            f"{file.path}: expected the tensors of a decoder, got {shown_name(name)}"
        )
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return layer + (WHOLE_NAMES.get(match[2]) or f"{names[part]}.{kind}")


def _drafting_name(name: str) -> str:
    """The name in a checkpoint of a tensor of the layer that drafts, by its name in a layer."""
    own = name.split(".", 3)[3]
    return own if own.startswith("mtp.") else f"mtp.layers.0.{own}"
