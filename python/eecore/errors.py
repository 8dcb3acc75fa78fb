"""What eecore raises: each says what was wrong, where, what was expected and what came."""

from __future__ import annotations


class EecoreError(Exception):
    """Base of every error that eecore raises on purpose."""


class ModelError(EecoreError, ValueError):
    """A model, or a file of it, that cannot be used."""


class ModelNotFoundError(ModelError, FileNotFoundError):
    """The model directory, or a file that it must have, is not there."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class UnsupportedModelError(ModelError):
    """A valid model that asks for something which eecore does not have."""


class CheckpointError(ModelError):
    """A file of the model is corrupt, truncated, or disagrees with the others."""


class RequestError(EecoreError, ValueError):
    """A prompt or setting that can never be served."""


class ExitError(RequestError):
    """An exit policy that contradicts itself or that the model cannot run."""


class GuideError(RequestError):
    """A guide that cannot be compiled, or that a text cannot follow any more."""


class NotFiniteError(EecoreError, ArithmeticError):
    """The model gave NaN or infinity where a request's next token was to come from."""


class TrainingError(RequestError):
    """Training data, settings or a checkpoint of a training run that cannot be used."""


class EngineClosedError(EecoreError, RuntimeError):
    """An engine that was closed, before or after the request came."""


class EngineLostError(EecoreError, RuntimeError):
    """The process that ran the engine has ended, or is not there yet.

    Args:
        message: what became of it.
        retry_after: seconds after which it may be worth another try.
    """

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class OutOfMemoryError(EecoreError, MemoryError):
    """Memory that was asked for is not there."""
