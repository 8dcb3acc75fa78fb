"""What calibration and evaluation share: examples from files, and how alike two texts are."""

from eecore.evaluation.examples import Example, read_examples
from eecore.evaluation.similarity import SIMILARITIES, Similarity

__all__ = ["SIMILARITIES", "Example", "Similarity", "read_examples"]
