"""eecore: early-exit language models, made fast.

Exported names are imported at their first use, so that ``import eecore`` and the command line start
quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eecore import ops
    from eecore.calibration.procedure import calibrate
    from eecore.calibration.skip_search import SkipSearch, search_skipped_sublayers
    from eecore.calibration.thoughts import calibrate_thoughts
    from eecore.calibration_file import Calibration, ThoughtCalibration
    from eecore.config import EngineConfig, ModelConfig, SamplingParams, T5Config
    from eecore.engine.async_engine import AsyncEngine
    from eecore.engine.engine import Engine
    from eecore.errors import EecoreError, ExitError, GuideError, ModelError, RequestError
    from eecore.exits import (
        Auto,
        ConfidentExit,
        DraftAndVerify,
        ExitClassifier,
        FixedExit,
        Full,
        HeadDrafts,
        PromptLookup,
        SelfSpeculative,
    )
    from eecore.files.builtin import default_model
    from eecore.files.headers import get_include
    from eecore.generation import Model, generate, load, stream
    from eecore.guide import Guide
    from eecore.integrations.transformers_attention import register_attention
    from eecore.integrations.transformers_generate import generate_for_transformers
    from eecore.integrations.transformers_model import from_transformers
    from eecore.ops import build_info
    from eecore.output import (
        Output,
        PromptLogprob,
        RequestFailedError,
        RequestStats,
        StepOutput,
    )
    from eecore.thought_stop import Probe, ThoughtStop

_NAMES = {
    "eecore.calibration_file": ("Calibration", "ThoughtCalibration"),
    "eecore.config": ("EngineConfig", "ModelConfig", "SamplingParams", "T5Config"),
    "eecore.engine.async_engine": ("AsyncEngine",),
    "eecore.engine.engine": ("Engine",),
    "eecore.errors": ("EecoreError", "ExitError", "GuideError", "ModelError", "RequestError"),
    "eecore.calibration.procedure": ("calibrate",),
    "eecore.calibration.skip_search": ("SkipSearch", "search_skipped_sublayers"),
    "eecore.calibration.thoughts": ("calibrate_thoughts",),
    "eecore.exits": (
        "Auto",
        "ConfidentExit",
        "DraftAndVerify",
        "ExitClassifier",
        "FixedExit",
        "Full",
        "HeadDrafts",
        "PromptLookup",
        "SelfSpeculative",
    ),
    "eecore.guide": ("Guide",),
    "eecore.thought_stop": ("Probe", "ThoughtStop"),
    "eecore.files.headers": ("get_include",),
    "eecore.generation": ("Model", "generate", "load", "stream"),
    "eecore.files.builtin": ("default_model",),
    "eecore.integrations.transformers_attention": ("register_attention",),
    "eecore.integrations.transformers_generate": ("generate_for_transformers",),
    "eecore.integrations.transformers_model": ("from_transformers",),
    "eecore.ops": ("build_info",),
    "eecore.output": (
        "Output",
        "PromptLogprob",
        "RequestFailedError",
        "RequestStats",
        "StepOutput",
    ),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "AsyncEngine",
    "Auto",
    "Calibration",
    "ConfidentExit",
    "DraftAndVerify",
    "EecoreError",
    "Engine",
    "EngineConfig",
    "ExitClassifier",
    "ExitError",
    "FixedExit",
    "Full",
    "Guide",
    "GuideError",
    "HeadDrafts",
    "Model",
    "ModelConfig",
    "ModelError",
    "Output",
    "Probe",
    "PromptLogprob",
    "PromptLookup",
    "RequestError",
    "RequestFailedError",
    "RequestStats",
    "SamplingParams",
    "SelfSpeculative",
    "SkipSearch",
    "StepOutput",
    "T5Config",
    "ThoughtCalibration",
    "ThoughtStop",
    "build_info",
    "calibrate",
    "calibrate_thoughts",
    "default_model",
    "from_transformers",
    "generate",
    "generate_for_transformers",
    "get_include",
    "load",
    "ops",
    "register_attention",
    "search_skipped_sublayers",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name == "ops":
        return import_module("eecore.ops")
    if name not in _HOME:
        raise AttributeError(f"module 'eecore' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # looked up only once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
