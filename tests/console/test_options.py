"""Options of a command as dataclasses: typer sees each of them, the command gets the objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer
from typer.testing import CliRunner

from eecore.console.options import LoadOptions, option, takes_options


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast."""

    PANEL: ClassVar[str] = "Pace of it"
    steps: list[int] = option(help="Each one.")
    rate: float = option(0.5, "How fast.", min=0, max=1)
    is_quick: bool = option(False)


GIVEN: list[object] = []


@takes_options
def walk(
    where: Annotated[str, typer.Argument()],
    pace: Pace,
    loading: LoadOptions,
    times: Annotated[int, typer.Option()] = 1,
) -> int:
    """Walk somewhere."""
    GIVEN[:] = [where, pace, loading, times]
    return 0


def ran(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(walk)
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_a_command_gets_its_options_as_objects() -> None:
    code, _ = ran("home", "--steps", "3", "--steps", "5", "--is-quick", "--threads", "2")
    assert code == 0
    pace, loading = Pace(steps=[3, 5], rate=0.5, is_quick=True), LoadOptions(threads=2)
    assert ["home", pace, loading, 1] == GIVEN


def test_what_is_wrong_is_refused_as_for_any_option() -> None:
    for wrong in (["--rate", "2"], ["--no-is-quick"], ["--threads", "x"]):
        assert ran("home", "--steps", "3", *wrong)[0] == 2
    assert ran("home")[0] == 2  # --steps is missing


def test_a_panel_has_its_options() -> None:
    _, shown = ran("--help")
    panel = shown.partition("Pace of it")[2]
    for name in ("--steps", "--rate", "--is-quick", "How fast.", "[required]"):
        assert name in panel
    assert "--device" in shown.partition("Pace of it")[0]
    assert "Walk somewhere." in shown
