"""The trained model as an ordinary Hugging Face directory, and what is known of its exits."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eecore.files import filling
from eecore.lab.training.evaluation import ExitScores
from eecore.lab.training.exit_model import ExitModel
from eecore.lab.training.libraries import no_progress_bars
from eecore.lab.training.recipe import TrainingConfig
from eecore.models import model_digest

__all__ = ["EXITS_FILE", "save_model"]

EXITS_FILE = "exits.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "chat_template.jinja",
)


def save_model(
    model: Any,
    directory: Path,
    *,
    config: TrainingConfig,
    scores: ExitScores | None,
    tokens: int,
    tokenizer_directory: Path | None,
) -> None:
    """Write weights (adapters merged, and alone under ``adapter/``), tokenizer, exits.json.

    Args:
        model: the transformers model, or the peft model around it, which is merged by this.
        directory: to write to.
        config: of the run.
        scores: of the exits on held-out data.
        tokens: that the run has read.
        tokenizer_directory: its tokenizer files are copied.
    """
    with filling(directory) as partial:
        if hasattr(model, "merge_and_unload"):
            model.save_pretrained(str(partial / "adapter"))
            model = model.merge_and_unload()
        with no_progress_bars():
            model.save_pretrained(str(partial))
        for name in TOKENIZER_FILES:
            source = None if tokenizer_directory is None else tokenizer_directory / name
            if source is not None and source.is_file() and source.parent != directory:
                shutil.copyfile(source, partial / name)
        about = {
            "model_sha256": model_digest(partial),
            "num_layers": ExitModel.of(model).num_layers,
            "training": config.to_dict(),
            "training_tokens": tokens,
            "held_out": None if scores is None else asdict(scores),
        }
        (partial / EXITS_FILE).write_text(json.dumps(about, indent=2) + "\n")
