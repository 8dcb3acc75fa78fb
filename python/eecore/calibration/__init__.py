"""Calibration: which threshold keeps a promise, which sublayers a draft can leave out."""

from eecore.calibration.examples import Example, read_examples
from eecore.calibration.procedure import calibrate
from eecore.calibration.similarity import SIMILARITIES, Similarity
from eecore.calibration.skip_search import SkipSearch, SkipStep, search_skipped_sublayers

__all__ = [
    "SIMILARITIES",
    "Example",
    "Similarity",
    "SkipSearch",
    "SkipStep",
    "calibrate",
    "read_examples",
    "search_skipped_sublayers",
]
