"""What exits and modes are worth: quality exit by exit, modes side by side, sweeps."""

from eecore.calibration.exit_scores import ExitScore, Scored, score_exits
from eecore.lab.evaluation.calm import PAPER_THRESHOLDS, evaluate_calm
from eecore.lab.evaluation.calm_report import CalmReport, CalmRow, Speed
from eecore.lab.evaluation.exit_map import ExitMap, MapToken, map_exits
from eecore.lab.evaluation.layerskip import LayerSkipReport, ModeRow, evaluate_layerskip
from eecore.lab.evaluation.sweep import (
    Sweep,
    SweepCell,
    default_exit_layers,
    known_exits,
    sweep_speculation,
)
from eecore.lab.evaluation.timed import TimedRun, time_policies

__all__ = [
    "PAPER_THRESHOLDS",
    "CalmReport",
    "CalmRow",
    "ExitMap",
    "ExitScore",
    "LayerSkipReport",
    "MapToken",
    "ModeRow",
    "Scored",
    "Speed",
    "Sweep",
    "SweepCell",
    "TimedRun",
    "default_exit_layers",
    "evaluate_calm",
    "evaluate_layerskip",
    "known_exits",
    "map_exits",
    "score_exits",
    "sweep_speculation",
    "time_policies",
]
