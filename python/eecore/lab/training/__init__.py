"""Training for early exit: LayerSkip's and CALM's recipes, as pieces and as a loop.

The pieces work alone, on any transformers model that :class:`ExitModel` knows: layer dropout
(:func:`drop_layers`), losses over exits (:class:`EarlyExitLoss`, :class:`CalmLoss`), the exit
classifier (:func:`train_exit_classifier`). :func:`train` puts them together. Needs the extra
``train``: ``pip install 'eecore[train]'``.
"""

from eecore.lab.training.calm import (
    CalmLoss,
    ClassifierConfig,
    agreement_labels,
    classifier_loss,
    save_classifier,
    train_exit_classifier,
)
from eecore.lab.training.data import Batch, BatchOrder, TokenData, collate, read_data
from eecore.lab.training.draft_head import DraftHead, HeadSizes
from eecore.lab.training.early_exit_loss import (
    EarlyExitLoss,
    LastLayerLoss,
    LossWeights,
    Targets,
    early_exit_backward,
    early_exit_loss,
    layer_scale,
)
from eecore.lab.training.evaluation import ExitScores, evaluate_exits
from eecore.lab.training.exit_model import ExitModel
from eecore.lab.training.frozen_model import (
    FrozenModel,
    RunningModel,
    is_quantised,
    load_running_model,
)
from eecore.lab.training.head_keys import choose_attended
from eecore.lab.training.head_pack import HeadFacts, plot_head, save_head
from eecore.lab.training.head_run import HeadConfig, HeadReport, HeadRun, steps_in
from eecore.lab.training.head_states import (
    HeadStates,
    MappedStates,
    StatesSettings,
    WrittenText,
    collect_states,
    open_states,
)
from eecore.lab.training.interrupts import stop_on_signals
from eecore.lab.training.layer_dropout import LayerDropout, LayerDropoutHandle, drop_layers
from eecore.lab.training.loading import StartingPoint, load_starting_point
from eecore.lab.training.pace import seconds_per_step
from eecore.lab.training.plots import plot_run
from eecore.lab.training.recipe import LoraSettings, TrainingConfig
from eecore.lab.training.run import StepReport, TrainingResult, check_new, state_path, train
from eecore.lab.training.run_state import read_state
from eecore.lab.training.trained_head import TrainedHead, read_head
from eecore.models import model_digest

__all__ = [
    "Batch",
    "BatchOrder",
    "CalmLoss",
    "ClassifierConfig",
    "DraftHead",
    "EarlyExitLoss",
    "ExitModel",
    "ExitScores",
    "FrozenModel",
    "HeadConfig",
    "HeadFacts",
    "HeadReport",
    "HeadRun",
    "HeadSizes",
    "HeadStates",
    "LastLayerLoss",
    "LayerDropout",
    "LayerDropoutHandle",
    "LoraSettings",
    "LossWeights",
    "MappedStates",
    "RunningModel",
    "StartingPoint",
    "StatesSettings",
    "StepReport",
    "Targets",
    "TokenData",
    "TrainedHead",
    "TrainingConfig",
    "TrainingResult",
    "WrittenText",
    "agreement_labels",
    "check_new",
    "choose_attended",
    "classifier_loss",
    "collate",
    "collect_states",
    "drop_layers",
    "early_exit_backward",
    "early_exit_loss",
    "evaluate_exits",
    "is_quantised",
    "layer_scale",
    "load_running_model",
    "load_starting_point",
    "model_digest",
    "open_states",
    "plot_head",
    "plot_run",
    "read_data",
    "read_head",
    "read_state",
    "save_classifier",
    "save_head",
    "seconds_per_step",
    "state_path",
    "steps_in",
    "stop_on_signals",
    "train",
    "train_exit_classifier",
]
