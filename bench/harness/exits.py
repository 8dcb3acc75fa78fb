"""Exits of several benchmarks: calibrated exits of a model, and a threshold that no row passes."""

from __future__ import annotations

import math
from pathlib import Path

import eecore
from eecore.exits import Measure
from eecore.files.readable import beside_model

MEASURES: tuple[Measure, ...] = ("softmax", "state", "classifier")
NEVER = math.nextafter(1.0, 0.0)  # a threshold of 1 would not be measured


def calibrated_policies(directory: Path) -> dict[str, eecore.ConfidentExit]:
    """The policies of the calibrations in a model's directory, by measure."""
    found = {}
    for file in sorted(directory.glob("calibration-*.json")):
        calibration, classifier = eecore.Calibration.load(file), None
        if calibration.measure == "classifier":
            place = beside_model(directory, "classifier.safetensors")
            classifier = eecore.ExitClassifier.load(place)
        policy = eecore.ConfidentExit.calibrated(calibration, classifier)
        found[str(calibration.measure)] = policy
    return found
