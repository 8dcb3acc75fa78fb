"""The model, trained already or not, and the tokenizer that a run starts from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eecore.config import AnyModelConfig
from eecore.errors import ModelError, TrainingError
from eecore.files.readable import kind_of, path_of
from eecore.lab.training.exit_model import LOOPED
from eecore.lab.training.libraries import library, no_progress_bars
from eecore.models import Tokenizer
from eecore.models.readers.checkpoint import Checkpoint, with_stored_tying
from eecore.models.readers.config_fields import ConfigFields
from eecore.models.readers.config_json import read_config_file, refuse_quantised

MAX_LABELS = 1 << 16


@dataclass(frozen=True, eq=False)
class StartingPoint:
    """A model and its tokenizer.

    Attributes:
        model: a transformers model, float32.
        pretrained: False for random weights.
        tokenizer: eecore's, which encodes as ``eecore.generate`` does.
        tokenizer_directory: the directory of its files.
        eos_token_id: the token that ends a text.
    """

    model: Any
    pretrained: bool
    tokenizer: Tokenizer
    tokenizer_directory: Path
    eos_token_id: int


def load_starting_point(
    path: str | Path, *, tokenizer: str | Path | None = None, seed: int = 0
) -> StartingPoint:
    """Load a model directory; one without weights, or a config.json alone, gives random weights.

    Args:
        path: a Hugging Face directory, or a config.json.
        tokenizer: a directory with tokenizer.json; the model's when None.

    Raises:
        ModelError: there is no model, or it is malformed.
        TrainingError: the model and the tokenizer do not match.
    """
    transformers = library("transformers")
    given = path_of(path, ModelError)
    is_directory = kind_of(given) == "a directory"
    directory = given if is_directory else given.parent
    config_file = directory / "config.json" if is_directory else given
    read = read_config_file(config_file)
    values = ConfigFields.read(config_file, ModelError)
    refuse_quantised(values, "weights in floats to train")
    # transformers makes a name for each label, however many a file asks for.
    values.integer("num_labels", 0, MAX_LABELS, None)
    pretrained = is_directory and any(directory.glob("model*.safetensors"))
    others = sorted(directory.glob("*.bin")) if is_directory and not pretrained else []
    if others:
        raise ModelError(f"{directory}: expected weights as safetensors, got {others[0].name}")
    tokenizer_directory = directory if tokenizer is None else path_of(tokenizer, TrainingError)
    if pretrained:
        with Checkpoint(directory) as checkpoint:
            with_stored_tying(read, checkpoint)
    else:
        _check_memory(config_file, read)
    if getattr(read, "architecture", "") in LOOPED:
        import eecore.lab.training.looped_model  # noqa: F401 - transformers' Auto classes know it
    found = Tokenizer.from_directory(tokenizer_directory)
    if found is None:
        raise TrainingError(f"{tokenizer_directory}: expected tokenizer.json, got none")
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(config_file), local_files_only=True, trust_remote_code=False
        )
        kind = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
        auto = getattr(transformers, kind)
        if pretrained:
            with no_progress_bars():
                model = auto.from_pretrained(
                    str(directory), dtype=torch.float32, local_files_only=True, use_safetensors=True
                )
        else:
            torch.manual_seed(seed)
            model = auto.from_config(config, dtype=torch.float32)
    except Exception as error:  # of transformers, which reads fields that eecore does not
        kind = type(error).__name__
        raise ModelError(f"{path}: expected a model, got: {kind}: {error}") from None
    if found.vocab_size > model.config.vocab_size:
        raise TrainingError(
            f"{tokenizer_directory}: expected at most the model's {model.config.vocab_size} "
            f"tokens, got {found.vocab_size}"
        )
    return StartingPoint(model, pretrained, found, tokenizer_directory, _eos(model, config_file))


def _check_memory(config_file: Path, config: AnyModelConfig) -> None:
    """Refuse random weights that need more memory than the machine has."""
    needed = config.num_parameters * torch.float32.itemsize
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise ModelError(
            f"{config_file}: expected a model of at most {there >> 30} GiB, the machine's memory, "
            f"got {needed / 2**30:.0f} GiB of weights"
        )


def _eos(model: Any, config_file: Path) -> int:
    generation = getattr(model, "generation_config", None)
    for source in (generation, model.config):
        value = getattr(source, "eos_token_id", None)
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, int):
            return first
    raise TrainingError(f"{config_file}: expected an eos_token_id, which ends texts, got none")
