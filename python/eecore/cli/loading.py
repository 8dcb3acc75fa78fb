"""Loading a model for a command: cheap checks first, then a spinner while weights are read."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from eecore.cli.process import kept
from eecore.errors import ModelError, ModelNotFoundError
from eecore.files.builtin import BUILTIN, model_directory
from eecore.files.hub import fetch_draft_head, fetch_head, name_of
from eecore.files.readable import contents_of, kind_of

if TYPE_CHECKING:
    from eecore.exits import Exit
    from eecore.generation import Model

SEEDS = 2**63 - 1
"""The largest seed."""
MODEL_HELP = (
    "A model directory in Hugging Face layout, a GGUF file, or a repository of the hub: org/name, "
    "org/name@revision, org/name:file.gguf; intent: the model that ships with eecore."
)
ModelPath = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
# For commands whose next argument is a prompt.
OptionalModel = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help=MODEL_HELP, show_default=BUILTIN)
]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda.", show_default="cuda where there is a GPU")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def check_path(path: str | Path, *, takes_gguf: bool = True) -> Path:
    """The directory or GGUF file, fetched where it is a repository's; needs no heavy import. A
    ModelError says what to do where there is none.
    """
    directory = model_directory(path)
    found = kind_of(directory)
    if found == "a directory":
        return directory
    if found == "a file" and directory.suffix == ".gguf":
        if takes_gguf:
            return directory
        raise ModelError(f"{path}: expected a model directory, got a GGUF file: convert it first")
    file = ", a GGUF file (*.gguf)" if takes_gguf else ""
    raise ModelNotFoundError(
        f"{path}: expected a model directory (config.json, *.safetensors){file}, a repository "
        f"(org/name) or {BUILTIN}, got {contents_of(directory)}"
    )


def model_and_prompt(
    model: str | None, prompt: str | None, *, has_file: bool = False
) -> tuple[str, str | None]:
    """MODEL and PROMPT of a command line, the first of which may be left out.

    A single argument is the model where a file or directory has that name, where prompts come from
    a file, or where it is one word.
    """
    if model is None:
        return BUILTIN, None
    words = len(model.split()) > 1
    if prompt is None and (model == "-" or (words and not has_file and not os.path.exists(model))):
        return BUILTIN, model
    return model, prompt


def path_before_prompt(model: str, prompt: str | None) -> Path:
    """The result of :func:`check_path` for a MODEL that a prompt may follow. The error for a single
    word says that it may be a prompt.
    """
    try:
        return check_path(model)
    except ModelNotFoundError as error:
        if prompt is not None or not model.isalnum():
            raise
        hint = f"if it is the prompt: {BUILTIN} {model}, or another model before it"
        raise ModelNotFoundError(f"{error}; {hint}") from None


def load(
    path: str | Path, *, threads: int | None, policy: Exit | None = None, **options: Any
) -> Model:
    """The model; its shape is checked against the exit policy before weights are read."""
    directory = check_path(path)
    with spinner(f"loading {name_of(directory)}"):
        with kept():
            import torch

            import eecore

            load_model = eecore.load

        if threads is not None:
            torch.set_num_threads(threads)
        return load_model(directory, **options_for(directory, policy, options))


def options_for(directory: Path, policy: Exit | None, options: dict[str, Any]) -> dict[str, Any]:
    """The options of :func:`eecore.load` for a policy, which is checked against the model's shape;
    a draft head is fetched.
    """
    if isinstance(options.get("exits"), str):
        options = {**options, "exits": fetch_head(options["exits"])}
    if isinstance(options.get("draft_head"), str):
        options = {**options, "draft_head": fetch_draft_head(options["draft_head"])}
    if policy is None:
        return options
    from eecore.models import read_config

    config = read_config(directory)
    policy.check(config)
    calibration = getattr(policy, "calibration", None)
    if calibration is None:
        return options
    # The guarantee holds for these only.
    own = {name: getattr(calibration, name) for name in ("dtype", "weights")}
    return {**options, **{n: value for n, value in own.items() if options.get(n) is None}}


def spinner(what: str) -> AbstractContextManager[Any]:
    """A spinner on stderr; nothing where stderr is not a terminal."""
    console = Console(stderr=True)
    return console.status(Text(what)) if console.is_interactive else nullcontext()
