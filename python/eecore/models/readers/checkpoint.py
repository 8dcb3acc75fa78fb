"""Checkpoints of safetensors files, sharded or not, read tensor by tensor into stacked weights.

Names and shapes are checked against the config before memory is allocated. Nothing is unpickled.
"""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from eecore.config import AnyModelConfig, T5Config
from eecore.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from eecore.files.json_fields import JsonFields
from eecore.files.readable import kind_of
from eecore.files.tensors import TensorFile, shown_name
from eecore.models.llama import EMBEDDINGS, HEAD, LlamaWeights, final_norm_name
from eecore.models.t5_weights import T5Weights
from eecore.models.text.tokenizer import Tokenizer
from eecore.models.weights import NewWeights, WeightView
from eecore.values import shown

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
OTHER_WEIGHTS = re.compile(
    r"model(\.safetensors)?-\d+-of-\d+\.safetensors|consolidated.*\.safetensors"
)
"""Names of weights that are not used: shards missing from the index, and Mistral's own format."""
MAX_INDEX_BYTES = 32 << 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INT8 = "int8"
"""The form of a matrix of int8 with a float32 scale for each row."""
FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
T5_NORM = "decoder.final_layer_norm.weight"
T5_EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# Tensors that are not read: they are computed here, or also stored under another name.
DERIVED = (
    *T5_EMBEDDINGS,  # stored under several names
    ".rotary_emb.inv_freq",
    ".masked_bias",
    ".attention.bias",
    ".EncDecAttention.relative_attention_bias.weight",  # of the first T5; never used
)

