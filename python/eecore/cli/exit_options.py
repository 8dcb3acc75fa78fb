"""The exit mode on a command line: ``confident:0.8``, ``speculative:8,6``, ..."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from eecore.cli.failures import UsageError
from eecore.cli.files import in_model, load_classifier
from eecore.cli.options import option
from eecore.errors import RequestError
from eecore.exit_text import MODES, ExitTextError, Mode, Policies, said_exit
from eecore.values import help_of

if TYPE_CHECKING:
    from eecore.exits import Exit

EXIT_HELP = (
    " | ".join(f"{mode.form} ({mode.summary})" for mode in MODES.values())
    + ". Modes that draft keep the text of full."
)
USUAL_EXIT = "auto on a CPU, full on a GPU"
PANEL = "Exit mode"
LAYERS = "such as 4,8,12-20"
LISTS = {"exit_points", "skip_attention", "skip_mlp"}
MAX_LISTED = 10_000


def _said(mode: str, name: str, *flags: str, form: str = "", **details: Any) -> Any:
    """The option for a field of a mode, with its description, range and default."""
    words = help_of(MODES[mode].policy, name)
    words = words[:1].lower() + words[1:]
    words = f"{words.partition(' (at most')[0]}, {form}" if form else words
    default = MODES[mode].fields.get(name)
    if "show_default" not in details and default not in (None, frozenset()):
        details["show_default"] = f"{default:g}" if isinstance(default, float) else str(default)
    return typer.Option(*flags, help=f"{mode}: {words}.", rich_help_panel=PANEL, **details)


# Options that several commands share; None where not given.
Measure = Annotated[str | None, _said("confident", "measure")]
ExitPoints = Annotated[
    str | None, _said("confident", "exit_points", form=LAYERS, show_default="all")
]
MinExitLayer = Annotated[int | None, _said("confident", "min_exit_layer", min=1)]
DecayTau = Annotated[float | None, _said("confident", "decay_tau", "--decay-tau", "--tau")]
TextPart = Annotated[str | None, _said("confident", "part")]
ClassifierFile = Annotated[
    Path | None,
    typer.Option(
        help="confident: a file from eecore train-classifier, or the name of one in MODEL.",
        show_default="none",
        rich_help_panel=PANEL,
    ),
]
CalibrationFile = Annotated[
    Path | None,
    typer.Option(
        help="confident: a file from eecore calibrate (or the name of one in MODEL), which has a "
        "threshold and its guarantee.",
        rich_help_panel=PANEL,
    ),
]
SkipsFile = Annotated[
    Path | None,
    typer.Option(help="draft-verify: a file from eecore search.", rich_help_panel=PANEL),
]


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """The options of how confidence is measured; None where not given."""

    PANEL: ClassVar[str] = PANEL

    measure: Measure = None
    decay_tau: DecayTau = None
    exit_points: ExitPoints = None
    min_exit_layer: MinExitLayer = None
    classifier: ClassifierFile = None
    part: TextPart = None

    @property
    def given(self) -> list[str]:
        """The names of the options that are given, without ``--exit``."""
        names = [each.name for each in fields(self) if each.name != "exit"]
        return [name for name in names if getattr(self, name) is not None]

    def settings(self, directory: Path | None) -> dict[str, Any]:
        """The options that are given, as fields of a policy."""
        found = {_field(name): getattr(self, name) for name in self.given}
        for name in LISTS & found.keys():
            found[name] = parse_layers(_flag(name), found[name])
        if "classifier" in found:
            found["classifier"] = load_classifier(found["classifier"], directory)
        return found


@dataclass(frozen=True)
class _Said:
    exit: str | None = option(None, EXIT_HELP, show_default=USUAL_EXIT)


@dataclass(frozen=True)
class ExitOptions(MeasureOptions, _Said):
    """``--exit`` and the options of the modes; None where not given."""

    batch_mode: Annotated[str | None, _said("confident", "batch")] = None
    calibration: CalibrationFile = None
    draft_threshold: Annotated[float | None, _said("speculative", "draft_threshold")] = None
    skip_attention: Annotated[str | None, _said("draft-verify", "skip_attention", form=LAYERS)] = (
        None
    )
    skip_mlp: Annotated[str | None, _said("draft-verify", "skip_mlp", form=LAYERS)] = None
    skips: SkipsFile = None

    def __post_init__(self) -> None:
        if self.exit is None:
            mode, got = "", "no --exit"
        else:
            mode, got = self._parsed[0].name, f"--exit {self.exit}"
        for name in self.given:
            kind = "draft-verify" if name == "skips" else _mode_of(_field(name))
            if kind != mode:
                raise UsageError(f"{_flag(name)}: goes with --exit {kind}, got {got}")

    @property
    def _parsed(self) -> tuple[Mode, dict[str, Any]]:
        """The mode in ``--exit``, and the fields in its text."""
        try:
            return said_exit(self.exit or "")
        except ExitTextError as error:
            raise UsageError(f"--{error}") from None

    def policy(self, directory: Path | None = None) -> Exit:
        """The exit policy of the options; an ExitError where they contradict each other.

        Calibrations and classifiers may be given by their names in the model's ``directory``. A
        classifier that was made for another model is an error.
        """
        mode, said = self._parsed
        if self.skips is not None:
            return self._searched(said)
        if mode.is_beside_model:
            return Policies(directory).of(self.exit or "")
        settings = said | self.settings(directory)
        if self.calibration is not None:
            return self._calibrated(directory, settings)
        if self.classifier is not None:
            settings.setdefault("measure", "classifier")
        elif self.measure == "classifier":
            raise UsageError("--classifier: expected a file for --measure classifier, got none")
        if mode.is_partial and settings.keys() <= mode.said.keys():
            raise UsageError(
                f"--exit {mode.name}: expected --skips FILE (from eecore search), or "
                "--skip-attention or --skip-mlp with layers from 0, such as 10,12-15"
            )
        return mode.policy(**settings)

    def _calibrated(self, directory: Path | None, settings: dict[str, Any]) -> Exit:
        from eecore import exits

        assert self.calibration is not None
        if "threshold" in settings:
            raise UsageError(
                "--exit: expected confident without a threshold, which --calibration has, got "
                f"{self.exit!r}"
            )
        for name in self.given:
            if name not in ("classifier", "calibration"):
                raise UsageError(
                    f"{_flag(name)}: expected none beside --calibration, which holds it"
                )
        path = in_model(self.calibration, directory)
        return exits.ConfidentExit.calibrated(path, settings.get("classifier"))

    def _searched(self, said: dict[str, Any]) -> Exit:
        from eecore import SkipSearch

        assert self.skips is not None
        if self.skip_attention is not None or self.skip_mlp is not None:
            raise UsageError("--skips: expected it or --skip-attention/--skip-mlp, got both")
        try:
            return SkipSearch.load(self.skips).policy(said.get("num_drafts"))
        except RequestError as error:
            raise UsageError(f"--skips: {error}") from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _field(name: str) -> str:
    """The policy's field for an option."""
    return "batch" if name == "batch_mode" else name


def _mode_of(name: str) -> str:
    """The mode that has a field."""
    return next(
        mode.name for mode in MODES.values() if name in {each.name for each in fields(mode.policy)}
    )


def parse_layers(flag: str, text: str, *, what: str = "layers") -> tuple[int, ...]:
    """Layers, or other numbers, from ``4,8,12-20``, in ascending order."""
    layers: set[int] = set()
    try:
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            stretch = range(int(first), int(last or first) + 1)
            if not stretch:
                raise ValueError
            if stretch[-1] >= MAX_LISTED:
                raise UsageError(f"{flag}: expected {what} below {MAX_LISTED}, got {text!r}")
            layers.update(stretch)
    except ValueError:
        raise UsageError(f"{flag}: expected {what} such as 4,8,12-20, got {text!r}") from None
    return tuple(sorted(layers))
