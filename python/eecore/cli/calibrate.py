"""``eecore calibrate``: a threshold that comes with a guarantee, for confident exit or for the ends
of thoughts.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from eecore.cli.exit_options import MeasureOptions
from eecore.cli.failures import UsageError
from eecore.cli.files import check_out
from eecore.cli.loading import ModelPath, check_path
from eecore.cli.options import LoadOptions, given_flags, option, takes_options

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


@dataclass(frozen=True)
class Thoughts:
    """When a thought may end."""

    PANEL: ClassVar[str] = "Thoughts"
    think: Path | None = option(
        None,
        'JSON lines of {"question": text, "answer": text}, of which the answer may be missing: '
        "find when a thought may end, in place of a threshold for confident exit.",
    )
    max_loss: float = option(
        0.02, "Tolerated share of right answers lost; of other answers, unless all are given."
    )
    confidence: float = option(0.9, "Least probability that the loss is not above it.")
    thinking_budget: int | None = option(
        None,
        "Tokens of a thought.",
        min=1,
        show_default="2048, or what the context leaves",
    )
    every: int = option(64, "Fewest tokens between probes; fewer suit short thoughts.", min=1)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of :func:`eecore.calibrate_thoughts`, apart from the rule."""
        names = ("max_loss", "confidence", "thinking_budget")
        return {name: getattr(self, name) for name in names}


@takes_options
def calibrate(
    model: ModelPath,
    data: Annotated[
        Path | None,
        typer.Option(help='JSON lines of {"input": prompt, "target": label}, unseen so far.'),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where to write the calibration, as JSON.",
            show_default="calibration.json; with --think beside the model",
        ),
    ] = None,
    grid: Annotated[
        str | None, typer.Option(help="Thresholds, descending from 1: 1,0.9,0.8", show_default="21")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Prompts to use.", show_default="all")
    ] = None,
    *,
    promise: Promise,
    measured: MeasureOptions,
    thoughts: Thoughts,
    loading: LoadOptions,
) -> int:
    """Find the lowest threshold that keeps the loss below delta (Learn then Test, CALM §4).

    Then: generate --exit confident --calibration FILE. With --think: when a thought may end.
    """
    directory = check_path(model)
    if (data is None) == (thoughts.think is None):
        raise UsageError(
            f"--data: expected it, or --think in its place, got {'both' if data else 'neither'}"
        )
    others = given_flags(thoughts)
    if data is None:
        others = given_flags(promise) + given_flags(measured) + ["--grid"] * (grid is not None)
    if others:
        raise UsageError(f"{others[0]}: expected none with {'--data' if data else '--think'}")
    if data is None:
        return _calibrate_thoughts(directory, thoughts, out, limit, loading)
    out = out or Path("calibration.json")
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


def _calibrate_thoughts(
    directory: Path, thoughts: Thoughts, out: Path | None, limit: int | None, loading: LoadOptions
) -> int:
    """Find when a thought may end."""
    from eecore.calibration import read_examples
    from eecore.calibration.thoughts import calibrate_thoughts, check_promise
    from eecore.calibration_file import ThoughtCalibration
    from eecore.thought_stop import ThoughtStop

    out = out or ThoughtCalibration.file_of(directory)
    check_out("--out", out)
    assert thoughts.think is not None
    stop = ThoughtStop(1.0, every=thoughts.every)
    questions = read_examples(thoughts.think, limit=limit, fields=("question", "answer"))
    check_promise(len(questions), thoughts.max_loss, thoughts.confidence)
    found = calibrate_thoughts(loading.load(directory), questions, stop, **thoughts.settings)
    found.save(out)
    rule = found.stop
    ends = f"a thought ends at a confidence of {rule.threshold:g}, less where probes agree"
    print(
        f"{'no thought ends early' if rule.records else ends}: "
        f"{found.promise}; it saves {found.saved:.0%} of their thinking tokens; wrote {out}"
    )
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
