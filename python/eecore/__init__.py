"""eecore: early-exit language models, made fast."""

from eecore.config import EngineConfig, ModelConfig, SamplingParams
from eecore.decoding.skip_search import SkipSearch
from eecore.engine.async_engine import AsyncEngine
from eecore.engine.engine import Engine
from eecore.errors import EecoreError, ExitError, ModelError, RequestError
from eecore.exits import (
    ConfidentExit,
    DraftAndVerify,
    ExitClassifier,
    FixedExit,
    Full,
    SelfSpeculative,
)
from eecore.generate import Model, generate, load, search_skipped_sublayers, stream
from eecore.ops import build_info
from eecore.output import Output, RequestStats, StepOutput

__all__ = [
    "AsyncEngine",
    "ConfidentExit",
    "DraftAndVerify",
    "EecoreError",
    "Engine",
    "EngineConfig",
    "ExitClassifier",
    "ExitError",
    "FixedExit",
    "Full",
    "Model",
    "ModelConfig",
    "ModelError",
    "Output",
    "RequestError",
    "RequestStats",
    "SamplingParams",
    "SelfSpeculative",
    "SkipSearch",
    "StepOutput",
    "build_info",
    "generate",
    "load",
    "search_skipped_sublayers",
    "stream",
]
