"""A directory of safetensors files, sharded or not, read tensor by tensor into stacked weights.

Names and shapes are checked against the config before anything is allocated. Nothing is unpickled.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eecore.config import AnyModelConfig, T5Config
from eecore.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from eecore.models.config_json import read_json
from eecore.models.llama import LlamaWeights
from eecore.models.t5_weights import T5Weights
from eecore.models.weights import WeightView

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
T5_EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# What checkpoints carry besides, and is not read: computed here, or held under another name.
DERIVED = (
    *T5_EMBEDDINGS,  # the same under other names
    ".rotary_emb.inv_freq",
    ".masked_bias",
    ".attention.bias",
    ".EncDecAttention.relative_attention_bias.weight",  # of the first T5; never used
)


class Checkpoint:
    """The tensors of a model directory by name; a context manager that holds the files open."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files = ExitStack()
        self._file_of: dict[str, tuple[Path, Any]] = {}
        try:
            self._open_all()
        except BaseException:
            self._files.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._file_of.clear()
        self._files.close()

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def path_of(self, name: str) -> Path:
        return self._file_of[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name][1].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """What the tensor is stored in; an UnsupportedModelError when that is not a float type."""
        path, file = self._file_of[name]
        stored = file.get_slice(name).get_dtype()
        if stored not in FLOAT_DTYPES:
            expected = ", ".join(FLOAT_DTYPES)
            raise UnsupportedModelError(f"{path}: {name}: supported are {expected}, got {stored}")
        return FLOAT_DTYPES[stored]

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as it is stored, on the CPU."""
        path, file = self._file_of[name]
        try:
            stored: torch.Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: {name}: {error}") from None
        return stored

    def _open_all(self) -> None:
        index, whole = self.directory / INDEX, self.directory / WHOLE
        if index.is_file():
            self._open_shards(index)
        elif whole.is_file():
            file = self._open(whole)
            self._file_of = dict.fromkeys(file.keys(), (whole, file))
        else:
            others = sorted(path.name for path in self.directory.glob("*.bin"))
            hint = f" (only {others[0]}: convert it to safetensors)" if others else ""
            raise ModelNotFoundError(
                f"{self.directory}: expected {WHOLE} or {INDEX}, got neither{hint}"
            )

    def _open_shards(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(
                f"{index}: weight_map: expected an object of tensor to file, got {weight_map!r}"
            )
        shards: dict[str, tuple[Path, Any, set[str]]] = {}
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise CheckpointError(f"{index}: {name}: expected a file's name, got {shard!r}")
            if shard not in shards:
                path = self.directory / shard
                file = self._open(path)
                shards[shard] = (path, file, set(file.keys()))
            path, file, held = shards[shard]
            if name not in held:
                raise CheckpointError(f"{path}: expected tensor {name} as {INDEX} says, got none")
            self._file_of[name] = (path, file)

    def _open(self, path: Path) -> Any:
        if not path.is_file():
            raise ModelNotFoundError(f"{path}: expected a file, got nothing")
        try:
            return self._files.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            size = path.stat().st_size
            raise CheckpointError(
                f"{path}: expected a whole safetensors file, got {size} bytes: {error}"
            ) from None


def embeddings_name(config: AnyModelConfig, checkpoint: Checkpoint) -> str:
    """What a checkpoint calls the embeddings; T5's go by the name of any of their users."""
    if not isinstance(config, T5Config):
        return "model.embed_tokens.weight"
    present = [name for name in T5_EMBEDDINGS if name in checkpoint.names]
    return present[0] if present else T5_EMBEDDINGS[0]


