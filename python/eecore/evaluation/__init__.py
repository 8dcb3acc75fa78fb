"""What exits and modes are worth: quality exit by exit, modes side by side, sweeps."""

from eecore.evaluation.examples import Example, read_examples
from eecore.evaluation.exit_map import ExitMap, MapToken, map_exits
from eecore.evaluation.exit_scores import ExitScore, Scored, score_exits
from eecore.evaluation.layerskip import LayerSkipReport, ModeRow, evaluate_layerskip
from eecore.evaluation.similarity import SIMILARITIES, Similarity
from eecore.evaluation.sweep import Sweep, SweepCell, sweep_speculation
from eecore.evaluation.timed import TimedRun, time_policies

__all__ = [
    "SIMILARITIES",
    "Example",
    "ExitMap",
    "ExitScore",
    "LayerSkipReport",
    "MapToken",
    "ModeRow",
    "Scored",
    "Similarity",
    "Sweep",
    "SweepCell",
    "TimedRun",
    "evaluate_layerskip",
    "map_exits",
    "read_examples",
    "score_exits",
    "sweep_speculation",
    "time_policies",
]
