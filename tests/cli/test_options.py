"""Options of commands as dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from eecore.cli.options import option, takes_options

Threads = Annotated[int | None, typer.Option(min=1, help="How many.")]


@dataclass(frozen=True)
class Printed:
    """Options with a panel of their own."""

    PANEL: ClassVar[str] = "What is printed"

    json: bool = option(False, "As JSON.")
    colour: bool = option(True, "In colour.", "--colour/--no-colour")
    words: list[str] | None = option(None, "Words; may be repeated.", "--word", "-w")
    threads: Threads = None


@dataclass(frozen=True, kw_only=True)
class Needed:
    """Options without a panel, one of which has to be given."""

    size: float = option(help="A size.", min=0)
    name: str = option("a", "A name.")


def command(model: str, *, printed: Printed, needed: Needed, last: int = 3) -> int:
    """The command."""
    print(model, printed, needed, last)
    return 0


def invoked(*arguments: str) -> Any:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(takes_options(command))
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def test_a_command_gets_its_dataclasses() -> None:
    assert invoked("m", "--size", "2").output.strip() == f"m {Printed()} {Needed(size=2.0)} 3"
    given = ("--json", "--no-colour", "-w", "x", "-w", "y", "--threads", "2", "--name", "b")
    got = invoked("m", *given, "--size", "0.5", "--last", "4").output
    printed = Printed(True, False, ["x", "y"], 2)
    assert got.strip() == f"m {printed} {Needed(size=0.5, name='b')} 4"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["m"], "Missing option '--size'"),
        (["m", "--size", "-1"], "size"),
        (["m", "--size", "1", "--threads", "0"], "threads"),
        (["m", "--size", "1", "--no-json"], "No such option"),
    ],
)
def test_their_rules_are_typers(arguments: list[str], said: str) -> None:
    done = invoked(*arguments)
    assert done.exit_code == 2
    assert said in done.output
