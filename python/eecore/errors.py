"""eecore's errors: each message says what was wrong and where, what was expected and what came."""

from __future__ import annotations


class EecoreError(Exception):
    """The base of every error that eecore raises on purpose."""


class ModelError(EecoreError, ValueError):
    """A model, or a file of it, cannot be used."""


class ModelNotFoundError(ModelError, FileNotFoundError):
    """The model directory, or a required file, does not exist."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class UnsupportedModelError(ModelError):
    """A valid model needs something that eecore does not support."""


class CheckpointError(ModelError):
    """A file of the model is corrupt, truncated, or disagrees with other files."""


class RequestError(EecoreError, ValueError):
    """A prompt or setting can never be served."""


class ExitError(RequestError):
    """An exit policy contradicts itself, or the model cannot run it."""


class GuideError(RequestError):
    """A guide cannot be compiled, or a text can no longer follow it."""


class NotFiniteError(EecoreError, ArithmeticError):
    """The model computed NaN or infinity where a request's next token was to come from."""


class TrainingError(RequestError):
    """Training data, settings or a checkpoint of a training run cannot be used."""


class EngineClosedError(EecoreError, RuntimeError):
    """The engine was closed, before or after the request came."""


class OutOfMemoryError(EecoreError, MemoryError):
    """Memory could not be allocated."""
