"""Calibration: thresholds that keep a promise, and sublayers that a draft can skip."""

from eecore.calibration.examples import Example, read_examples
from eecore.calibration.procedure import calibrate
from eecore.calibration.similarity import SIMILARITIES, Similarity
from eecore.calibration.skip_search import SkipSearch, SkipStep, search_skipped_sublayers
from eecore.calibration.thoughts import calibrate_thoughts

__all__ = [
    "SIMILARITIES",
    "Example",
    "Similarity",
    "SkipSearch",
    "SkipStep",
    "calibrate",
    "calibrate_thoughts",
    "read_examples",
    "search_skipped_sublayers",
]
