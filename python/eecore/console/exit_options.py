"""The exit mode as said on a command line: ``confident:0.8``, ``speculative:8,6``, ..."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eecore.console.failures import UsageError
from eecore.console.model_files import in_model, load_classifier
from eecore.errors import RequestError

if TYPE_CHECKING:
    from eecore.exits import Exit, ExitClassifier

__all__ = [
    "EXIT_HELP",
    "PANEL",
    "USUAL_EXIT",
    "CalibrationFile",
    "ClassifierFile",
    "DecayTau",
    "DraftHeadDirectory",
    "ExitOptions",
    "ExitPoints",
    "Measure",
    "MinExitLayer",
    "SkipsFile",
    "parse_exit_points",
    "parse_layers",
]

EXIT_HELP = (
    "full | fixed:E (always stop after layer E) | confident[:THRESHOLD] (stop once confident; 1 "
    "never) | speculative:E,D (draft D tokens with E layers, verify with all) | draft-verify[:D] "
    "(draft with some sublayers left out) | lookup[:D] (draft what followed the last tokens where "
    "they occurred before) | head[:D] (draft with the head that eecore train-exits made) | "
    "auto[:D] (whatever is fastest of full, speculative, lookup and head). The last five keep the "
    "text of full."
)
USUAL_EXIT = "auto on a CPU, full on a GPU"
PANEL = "Exit mode"
# Options of every command that has to do with exits; None where not given.
Measure = Annotated[
    str | None,
    typer.Option(
        help="confident: softmax | state | classifier | cut.",
        show_default="softmax",
        rich_help_panel=PANEL,
    ),
]
ExitPoints = Annotated[
    str | None,
    typer.Option(
        help="confident: the layers to measure after, such as 4,8,12-20.",
        show_default="all",
        rich_help_panel=PANEL,
    ),
]
MinExitLayer = Annotated[
    int | None,
    typer.Option(
        min=1, help="confident: the earliest exit.", show_default="1", rich_help_panel=PANEL
    ),
]
DecayTau = Annotated[
    float | None,
    typer.Option(
        "--decay-tau",
        "--tau",
        help="confident: tau of CALM's decaying threshold, 4 in its summaries; 0: none.",
        show_default="0",
        rich_help_panel=PANEL,
    ),
]
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
DraftHeadDirectory = Annotated[
    str | None,
    typer.Option(
        help="head, auto: a directory that eecore train-exits made; none.",
        show_default="the one beside the model, or one that ships for it",
        rich_help_panel=PANEL,
    ),
]
BELONGS_TO = {
    "measure": "confident",
    "batch_mode": "confident",
    "decay_tau": "confident",
    "exit_points": "confident",
    "min_exit_layer": "confident",
    "classifier": "confident",
    "calibration": "confident",
    "draft_threshold": "speculative",
    "skip_attention": "draft-verify",
    "skip_mlp": "draft-verify",
    "skips": "draft-verify",
}
MOST_LAYERS = 10_000
KINDS = ("full", "fixed", "confident", "speculative", "draft-verify", "lookup", "head", "auto")


@dataclass(frozen=True)
class ExitOptions:
    """``--exit`` and the options that go with it; None where not given."""

    exit: str | None = None
    measure: str | None = None
    batch_mode: str | None = None
    decay_tau: float | None = None
    exit_points: str | None = None
    min_exit_layer: int | None = None
    classifier: Path | None = None
    calibration: Path | None = None
    draft_threshold: float | None = None
    skip_attention: str | None = None
    skip_mlp: str | None = None
    skips: Path | None = None

    def __post_init__(self) -> None:
        if self.exit is not None and self.kind not in KINDS:
            raise UsageError(f"--exit: expected {', '.join(KINDS)}, got {self.exit!r}")
        for option in fields(self):
            kind = BELONGS_TO.get(option.name, self.kind)
            if getattr(self, option.name) is not None and kind != self.kind:
                flag = "--" + option.name.replace("_", "-")
                raise UsageError(f"{flag}: goes with --exit {kind}, got {self._said_exit}")

    @property
    def _said_exit(self) -> str:
        return "no --exit" if self.exit is None else f"--exit {self.exit}"

    @property
    def kind(self) -> str:
        return (self.exit or "").partition(":")[0]

    @property
    def _numbers(self) -> list[str]:
        text = (self.exit or "").partition(":")[2]
        return text.split(",") if text else []

    def policy(self, directory: Path | None = None) -> Exit:
        """The exit policy that is said; an ExitError when it contradicts itself.

        Calibrations and classifiers may be named as they are called in the model's ``directory``,
        and a classifier that was made for another model is an error.
        """
        if self.kind == "draft-verify":
            return self._draft_and_verify()
        if self.kind == "confident":
            return self._confident(directory)
        policy = self._said()
        if self.draft_threshold is not None:
            policy = replace(policy, draft_threshold=self.draft_threshold)  # type: ignore[call-arg]
        return policy

    def _said(self) -> Exit:
        """The policy of the text alone."""
        from eecore.exit_text import ExitTextError, parse_exit

        try:
            return parse_exit(self.exit or "")
        except ExitTextError as error:
            raise UsageError(f"--{error}") from None

    def _confident(self, directory: Path | None) -> Exit:
        if self.calibration is not None:
            return self._calibrated(in_model(self.calibration, directory), directory)
        said = self._said()
        measure = self.measure or ("classifier" if self.classifier else "softmax")
        if measure == "classifier" and self.classifier is None:
            raise UsageError("--classifier: expected a file for --measure classifier, got none")
        return replace(
            said,  # type: ignore[call-arg]
            measure=measure,
            batch=self.batch_mode or "each",
            decay_tau=self.decay_tau or 0.0,
            exit_points=parse_exit_points(self.exit_points),
            min_exit_layer=self.min_exit_layer or 1,
            classifier=self._classifier(directory),
        )

    def _calibrated(self, path: Path, directory: Path | None) -> Exit:
        from eecore import exits

        self._expect(0, "confident alone: the threshold is that of --calibration")
        settings = ("measure", "batch_mode", "decay_tau", "exit_points", "min_exit_layer")
        for name in settings:
            if getattr(self, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag}: expected none beside --calibration, which holds it")
        return exits.ConfidentExit.calibrated(path, self._classifier(directory))

    def _classifier(self, directory: Path | None) -> ExitClassifier | None:
        return None if self.classifier is None else load_classifier(self.classifier, directory)

    def _draft_and_verify(self) -> Exit:
        from eecore import DraftAndVerify, SkipSearch

        self._expect((0, 1), "draft-verify or draft-verify:D, such as draft-verify:8")
        num_drafts = self._integer(0) if self._numbers else None
        if self.skips is not None:
            if self.skip_attention is not None or self.skip_mlp is not None:
                raise UsageError("--skips: expected it or --skip-attention/--skip-mlp, got both")
            try:
                return SkipSearch.load(self.skips).policy(num_drafts)
            except RequestError as error:
                raise UsageError(f"--skips: {error}") from None
        if self.skip_attention is None and self.skip_mlp is None:
            raise UsageError(
                "--exit draft-verify: expected --skips FILE (from eecore search), or "
                "--skip-attention or --skip-mlp with layers from 0, such as 10,12-15"
            )
        return DraftAndVerify(
            frozenset(parse_layers("--skip-attention", self.skip_attention or "")),
            frozenset(parse_layers("--skip-mlp", self.skip_mlp or "")),
            num_drafts=8 if num_drafts is None else num_drafts,
        )

    def _expect(self, count: int | tuple[int, ...], form: str) -> None:
        if len(self._numbers) not in (count if isinstance(count, tuple) else (count,)):
            raise UsageError(f"--exit: expected {form}, got {self.exit!r}")

    def _integer(self, index: int) -> int:
        try:
            return int(self._numbers[index])
        except ValueError:
            raise UsageError(f"--exit: expected whole numbers, got {self.exit!r}") from None


def parse_exit_points(text: str | None) -> tuple[int, ...] | None:
    """Layers of ``--exit-points``; None where it is not given."""
    return None if text is None else parse_layers("--exit-points", text)


def parse_layers(flag: str, text: str, *, what: str = "layers") -> tuple[int, ...]:
    """Layers, or other numbers, from ``4,8,12-20``, in ascending order."""
    layers: set[int] = set()
    try:
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            stretch = range(int(first), int(last or first) + 1)
            if not stretch:
                raise ValueError
            if stretch[-1] >= MOST_LAYERS:
                raise UsageError(f"{flag}: expected {what} below {MOST_LAYERS}, got {text!r}")
            layers.update(stretch)
    except ValueError:
        raise UsageError(f"{flag}: expected {what} such as 4,8,12-20, got {text!r}") from None
    return tuple(sorted(layers))
