"""``eecore evaluate calm``: the early-exit framework's tables for a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eecore.cli.failures import UsageError
from eecore.cli.files import beside, check_out, in_model, load_classifier
from eecore.cli.loading import ModelPath, check_path
from eecore.cli.options import LoadOptions, option, takes_options
from eecore.files.whole import write_text
from eecore.lab.commands.evaluate import Prompts, Rounds, show_turn

if TYPE_CHECKING:
    from eecore.calibration_file import Calibration
    from eecore.exits import ConfidentExit
    from eecore.lab.evaluation.timed import TimedRun

CLASSIFIER_FILE = "classifier.safetensors"
BATCH_MODES = {"each": ("each",), "all": ("all",), "both": ("each", "all")}


@dataclass(frozen=True, kw_only=True)
class ConfidentExits:
    """The confident exits of an evaluation: one policy a measure."""

    thresholds: str | None = option(
        None,
        "By measure, as in softmax=0.85,state=0.95,classifier=0.9.",
        show_default="these, the paper's, but where --calibration has one",
    )
    calibration: list[Path] | None = option(
        None,
        "File of eecore calibrate (or the name of one in MODEL), in place of a threshold; one a "
        "measure.",
        show_default="none",
    )
    classifier: Path | None = option(
        None,
        "File of eecore train-classifier.",
        show_default=f"{CLASSIFIER_FILE} in MODEL; without one the measure is left out",
    )

    def policies(self, directory: Path) -> list[ConfidentExit]:
        """The policies for a model's directory, in the order of the paper's Table 1.

        Raises:
            UsageError: the settings contradict each other.
            RequestError: a file cannot be used.
        """
        from eecore.exits import ConfidentExit
        from eecore.lab.evaluation.calm import PAPER_THRESHOLDS

        given = _thresholds(self.thresholds)
        calibrated = _calibrations([in_model(path, directory) for path in self.calibration or ()])
        for measure in given:
            if measure in calibrated:
                raise UsageError(
                    f"--thresholds: expected none for {measure}, which --calibration has"
                )
        file = in_model(self.classifier or Path(CLASSIFIER_FILE), directory)
        learnt = None
        if self.classifier is not None or file.is_file():
            learnt = load_classifier(file, directory)
        elif "classifier" in (given | calibrated):
            raise UsageError(f"--classifier: expected a file, got none, nor is there {file}")
        measures = [name for name in PAPER_THRESHOLDS if name != "classifier" or learnt is not None]
        policies = []
        for measure in measures:
            own = learnt if measure == "classifier" else None
            if measure in calibrated:
                policies.append(ConfidentExit.calibrated(calibrated[measure], own))
                continue
            threshold = given.get(measure, PAPER_THRESHOLDS[measure])
            policies.append(ConfidentExit(threshold, measure, classifier=own))
        return policies


@takes_options
def calm(
    model: ModelPath,
    prompts: Prompts,
    loading: LoadOptions,
    exits: ConfidentExits,
    batch: Annotated[
        str,
        typer.Option(help="Rows exit alone, or the batch together (Algorithm 1): each, all, both"),
    ] = "both",
    batch_size: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Prompts that run together; may be repeated.", show_default="8 and 32"
        ),
    ] = None,
    metric: Annotated[str, typer.Option(help="rougeL, rouge2 or exact.")] = "rougeL",
    rounds: Rounds = 3,
    out: Annotated[
        Path | None,
        typer.Option(help="Also write NAME.json and NAME.md.", metavar="NAME"),
    ] = None,
) -> int:
    """Quality, throughput and latency of confident exits (early-exit framework: Table 1, Figures).

    They run beside full depth and half of the layers.
    """
    directory = check_path(model)
    check_out("--out", out, is_stem=True)
    if batch not in BATCH_MODES:
        raise UsageError(f"--batch: expected {', '.join(BATCH_MODES)}, got {batch!r}")

    from eecore.calibration import SIMILARITIES
    from eecore.lab.evaluation.calm import evaluate_calm
    from eecore.models import read_config

    if metric not in SIMILARITIES:
        raise UsageError(f"--metric: expected {', '.join(SIMILARITIES)}, got {metric!r}")
    examples = prompts.read()
    policies = exits.policies(directory)
    config = read_config(directory)
    for policy in policies:
        policy.check(config)
    calibrated = next((policy for policy in policies if policy.calibration is not None), None)
    report = evaluate_calm(
        loading.load(directory, calibrated),
        examples,
        policies,
        batch_modes=BATCH_MODES[batch],  # type: ignore[arg-type]
        batch_sizes=tuple(dict.fromkeys(batch_size or (8, 32))),
        metric=metric,
        max_tokens=prompts.max_tokens,
        rounds=rounds,
        progress=_show,
    )
    print(report.markdown())
    if out is not None:
        write_text(beside(out, "json"), json.dumps(asdict(report), indent=1) + "\n")
        write_text(beside(out, "md"), report.markdown() + "\n")
    return 0


def _thresholds(text: str | None) -> dict[str, float]:
    """Thresholds by measure."""
    from eecore.lab.evaluation.calm import PAPER_THRESHOLDS

    found: dict[str, float] = {}
    for part in [] if text is None else text.split(","):
        measure, _, number = part.partition("=")
        if measure not in PAPER_THRESHOLDS or measure in found:
            known = ", ".join(PAPER_THRESHOLDS)
            raise UsageError(f"--thresholds: expected each of {known} once at most, got {text!r}")
        try:
            found[measure] = float(number)
        except ValueError:
            raise UsageError(
                f"--thresholds: expected numbers such as softmax=0.85,state=0.95, got {text!r}"
            ) from None
    return found


def _calibrations(files: Sequence[Path]) -> dict[str, Calibration]:
    """Calibrations by measure."""
    from eecore.calibration_file import Calibration

    found: dict[str, Calibration] = {}
    for file in files:
        calibration = Calibration.load(file)
        if calibration.measure in found:
            raise UsageError(
                f"--calibration: expected one a measure, got two for {calibration.measure}"
            )
        found[calibration.measure] = calibration
    return found


def _show(batch_size: int, number: int, run: TimedRun) -> None:
    show_turn(number, run, f"batches of {batch_size}, ")
