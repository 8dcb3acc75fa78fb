"""Loads models from model directories and GGUF files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from eecore import ops
from eecore.config import AnyModelConfig, ModelConfig, T5Config
from eecore.errors import ModelError
from eecore.files.readable import kind_of, path_of
from eecore.models.hybrid import decoder_of
from eecore.models.llama import LlamaModel, LlamaWeights
from eecore.models.network import Network
from eecore.models.readers.checkpoint import DTYPES, Checkpoint, StoredTensors, with_stored_tying
from eecore.models.readers.config_json import read_model_config
from eecore.models.readers.gguf_checkpoint import GGUFCheckpoint
from eecore.models.readers.quantised_checkpoint import (
    QuantisedCheckpoint,
    read_layout,
    warn_of_floats,
)
from eecore.models.readers.stored_weights import load_weights
from eecore.models.source import ModelSource, fingerprint_of
from eecore.models.t5 import T5Model
from eecore.models.t5_weights import T5Weights
from eecore.models.text.tokenizer import Tokenizer
from eecore.models.weights import Coding

CODINGS: dict[str, Coding] = {"int8": "int8", "int4": "int4"}


def load_model(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    weights: str | None = None,
) -> tuple[AnyModelConfig, Network, Tokenizer | None]:
    """Load a model; the tokenizer is None when there is none.

    Args:
        path: a directory with config.json and safetensors files, or a GGUF file. A GGUF file, and a
            directory quantised by GPTQ, AWQ or compressed-tensors, runs as stored, with matrices in
            their own bits.
        device: by default the current GPU if there is one and the build has CUDA, else the CPU.
        dtype: on a GPU by default the checkpoint's dtype, or bfloat16 for a GGUF file in blocks. On
            the CPU by default bfloat16 for a bfloat16 checkpoint if the CPU multiplies bfloat16
            (AVX-512 BF16), else float32.
        weights: ``int8`` and ``int4`` quantise the linear layers' weights as they are read, to
            blocks of 32 numbers, see :func:`eecore.ops.quantise_weight`. ``int8``: of 8 bits;
            ``int4``: of 4 bits, but 5 for keys, and 8 for values and the LM head. Rows whose length
            is not a multiple of 32, and on a GPU all rows with ``int8``, become int8 with a scale
            for each row. States, the KV cache and norms stay in ``dtype``.

    Raises:
        ModelError: a file is missing, corrupt or of another model, the architecture or a setting is
            not supported, or the device does not support the dtype or weights. Raised before memory
            is allocated; the values of weights are not checked.
    """
    directory = path_of(path, ModelError)
    with opened(directory) as (stored, config):
        tokenizer = stored.tokenizer(config.vocab_size)
        network = _loaded(stored, config, device, dtype, weights)
    return network.config, network, tokenizer


@contextmanager
def opened(path: Path) -> Iterator[tuple[StoredTensors, AnyModelConfig]]:
    """The tensors of a model, and its config: untied if the LM head differs from the embeddings.

    Raises:
        ModelError: a file is missing, corrupt or of another model.
    """
    if kind_of(path) == "a file":
        file = GGUFCheckpoint(path)
        file.check_kinds()
        yield file, file.config
        return
    config = read_model_config(path)
    layout = read_layout(path) if isinstance(config, ModelConfig) else None
    with Checkpoint(path) as files:
        stored: StoredTensors = files
        if layout is not None and isinstance(config, ModelConfig):
            stored = QuantisedCheckpoint(files, layout, config)
        yield stored, with_stored_tying(config, stored)


def _loaded(
    stored: StoredTensors,
    config: AnyModelConfig,
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
    weights: str | None,
    num_layers: int | None = None,
) -> Network:
    where, coding = choose_device(device), choose_coding(weights)
    if coding is not None and stored.own_form:
        raise ModelError(
            f"weights: expected None with {stored.own_form}, which has its own, got {weights!r}"
        )
    what = choose_dtype(dtype, where, stored.model_dtype(config, where), config)
    if isinstance(stored, QuantisedCheckpoint):
        warn_of_floats(stored, what)
    loaded = load_weights(stored, config, where, what, coding=coding, num_layers=num_layers)
    if num_layers is not None and isinstance(config, ModelConfig):
        return network_of(config.first_layers(num_layers), loaded, None)
    source = ModelSource(
        stored.place,
        str(what).removeprefix("torch."),
        coding,
        fingerprint=fingerprint_of(stored.place),  # now: the files may change
    )
    return network_of(config, loaded, source)


def load_tokenizer(path: Path, vocab_size: int) -> Tokenizer | None:
    """The tokenizer of a model directory or GGUF file, without the weights; None if there is none.

    Raises:
        ModelError: a tokenizer file cannot be used, or has ids that the model does not have.
    """
    if kind_of(path) == "a file":
        return GGUFCheckpoint(path).tokenizer(vocab_size)
    return Tokenizer.from_directory(path, vocab_size)


def load_first_layers(
    path: str | Path,
    num_layers: int,
    dtype: str | torch.dtype | None = None,
    weights: str | None = None,
) -> LlamaModel:
    """The first layers of a Llama on the CPU, with its embeddings, final norm and LM head.

    Args:
        path: as for :func:`load_model`; so are ``dtype`` and ``weights``. From a directory in
            floats only these layers are read into memory; a quantised model is loaded whole.
        num_layers: from 1 to the number of the model's layers minus 1.

    Raises:
        ModelError: as for :func:`load_model`, or the model does not have such layers.
    """
    directory = path_of(path, ModelError)
    with opened(directory) as (stored, config):
        if not isinstance(config, ModelConfig):
            raise ModelError(f"{directory}: expected a decoder alone, got a {config.architecture}")
        if not 1 <= num_layers < config.num_layers:
            raise ModelError(
                f"num_layers: expected 1 to {config.num_layers - 1} of the {config.num_layers} "
                f"layers, got {num_layers}"
            )
        some = None if stored.own_form else num_layers
        network = _loaded(stored, config, "cpu", dtype, weights, some)
    assert isinstance(network, LlamaModel)
    return network


def read_config(path: Path) -> AnyModelConfig:
    """The config of a model directory, or of a GGUF file."""
    return GGUFCheckpoint(path).config if kind_of(path) == "a file" else read_model_config(path)


def network_of(
    config: AnyModelConfig, weights: LlamaWeights | T5Weights, source: ModelSource | None
) -> Network:
    """The model of a config and its weights."""
    if isinstance(config, T5Config):
        assert isinstance(weights, T5Weights)
        return T5Model(config, weights, source)
    assert isinstance(weights, LlamaWeights)
    return decoder_of(config, weights, source)


def choose_device(device: str | torch.device | None) -> torch.device:
    """The requested device, or by default the best that this build and machine have."""
    missing = ops.missing_cuda_ops()
    if device is None:
        device = "cuda" if not missing else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ModelError(f"device: expected cpu or cuda, got {device!r}") from None
    if str(chosen) == "cpu":
        return chosen
    if not str(chosen).startswith("cuda"):
        raise ModelError(f"device: expected cpu or cuda, got {chosen}")
    if not torch.cuda.is_available():
        raise ModelError(f"device: expected cpu, got {chosen} on a machine without a GPU")
    if missing:
        raise ModelError(
            f"device: expected cpu, got {chosen}: this build has no CUDA kernel for "
            f"{', '.join(missing)}"
        )
    return torch.device(
        "cuda", torch.cuda.current_device() if chosen.index is None else chosen.index
    )


def choose_dtype(
    dtype: str | torch.dtype | None,
    device: torch.device,
    stored: torch.dtype,
    config: AnyModelConfig,
) -> torch.dtype:
    """The requested dtype, or by default the one that suits the checkpoint and the device."""
    is_t5 = isinstance(config, T5Config)  # states of a T5 overflow float16
    if dtype is None:
        if device.type == "cuda":
            return torch.bfloat16 if is_t5 and stored == torch.float16 else stored
        fast = "avx512_bf16" in ops.build_info()["cpu_capabilities"]
        return torch.bfloat16 if stored == torch.bfloat16 and fast else torch.float32
    name = str(dtype).removeprefix("torch.")
    chosen = DTYPES.get(name)
    if chosen is None:
        raise ModelError(f"dtype: expected one of {', '.join(DTYPES)}, got {name}")
    if chosen == torch.float16 and (device.type == "cpu" or is_t5):
        where = "on the CPU" if device.type == "cpu" else "for T5, which overflows it"
        raise ModelError(f"dtype: expected float32 or bfloat16 {where}, got float16")
    return chosen


def choose_coding(weights: str | None) -> Coding | None:
    """What matrices are quantised to as they are read; None: nothing."""
    if weights is None:
        return None
    if weights not in CODINGS:
        raise ModelError(
            f"weights: expected {', '.join(CODINGS)} or None (floats of the dtype), got {weights!r}"
        )
    return CODINGS[weights]
