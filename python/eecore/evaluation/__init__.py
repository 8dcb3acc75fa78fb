"""What exits and modes are worth: quality exit by exit, modes side by side, sweeps; and which
threshold keeps a promise, which sublayers a draft can leave out.
"""

from eecore.evaluation.calibration import calibrate
from eecore.evaluation.calm import PAPER_THRESHOLDS, evaluate_calm
from eecore.evaluation.calm_report import CalmReport, CalmRow, Speed
from eecore.evaluation.examples import Example, read_examples
from eecore.evaluation.exit_map import ExitMap, MapToken, map_exits
from eecore.evaluation.exit_scores import ExitScore, Scored, score_exits
from eecore.evaluation.layerskip import LayerSkipReport, ModeRow, evaluate_layerskip
from eecore.evaluation.similarity import SIMILARITIES, Similarity
from eecore.evaluation.skip_search import SkipSearch, SkipStep, search_skipped_sublayers
from eecore.evaluation.sweep import (
    Sweep,
    SweepCell,
    default_exit_layers,
    known_exits,
    sweep_speculation,
)
from eecore.evaluation.timed import TimedRun, time_policies

__all__ = [
    "PAPER_THRESHOLDS",
    "SIMILARITIES",
    "CalmReport",
    "CalmRow",
    "Example",
    "ExitMap",
    "ExitScore",
    "LayerSkipReport",
    "MapToken",
    "ModeRow",
    "Scored",
    "Similarity",
    "SkipSearch",
    "SkipStep",
    "Speed",
    "Sweep",
    "SweepCell",
    "TimedRun",
    "calibrate",
    "default_exit_layers",
    "evaluate_calm",
    "evaluate_layerskip",
    "known_exits",
    "map_exits",
    "read_examples",
    "score_exits",
    "search_skipped_sublayers",
    "sweep_speculation",
    "time_policies",
]
