"""``eecore calibrate``: a threshold for confident exit that comes with a guarantee."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eecore.console.exit_options import (
    ClassifierFile,
    DecayTau,
    ExitPoints,
    Measure,
    MinExitLayer,
    parse_exit_points,
)
from eecore.console.failures import UsageError
from eecore.console.files import check_out
from eecore.console.loading import ModelPath, check_path
from eecore.console.model_files import load_classifier
from eecore.console.options import LoadOptions, takes_options

if TYPE_CHECKING:
    from eecore.calibration_file import CalibrationStep


@takes_options
def calibrate(
    model: ModelPath,
    data: Annotated[
        Path, typer.Option(help='JSON lines of {"input": prompt, "target": label}, unseen so far.')
    ],
    out: Annotated[Path, typer.Option(help="Where the calibration goes, as JSON.")] = Path(
        "calibration.json"
    ),
    measure: Measure = None,
    classifier: ClassifierFile = None,
    delta: Annotated[float, typer.Option(help="Tolerated expected loss of a prompt.")] = 0.02,
    epsilon: Annotated[
        float, typer.Option(help="Tolerated probability that the loss exceeds delta all the same.")
    ] = 0.05,
    loss: Annotated[
        str,
        typer.Option(
            help="textual: 1 - similarity to the full model's text; risk: how much worse than "
            "the full model's the text is, by the target."
        ),
    ] = "textual",
    similarity: Annotated[str, typer.Option(help="rougeL, rouge2 or exact.")] = "rougeL",
    grid: Annotated[
        str | None, typer.Option(help="Thresholds, descending from 1: 1,0.9,0.8", show_default="21")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens a prompt.")] = 64,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Prompts to use.", show_default="all")
    ] = None,
    decay_tau: DecayTau = None,
    exit_points: ExitPoints = None,
    min_exit_layer: MinExitLayer = None,
    *,
    loading: LoadOptions,
) -> int:
    """Find the lowest threshold that keeps the loss below delta (Learn then Test, CALM §4).

    Then: generate --exit confident --calibration FILE.
    """
    directory = check_path(model)
    check_out("--out", out)

    from eecore.calibration import read_examples
    from eecore.calibration.procedure import DEFAULT_GRID, check_number, check_settings
    from eecore.calibration.procedure import calibrate as run

    thresholds = DEFAULT_GRID if grid is None else _numbers("--grid", grid)
    examples = read_examples(data, limit=limit, needs_target=loss == "risk")
    check_settings(examples, delta, epsilon, loss, similarity, thresholds, max_tokens)
    check_number(len(examples), delta, epsilon)
    points = parse_exit_points(exit_points)
    learnt = None if classifier is None else load_classifier(classifier, directory)
    loaded = loading.load(model)
    found = run(
        loaded,
        examples,
        measure=measure or "softmax",  # type: ignore[arg-type]
        delta=delta,
        epsilon=epsilon,
        loss=loss,  # type: ignore[arg-type]
        similarity=similarity,
        grid=thresholds,
        max_tokens=max_tokens,
        decay_tau=decay_tau or 0.0,
        exit_points=points,
        min_exit_layer=min_exit_layer or 1,
        classifier=learnt,
        progress=_show,
    )
    found.save(out)
    print(f"threshold {found.threshold:g}: {found.promise}; wrote {out}")
    return 0


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"{option}: expected numbers such as 1,0.9,0.8, got {text!r}") from None


def _show(step: CalibrationStep) -> None:
    print(
        f"threshold {step.threshold:g}: loss {step.mean_loss:.4f}, p {step.p_value:.4f}, mean "
        f"exit layer {step.mean_exit_layer:.2f}, {'passed' if step.passed else 'failed'}",
        file=sys.stderr,
        flush=True,
    )
