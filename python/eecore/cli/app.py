"""The ``eecore`` command: its subcommands, and what they have in common."""

from __future__ import annotations

import sys
import warnings
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from eecore.cli.failures import EXIT_CODES, UsageError, failure, reports_failures
from eecore.cli.process import kept, say

COMMANDS = {
    "chat": "cli.chat:chat",
    "generate": "cli.generate:generate",
    "serve": "cli.serve:serve",
    "info": "cli.info:info",
    "convert": "cli.convert:convert",
    "search": "cli.search:search",
    "train": "lab.commands.train:train",
    "train-classifier": "lab.commands.train_classifier:train_classifier",
    "train-exits": "lab.commands.train_exits:train_exits",
    "verify": "lab.commands.verify:verify",
    "calibrate": "cli.calibrate:calibrate",
    "sweep": "lab.commands.evaluate:sweep",
    "evaluate": "lab.commands.evaluate:evaluate",
}
"""The module and the function of each command, imported when the command is run or listed."""


@cache
def command_line(*names: str) -> Any:
    """The command, with the subcommands of ``names``, or with all."""
    app = typer.Typer(
        name="eecore",
        help="Run language models with just enough layers for each token.",
        epilog=EXIT_CODES,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        callback=_options,
    )
    for name, place in COMMANDS.items():
        if not names or name in names:
            module, _, function = place.partition(":")
            with kept():
                command = getattr(import_module(f"eecore.{module}"), function)
            app.command(name, epilog=EXIT_CODES)(reports_failures(command))
    return typer.main.get_command(app)


def run(arguments: list[str]) -> int:
    """Run one command line; returns the exit code."""
    warnings.showwarning = _show_warning
    try:
        for argument in arguments:
            if "\0" in argument:
                raise UsageError(f"expected arguments without NUL, got {argument[:80]!r}")
        asked = COMMANDS.keys() & set(arguments[:1])
        command = command_line(*asked)
        code = int(command(args=arguments, prog_name="eecore", standalone_mode=False) or 0)
        sys.stdout.flush()
        return code
    except BaseException as error:
        return failure(error)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            number = version("eecore")
        except PackageNotFoundError:  # a checkout that was built in place
            from eecore import build_info

            number = build_info()["version"]
        print(f"eecore {number}")
        raise typer.Exit


def _options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def _show_warning(message: Warning | str, *_where: Any, **_more: Any) -> None:
    say(f"warning: {message}")
