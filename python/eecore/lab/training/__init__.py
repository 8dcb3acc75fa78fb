"""Training for early exit: LayerSkip's and CALM's recipes, as pieces and as a loop.

The parts work alone, on any transformers model that :class:`ExitModel` supports: layer dropout
(:func:`drop_layers`), losses over exits (:class:`EarlyExitLoss`, :class:`CalmLoss`) and over loops
(:class:`LoopedLoss`, :class:`GateLoss`), the exit classifier (:func:`train_exit_classifier`).
:func:`train` puts them together. Needs the extra ``lab``: ``pip install '.[lab]'``.
"""

from eecore.lab.training.calm import (
    CalmLoss,
    save_classifier,
    train_exit_classifier,
)
from eecore.lab.training.data import Batch, BatchOrder, TokenData, collate, read_data
from eecore.lab.training.early_exit_loss import (
    EarlyExitLoss,
    LastLayerLoss,
    LossWeights,
    Targets,
    weighted_exit_loss,
)
from eecore.lab.training.exit_model import ExitModel, ExitScores
from eecore.lab.training.layer_dropout import LayerDropout, drop_layers
from eecore.lab.training.loading import StartingPoint, load_starting_point
from eecore.lab.training.looped_loss import GateLoss, LoopedLoss
from eecore.lab.training.model_run import TrainingResult, state_path, train
from eecore.lab.training.recipe import LoraSettings, TrainingConfig

__all__ = [
    "Batch",
    "BatchOrder",
    "CalmLoss",
    "EarlyExitLoss",
    "ExitModel",
    "ExitScores",
    "GateLoss",
    "LastLayerLoss",
    "LayerDropout",
    "LoopedLoss",
    "LoraSettings",
    "LossWeights",
    "StartingPoint",
    "Targets",
    "TokenData",
    "TrainingConfig",
    "TrainingResult",
    "collate",
    "drop_layers",
    "load_starting_point",
    "read_data",
    "save_classifier",
    "state_path",
    "train",
    "train_exit_classifier",
    "weighted_exit_loss",
]
