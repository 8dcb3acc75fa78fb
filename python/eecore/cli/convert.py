"""``eecore convert``: a GGUF file becomes a model directory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from eecore.cli.failures import UsageError
from eecore.cli.loading import Debug, spinner
from eecore.errors import CheckpointError, ModelNotFoundError
from eecore.files.hub import fetch_model
from eecore.files.readable import kind_of, regular_file, shown_path


def convert(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE.gguf", help="A GGUF file, or org/name:file.gguf of the hub."),
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The model directory to make.")],
    dtype: Annotated[
        str, typer.Option(help="Dtype of the written weights; only float32 keeps every value.")
    ] = "float32",
    debug: Debug = False,  # noqa: ARG001 (read where failures are reported)
) -> int:
    """Make a model directory from a GGUF file, weights dequantised, with its tokenizer."""
    path = fetch_model(file)
    regular_file(path, CheckpointError, ModelNotFoundError, "a GGUF file")
    found = kind_of(directory)
    if found != "nothing" and (found != "a directory" or any(directory.iterdir())):
        raise UsageError(f"{shown_path(directory)}: expected a new or empty directory")
    with spinner(f"converting {file}"):
        from eecore.models import convert_gguf

        convert_gguf(path, directory, dtype)
    print(f"wrote {directory}", file=sys.stderr)
    return 0