TEXT_PARTS = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""Prefixes of names in the text part of a multimodal model, and the prefixes of a text model."""
DRAFTING = ("model.mtp_layers.", "mtp.")
"""Prefixes of tensors that draft the tokens after the next one."""
OTHER_PARTS = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.visual.",
    *DRAFTING,
)
"""Prefixes of tensors that generating text does not need."""

Config = TypeVar("Config", bound=AnyModelConfig)


class StoredTensors(ABC):
    """The tensors of a model by their names in a checkpoint, in files or in memory."""

    names: list[str]
    """The names of all tensors."""
    place: Path
    """The file or directory."""
    own_form: str = ""
    """What stores weights in fewer bits, such as ``a GGUF file``; empty: weights are floats."""

    def path_of(self, name: str) -> Path:  # noqa: ARG002
        """The file that a tensor is in."""
        return self.place

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """The dtype that a tensor is read as; an UnsupportedModelError if it cannot be read."""

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, in floats."""

    @property
    def paths(self) -> list[Path]:
        """All files."""
        return sorted({self.path_of(name) for name in self.names})

    def kind(self, name: str) -> str:
        """How a tensor is stored: "float16", "Q4_0", "gptq int4", ..."""
        return str(self.dtype(name)).removeprefix("torch.")

    def forms(self, name: str) -> tuple[str, ...]:  # noqa: ARG002
        """The forms that hold a tensor exactly, except floats: a block format, :data:`INT8`, both,
        or none."""
        return ()

    def blocks(self, name: str) -> torch.Tensor:
        """uint8 [num_rows, row_bytes]: a matrix in its block format."""
        raise NotImplementedError(name)

    def int8_rows(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """int8 [num_rows, num_columns] and scales, float32 [num_rows]: a matrix in that form."""
        raise NotImplementedError(name)

    def release(self, name: str) -> None:  # noqa: ARG002
        """Give back the mapped memory of a tensor that has been read, if its file is mapped."""
        return

    def model_dtype(self, config: AnyModelConfig, device: torch.device) -> torch.dtype:  # noqa: ARG002
        """The dtype that suits the model: the config's, else the dtype of its embeddings."""
        if config.dtype in DTYPES:
            return DTYPES[config.dtype]
        name = embeddings_name(config, self)
        return self.dtype(name) if name in self.names else torch.float32

    def tokenizer(self, vocab_size: int) -> Tokenizer | None:
        """The tokenizer that comes with the tensors, if there is one."""
        return Tokenizer.from_directory(self.place, vocab_size)


class Checkpoint(StoredTensors):
    """The tensors of a model directory by name; a context manager that holds the files open.

    Args:
        drafts: whether to include tensors of layers that draft further tokens.
    """

    def __init__(self, directory: Path, *, drafts: bool = False) -> None:
        self.place = directory
        self._files = ExitStack()
        self._file_of: dict[str, TensorFile] = {}
        try:
            self._open_all()
        except BaseException:
            self._files.close()
            raise
        self._stored_as = _names_of_text(list(self._file_of), drafts)
        self.names = list(self._stored_as)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._file_of.clear()
        self._files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._stored_as

    def path_of(self, name: str) -> Path:
        return self._file(name).path

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file(name).shape(self._stored_as[name])

    def dtype(self, name: str) -> torch.dtype:
        """The stored dtype of a tensor; an UnsupportedModelError if it is not a float type."""
        stored = self.stored_dtype(name)
        if stored not in FLOAT_DTYPES:
            raise UnsupportedModelError(
                f"{self.path_of(name)}: {shown_name(name)}: supported are "
                f"{', '.join(FLOAT_DTYPES)}, got {stored}"
            )
        return FLOAT_DTYPES[stored]

    def stored_dtype(self, name: str) -> str:
        """The name of a tensor's dtype in the file's header: F32, BF16, I32, ..."""
        return self._file(name).stored_dtype(self._stored_as[name])

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as it is stored, on the CPU."""
        return self._file(name).tensor(self._stored_as[name])

    def _file(self, name: str) -> TensorFile:
        return self._file_of[self._stored_as[name]]

    def _open_all(self) -> None:
        index, whole = self.place / INDEX, self.place / WHOLE
        if kind_of(index) != "nothing":
            self._open_shards(index)
            if kind_of(whole) != "nothing" and whole not in self._paths:
                raise CheckpointError(f"{self.place}: expected {WHOLE} or {INDEX}, got both")
        elif kind_of(whole) != "nothing":
            file = self._open(whole)
            self._file_of = dict.fromkeys(sorted(file.names), file)
            if not file.names:
                raise CheckpointError(f"{whole}: expected tensors, got none")
        else:
            others = [*sorted(self.place.glob("*.bin")), *self._unused_weights()]
            hint = f" (only {others[0].name}: convert it to safetensors)" if others else ""
            raise ModelNotFoundError(
                f"{self.place}: expected {WHOLE} or {INDEX}, got neither{hint}"
            )
        for path in self._unused_weights():
            warnings.warn(
                f"{path}: expected no weights but the model's; they are not used", stacklevel=4
            )

    @property
    def _paths(self) -> set[Path]:
        return {file.path for file in self._file_of.values()}

    def _unused_weights(self) -> list[Path]:
        """Model weights in the directory that are not read."""
        others = set(self.place.glob("*.safetensors")) - self._paths
        return sorted(path for path in others if OTHER_WEIGHTS.fullmatch(path.name))

    def _open_shards(self, index: Path) -> None:
        whole = JsonFields.read(index, CheckpointError, most=MAX_INDEX_BYTES)
        fields = whole.inner("weight_map")
        if fields is None or not fields.names:
            raise CheckpointError(
                f"{index}: weight_map: expected an object of tensor to file, got nothing"
            )
        shards: dict[str, TensorFile] = {}
        for name in fields.names:
            shard = fields.text(name)
            if Path(shard).name != shard:
                raise CheckpointError(
                    f"{index}: {shown_name(name)}: expected a file's name, got {shown(shard)}"
                )
            if shard not in shards:
                shards[shard] = self._open(self.place / shard)
            if name not in shards[shard].names:
                raise CheckpointError(
                    f"{shards[shard].path}: expected tensor {shown_name(name)} as {INDEX} says, "
                    "got none"
                )
            self._file_of[name] = shards[shard]

    def _open(self, path: Path) -> TensorFile:
        return self._files.enter_context(TensorFile(path, CheckpointError, ModelNotFoundError))


def _names_of_text(names: list[str], drafts: bool) -> dict[str, str]:
    """The names of a text model's tensors, and their names in the checkpoint; ``drafts``: include
    tensors that draft further tokens.
    """
    found = {}
    for name in names:
        if name.startswith(OTHER_PARTS) and not (drafts and name.startswith(DRAFTING)):
            continue
        start = next((start for start in TEXT_PARTS if name.startswith(start)), "")
        found[f"{TEXT_PARTS.get(start, '')}{name.removeprefix(start)}"] = name
    return found


def embeddings_name(config: AnyModelConfig, checkpoint: StoredTensors) -> str:
    """The name of the embeddings in a checkpoint, which may be stored as a tied LM head."""
    there = checkpoint.names
    names: tuple[str, ...] = (EMBEDDINGS,)
    if isinstance(config, T5Config):
        names, norm = T5_EMBEDDINGS, T5_NORM
    else:
        norm = final_norm_name(config)
    if config.tie_word_embeddings and norm in there:  # otherwise not such a checkpoint
        names = (*names, HEAD)
    present = [name for name in names if name in there]
    return present[0] if present else names[0]


def with_stored_tying(config: Config, checkpoint: StoredTensors) -> Config:
    """The config, untied if the checkpoint holds an LM head that differs from the embeddings.

    transformers does the same for a model that was tied before its head was trained alone. A T5
    without an LM head in its checkpoint is tied, whatever its config says.
    """
    if isinstance(config, T5Config):
        config = replace(config, tie_word_embeddings=True)
    embeddings = embeddings_name(config, checkpoint)
    check_tensors(checkpoint, config)
    if isinstance(config, T5Config):
        _refuse_separate_embeddings(checkpoint, embeddings)
    if not config.tie_word_embeddings or HEAD not in checkpoint.names or embeddings == HEAD:
        return config
    tied = _are_equal(checkpoint, embeddings, HEAD)
    return config if tied else replace(config, tie_word_embeddings=False)


def _refuse_separate_embeddings(checkpoint: StoredTensors, shared: str) -> None:
    """Raise if encoder and decoder of a T5 do not share their embeddings."""
    for name in T5_EMBEDDINGS:
        if name not in checkpoint.names or name == shared:
            continue
        if not _are_equal(checkpoint, name, shared):
            raise UnsupportedModelError(
                f"{checkpoint.path_of(name)}: {name}: supported is a copy of {shared}, got other "
                "numbers"
            )


def _are_equal(checkpoint: StoredTensors, name: str, other: str) -> bool:
    kinds = [(checkpoint.shape(each), checkpoint.dtype(each)) for each in (name, other)]
    return kinds[0] == kinds[1] and torch.equal(checkpoint.tensor(name), checkpoint.tensor(other))


def empty_weights(
    config: AnyModelConfig, embeddings: str, new: NewWeights
) -> tuple[LlamaWeights | T5Weights, dict[str, WeightView]]:
    """Uninitialised weights, and what each tensor of a checkpoint fills."""
    if isinstance(config, T5Config):
        t5 = T5Weights.empty(config, new)
        return t5, t5.by_checkpoint_name(config, embeddings)
    llama = LlamaWeights.empty(config, new)
    return llama, llama.by_checkpoint_name(config, embeddings)


def check_tensors(stored: StoredTensors, config: AnyModelConfig) -> None:
    """Raise unless the config's tensors are stored in its shapes, and its layers have no others.

    The check takes time in proportion to the number of stored tensors, and no memory for weights.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
        UnsupportedModelError: a tensor has a dtype that is not read, or belongs to another kind of
            model.
    """
    expected = expected_shapes(stored, config)
    _check_shapes(stored, expected)
    _refuse_unknown_layer_tensors(stored, expected)


def expected_shapes(stored: StoredTensors, config: AnyModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a config needs; an error if there are fewer than layers."""
    for name in ("num_layers", "num_encoder_layers"):
        if getattr(config, name, 0) > len(stored.names):
            raise CheckpointError(
                f"{stored.place}: expected tensors of {name}={getattr(config, name)} layers, got "
                f"{len(stored.names)} tensors"
            )
    new = NewWeights("meta", torch.float32)
    views = empty_weights(config, embeddings_name(config, stored), new)[1]
    return {name: tuple(view.weight.shape) for name, view in views.items()}


def _check_shapes(stored: StoredTensors, expected: dict[str, tuple[int, ...]]) -> None:
    present = set(stored.names)
    missing = [name for name in expected if name not in present]
    if missing:
        raise CheckpointError(
            f"{stored.place}: expected {len(expected)} tensors, {_some(missing)} missing"
        )
    for name, shape in expected.items():
        check_shape(stored, name, shape)


def check_shape(stored: StoredTensors, name: str, shape: tuple[int, ...]) -> None:
    """Raise unless a tensor that is there has a shape, and numbers that can be read."""
    got = stored.shape(name)
    if got != shape:
        raise CheckpointError(
            f"{stored.path_of(name)}: {name}: expected {list(shape)} as config.json says, got "
            f"{shown(list(got))}"
        )
    stored.dtype(name)


def _refuse_unknown_layer_tensors(
    stored: StoredTensors, expected: dict[str, tuple[int, ...]]
) -> None:
    """Raise if a layer's tensor would be unused, since the model differs; warn of other tensors."""
    unused = [
        name
        for name in stored.names
        if name not in expected and name != HEAD and not name.endswith(DERIVED)
    ]
    layers = {_layer_of(name) for name in expected} - {None}
    wrong = [name for name in unused if _layer_of(name) in layers]
    if wrong:
        raise UnsupportedModelError(
            f"{stored.place}: config.json knows no {_some(wrong)}, which the checkpoint has"
        )
    if unused:
        warnings.warn(f"{stored.place}: unused: {_some(unused)}", stacklevel=4)


def _layer_of(name: str) -> str | None:
    """The layer in a tensor's name: ``model.layers.3`` or ``encoder.block.3``; None without one."""
    parts = name.split(".")
    return ".".join(parts[:3]) if parts[1:2] in (["layers"], ["block"]) else None


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(shown_name, names[:3])) + rest
