"""The ``eecore`` command: its subcommands, and what they have in common."""

from __future__ import annotations

import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from eecore.cli import calibrate, convert, generate, info, search, serve
from eecore.console.failures import EXIT_CODES, UsageError, failure, reports_failures
from eecore.console.streams import say
from eecore.lab.commands import (
    evaluate,
    evaluate_calm,
    exits,
    train,
    train_classifier,
    train_exits,
)

__all__ = ["run"]

app = typer.Typer(
    name="eecore",
    help="Run language models with just enough layers for each token.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _command in (
    ("generate", generate.generate),
    ("serve", serve.serve),
    ("info", info.info),
    ("convert", convert.convert),
    ("search", search.search),
    ("train", train.train),
    ("train-classifier", train_classifier.train_classifier),
    ("train-exits", train_exits.train_exits),
    ("calibrate", calibrate.calibrate),
    ("sweep", evaluate.sweep),
    ("exits", exits.exits),
):
    app.command(_name, epilog=EXIT_CODES)(reports_failures(_command))

_evaluations = typer.Typer(
    help="The papers' tables, for any model and data.", no_args_is_help=True, epilog=EXIT_CODES
)
_evaluations.command("layerskip", epilog=EXIT_CODES)(reports_failures(evaluate.layerskip))
_evaluations.command("calm", epilog=EXIT_CODES)(reports_failures(evaluate_calm.calm))
app.add_typer(_evaluations, name="evaluate")


def run(arguments: list[str]) -> int:
    """Run one command line; returns the exit code."""
    warnings.showwarning = _show_warning
    try:
        for argument in arguments:
            if "\0" in argument:
                raise UsageError(f"expected arguments without NUL, got {argument[:80]!r}")
        return int(_whole()(args=arguments, prog_name="eecore", standalone_mode=False) or 0)
    except BaseException as error:
        return failure(error)


@cache
def _whole() -> Any:
    """The command with its subcommands, made of their signatures once."""
    return typer.main.get_command(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            number = version("eecore")
        except PackageNotFoundError:  # a checkout that was built in place
            from eecore import build_info

            number = build_info()["version"]
        print(f"eecore {number}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def _show_warning(message: Warning | str, *_where: Any, **_more: Any) -> None:
    say(f"warning: {message}")
