"""What a run starts from: a model, trained already or not, and its tokenizer, from a directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eecore.errors import ModelError, TrainingError
from eecore.models.tokenizer import Tokenizer
from eecore.training.libraries import library

__all__ = ["StartingPoint", "load_starting_point"]


@dataclass(frozen=True, eq=False)
class StartingPoint:
    """A model and what turns text into its tokens.

    Attributes:
        model: of transformers, float32.
        pretrained: False for random weights.
        tokenizer: eecore's, which encodes as ``eecore.generate`` will.
        tokenizer_directory: where its files are.
        eos_token_id: ends a text.
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
        tokenizer: a directory with tokenizer.json; that of the model when None.
        seed: of random weights.

    Raises:
        ModelError: nothing is there, or it is no model.
        TrainingError: the model and the tokenizer do not go together.
    """
    transformers = library("transformers")
    given = Path(path)
    directory = given if given.is_dir() else given.parent
    config_file = directory / "config.json" if given.is_dir() else given
    if not config_file.is_file():
        raise ModelError(f"{config_file}: expected a file, got nothing")
    pretrained = given.is_dir() and any(directory.glob("model*.safetensors"))
    others = sorted(directory.glob("*.bin")) if given.is_dir() and not pretrained else []
    if others:
        raise ModelError(f"{directory}: expected weights as safetensors, got {others[0].name}")
    tokenizer_directory = directory if tokenizer is None else Path(tokenizer)
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
            model = auto.from_pretrained(
                str(directory), dtype=torch.float32, local_files_only=True, use_safetensors=True
            )
        else:
            torch.manual_seed(seed)
            model = auto.from_config(config, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path}: expected a model, got: {error}") from None
    if found.vocab_size > model.config.vocab_size:
        raise TrainingError(
            f"{tokenizer_directory}: expected at most the model's {model.config.vocab_size} "
            f"tokens, got {found.vocab_size}"
        )
    return StartingPoint(model, pretrained, found, tokenizer_directory, _eos(model, config_file))


def _eos(model: Any, config_file: Path) -> int:
    generation = getattr(model, "generation_config", None)
    for source in (generation, model.config):
        value = getattr(source, "eos_token_id", None)
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, int):
            return first
    raise TrainingError(f"{config_file}: expected an eos_token_id, which ends texts, got none")
