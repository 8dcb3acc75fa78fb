"""``eecore exits``: the exit layer of each token of a text, in the terminal and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from eecore.cli.depth import depth_legend, depth_style, has_colours, runs
from eecore.cli.exit_options import (
    EXIT_HELP,
    PANEL,
    CalibrationFile,
    ClassifierFile,
    ExitOptions,
    ExitPoints,
    Measure,
)
from eecore.cli.failures import UsageError
from eecore.cli.files import check_out
from eecore.cli.loading import OptionalModel, check_path, model_and_prompt
from eecore.cli.options import LoadOptions, takes_options
from eecore.errors import RequestError
from eecore.files.texts import read_text
from eecore.files.whole import write_text


@takes_options
def exits(
    loading: LoadOptions,
    model: OptionalModel = None,
    prompt: Annotated[str | None, typer.Argument(help="What is given.")] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Map this text after the prompt, instead of a generated one."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 64,
    exit: Annotated[str, typer.Option(help=EXIT_HELP, rich_help_panel=PANEL)] = "confident",
    measure: Measure = None,
    classifier: ClassifierFile = None,
    calibration: CalibrationFile = None,
    exit_points: ExitPoints = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page to this file.")] = None,
) -> int:
    """Show the exit layer of each token; the page shows the confidence after every layer on
    hover.
    """
    model, prompt = model_and_prompt(model, prompt)
    directory = check_path(model)
    if prompt is None:
        raise UsageError("PROMPT: expected one, got none")
    check_out("--html", html)
    content = ""
    if text is not None:
        content = read_text(text)
        if not content:
            raise RequestError(f"{text}: expected some text, got none")
    policy = ExitOptions(
        exit,
        measure=measure,
        classifier=classifier,
        calibration=calibration,
        exit_points=exit_points,
    ).policy(directory)
    loaded = loading.load(directory, policy)

    from eecore.lab.evaluation.exit_map import map_exits

    found = map_exits(loaded, prompt, policy, text=content, max_tokens=0 if content else max_tokens)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    painted = Text()
    for token in found.tokens:
        layer = token.exit_layer
        style = "dim" if layer is None else depth_style(layer, found.lowest, found.num_layers)
        painted.append(token.text, style)
    console.print(painted)
    if has_colours(console):
        console.print(depth_legend(found.lowest, found.num_layers))
    else:
        layers = [token.exit_layer for token in found.tokens if token.exit_layer is not None]
        console.print(f"exit layers: {runs(layers)}")
    console.print(f"mean exit layer {found.mean_exit_layer:.2f} of {found.num_layers}")
    if html is not None:
        write_text(html, found.html())
        console.print(f"wrote {html}")
    return 0
