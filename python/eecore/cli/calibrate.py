"""``eecore calibrate``: a threshold for confident exit that comes with a guarantee."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eecore.cli.exit_options import MeasureOptions
from eecore.cli.failures import UsageError
from eecore.cli.files import check_out
from eecore.cli.loading import ModelPath, check_path
from eecore.cli.options import LoadOptions, option, takes_options

if TYPE_CHECKING:
    from eecore.calibration_file import CalibrationStep


@dataclass(frozen=True)
class Promise:
    """The guarantee that the threshold gives."""

    delta: float = option(0.02, "Tolerated expected loss of a prompt.")
    epsilon: float = option(0.05, "Tolerated probability that the loss still exceeds delta.")
    loss: str = option(
        "textual",
        "textual: 1 - similarity to the full model's text; risk: how much worse the text matches "
        "the target than the full model's does.",
    )
    similarity: str = option("rougeL", "rougeL, rouge2 or exact.")
    max_tokens: int = option(64, "New tokens per prompt.", min=1)


@takes_options
def calibrate(
    model: ModelPath,
    data: Annotated[
        Path, typer.Option(help='JSON lines of {"input": prompt, "target": label}, unseen so far.')
    ],
    out: Annotated[Path, typer.Option(help="Where to write the calibration, as JSON.")] = Path(
        "calibration.json"
    ),
    grid: Annotated[
        str | None, typer.Option(help="Thresholds, descending from 1: 1,0.9,0.8", show_default="21")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Prompts to use.", show_default="all")
    ] = None,
    *,
    promise: Promise,
    measured: MeasureOptions,
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
    examples = read_examples(data, limit=limit, needs_target=promise.loss == "risk")
    check_settings(examples, **asdict(promise), grid=thresholds)
    check_number(len(examples), promise.delta, promise.epsilon)
    settings = measured.settings(directory)
    loaded = loading.load(directory)
    found = run(loaded, examples, **asdict(promise), grid=thresholds, **settings, progress=_show)
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
