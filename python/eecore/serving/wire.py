"""Requests, what comes of them, and errors, as plain values.

Dataclasses go by their fields, whatever those are: both processes run the same code. What a client
wrote is never more than text and numbers in them.
"""

from __future__ import annotations

import builtins
import traceback
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of

from eecore import calibration_file, config, errors, exits, guide, output
from eecore.config import AnyModelConfig, EngineConfig
from eecore.exits import CLASSIFIER_TENSORS, ExitClassifier
from eecore.models import ModelSource
from eecore.output import PromptLogprob, StepOutput

__all__ = [
    "STEP_FIELDS",
    "Loaded",
    "Occupancy",
    "Start",
    "Wire",
    "error_of",
    "plain_classifier",
    "plain_error",
]


@dataclass(frozen=True)
class Start:
    """What the process of an engine is told first.

    Args:
        path: of the model.
        options: of :func:`eecore.load`, plain values.
        threads: of the CPU; None for torch's choice.
        max_num_seqs: sequences that run at once; None for the model's.
    """

    path: Path
    options: dict[str, Any]
    threads: int | None = None
    max_num_seqs: int | None = None


@dataclass(frozen=True)
class Loaded:
    """What it says when model and engine are there."""

    model: AnyModelConfig
    device: str
    source: ModelSource | None
    vocabulary_sha256: str | None
    """Of the tokens that the model's draft head knows; None without one."""
    limits: EngineConfig
    has_prefix_cache: bool


@dataclass(frozen=True)
class Occupancy:
    """How full its engine is, and how often an iteration of it failed."""

    num_running: int = 0
    num_waiting: int = 0
    num_held: int = 0
    num_used_pages: int = 0
    num_cached_pages: int = 0
    num_failed_iterations: int = 0


_OURS: dict[str, type[Any]] = {
    name: kind
    for module in (calibration_file, config, exits, guide, output)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and is_dataclass(kind)
}
_OURS |= {kind.__name__: kind for kind in (ModelSource, Start, Loaded, Occupancy)}
_FIELDS = {
    kind: tuple(field.name for field in fields(kind) if field.init) for kind in _OURS.values()
}
_OURS[PromptLogprob.__name__] = PromptLogprob
_FIELDS[PromptLogprob] = PromptLogprob._fields
STEP_FIELDS = tuple(name for name in _FIELDS[StepOutput] if name != "piece")
"""Of a step all but its text, which is decoded where it is wanted."""
_STEP = attrgetter(*STEP_FIELDS)


class Wire:
    """Values of ours as plain ones, and back.

    Classifiers go by their digests; their tensors once, before the first request that names them.
    """

    def __init__(self) -> None:
        self.classifiers: dict[str, ExitClassifier] = {}

    def plain(self, value: Any) -> Any:
        """What a channel takes. A list or tuple holds values of ours alone, the first may be None,
        or none of them.
        """
        kind = type(value)
        if kind is ExitClassifier:
            return (..., kind.__name__, value.sha256)
        if kind in _FIELDS:
            inner = (self.plain(getattr(value, name)) for name in _FIELDS[kind])
            return (..., kind.__name__, *inner)
        if kind in (tuple, list) and any(type(first) in _FIELDS for first in value[:2]):
            return kind(map(self.plain, value))
        return (..., "Path", str(value)) if isinstance(value, Path) else value

    def value(self, plain: Any) -> Any:
        """What :meth:`plain` was given."""
        kind = type(plain)
        if kind not in (tuple, list) or not plain:
            return plain
        if plain[0] is not ...:
            is_ours = any(type(first) is tuple and first[:1] == (...,) for first in plain[:2])
            return kind(map(self.value, plain)) if is_ours else plain
        _, name, *values = plain
        if name == "Path":
            return Path(values[0])
        if name == "ExitClassifier":
            return self.classifiers[values[0]]
        made = _OURS[name]
        return made(**dict(zip(_FIELDS[made], map(self.value, values), strict=True)))

    def plain_step(self, step: StepOutput) -> tuple[Any, ...]:
        """The values of :data:`STEP_FIELDS`."""
        values: tuple[Any, ...] = _STEP(step)
        if step.output is None and step.prompt_logprobs is None:
            return values
        return tuple(map(self.plain, values))

    def keep(self, digest: str, tensors: bytes) -> None:
        """The classifier with this digest, as :func:`plain_classifier` gives it."""
        self.classifiers[digest] = ExitClassifier(**tensors_of(tensors))


def plain_classifier(classifier: ExitClassifier) -> bytes:
    """Its tensors, as a safetensors file of float32."""
    given = {name: getattr(classifier, name) for name in CLASSIFIER_TENSORS}
    return bytes_of(
        {n: t.detach().float().cpu().contiguous() for n, t in given.items() if t is not None}
    )


def plain_error(error: BaseException) -> tuple[Any, ...]:
    """An error, for :func:`error_of`."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    of_system = None
    if isinstance(error, OSError) and error.strerror:
        name = None if error.filename is None else str(error.filename)
        of_system = (error.errno, error.strerror, name)
    return kinds, str(error), of_system, "".join(traceback.format_exception(error)).rstrip()


def error_of(kinds: list[str], text: str, of_system: Any, where: str) -> Exception:
    """The error again: of the same type where it is eecore's or Python's, with the same text."""
    known = next((found for name in kinds if (found := _error_kind(name))), RuntimeError)
    kind = known if known.__name__ == kinds[0] else type(kinds[0], (known,), {})
    try:
        error: Exception = kind(*(of_system or (text,)))
    except TypeError:  # it is made of something else than a text
        error = type(kinds[0], (RuntimeError,), {})(text)
    error.__cause__ = _ElsewhereError(where)
    return error


class _ElsewhereError(Exception):
    """Where an error comes from, in the other process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _error_kind(name: str) -> type[Exception] | None:
    found = getattr(errors, name, None) or getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None