def with_stored_tying(config: AnyModelConfig, checkpoint: Checkpoint) -> AnyModelConfig:
    """The config, untied where the checkpoint holds an LM head that differs from the embeddings.

    So transformers reads a model that was tied once and then had its head trained alone. A T5
    without an LM head in its checkpoint is tied, whatever its config says.
    """
    embeddings, head = embeddings_name(config, checkpoint), "lm_head.weight"
    if isinstance(config, T5Config):
        _refuse_embeddings_of_their_own(checkpoint, embeddings)
        config = replace(config, tie_word_embeddings=True)
    if not config.tie_word_embeddings or not {embeddings, head} <= set(checkpoint.names):
        return config
    tied = checkpoint.shape(embeddings) == checkpoint.shape(head) and torch.equal(
        checkpoint.tensor(embeddings), checkpoint.tensor(head)
    )
    return config if tied else replace(config, tie_word_embeddings=False)


def _refuse_embeddings_of_their_own(checkpoint: Checkpoint, shared: str) -> None:
    """Encoder and decoder of a T5 share their embeddings."""
    for name in T5_EMBEDDINGS:
        if name not in checkpoint.names or name == shared:
            continue
        if not torch.equal(checkpoint.tensor(name), checkpoint.tensor(shared)):
            raise UnsupportedModelError(
                f"{checkpoint.path_of(name)}: {name}: supported is what {shared} holds, got others"
            )


def load_weights(
    checkpoint: Checkpoint,
    config: AnyModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    int8: bool = False,
) -> LlamaWeights | T5Weights:
    """The config's weights from the checkpoint: checked first, then allocated, then filled."""
    embeddings = embeddings_name(config, checkpoint)
    _check(checkpoint, _weights(config, embeddings, "meta", dtype)[1])
    weights, views = _weights(config, embeddings, device, dtype, int8=int8)
    for name, view in views.items():
        view.fill(checkpoint.tensor(name))
    return weights


def _weights(
    config: AnyModelConfig,
    embeddings: str,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    int8: bool = False,
) -> tuple[LlamaWeights | T5Weights, dict[str, WeightView]]:
    """Uninitialised weights, and what each tensor of a checkpoint fills."""
    if isinstance(config, T5Config):
        t5 = T5Weights.empty(config, device, dtype, int8=int8)
        return t5, t5.by_checkpoint_name(config, embeddings)
    llama = LlamaWeights.empty(config, device, dtype, int8=int8)
    return llama, llama.by_checkpoint_name(config)


def _check(checkpoint: Checkpoint, expected: dict[str, WeightView]) -> None:
    present = set(checkpoint.names)
    missing = [name for name in expected if name not in present]
    if missing:
        raise CheckpointError(
            f"{checkpoint.directory}: expected {len(expected)} tensors, {_some(missing)} missing"
        )
    for name, view in expected.items():
        shape = checkpoint.shape(name)
        if shape != tuple(view.weight.shape):
            raise CheckpointError(
                f"{checkpoint.path_of(name)}: {name}: expected {list(view.weight.shape)} "
                f"as config.json says, got {list(shape)}"
            )
        checkpoint.dtype(name)
    _refuse_unknown_layer_tensors(checkpoint, expected)


def _refuse_unknown_layer_tensors(checkpoint: Checkpoint, expected: dict[str, WeightView]) -> None:
    """A tensor of a layer that would go unused means a different model; others are only noted."""
    unused = [
        name
        for name in checkpoint.names
        if name not in expected and name != "lm_head.weight" and not name.endswith(DERIVED)
    ]
    layers = {_layer_of(name) for name in expected} - {None}
    wrong = [name for name in unused if _layer_of(name) in layers]
    if wrong:
        raise UnsupportedModelError(
            f"{checkpoint.directory}: config.json knows no {_some(wrong)}, which the checkpoint has"
        )
    if unused:
        warnings.warn(f"{checkpoint.directory}: unused: {_some(unused)}", stacklevel=4)


def _layer_of(name: str) -> str | None:
    """``model.layers.3`` or ``encoder.block.3`` of any tensor of that layer."""
    parts = name.split(".")
    return ".".join(parts[:3]) if parts[1:2] in (["layers"], ["block"]) else None


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
