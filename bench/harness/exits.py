"""Exits of several benchmarks: calibrated exits of a model, and checks that no row passes."""

from __future__ import annotations

import math
from pathlib import Path

import eecore
from eecore.exits import Measure
from eecore.files.readable import beside_model

MEASURES: tuple[Measure, ...] = ("softmax", "state", "classifier")
NEVER = math.nextafter(1.0, 0.0)  # a threshold of 1 would not be measured


def calibrated_policies(directory: Path) -> dict[str, eecore.ConfidentExit]:
    """The policy of each measure; SystemExit with the command that makes a missing file."""
    classifier_file = beside_model(directory, "classifier.safetensors")
    policies = {}
    for measure in MEASURES:
        file = directory / f"calibration-{measure}.json"
        command = f"eecore calibrate {directory} --measure {measure} --data DATA --out {file}"
        classifier = None
        if measure == "classifier":
            training = f"eecore train-classifier {directory} --data DATA --out {classifier_file}"
            require(classifier_file, training)
            classifier = eecore.ExitClassifier.load(classifier_file)
            command += f" --classifier {classifier_file}"
        require(file, command)
        policies[measure] = eecore.ConfidentExit.calibrated(file, classifier)
    return policies


def require(file: Path, command: str) -> None:
    if not file.is_file():
        raise SystemExit(
            f"{file}: expected a file, got nothing; make it with\n  {command}\n"
            "or leave calibrated exits out with --skip-calibrated"
        )
