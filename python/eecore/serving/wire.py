"""The messages between a server and the process of its engine.

Messages are written with msgspec. What a client wrote is only ever text and numbers in them.
"""

from __future__ import annotations

import builtins
import os
import traceback
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of

from eecore import errors, exits
from eecore.calibration_file import Calibration
from eecore.config import EngineConfig, ModelConfig, SamplingParams, T5Config
from eecore.exits import CLASSIFIER_TENSORS, Exit, ExitClassifier
from eecore.guide import Guide
from eecore.models import ModelSource
from eecore.output import StepOutput

PlainExit = tuple[str, dict[str, Any]]
"""The class of an exit policy and its fields; a classifier is given by its digest."""


class Start(msgspec.Struct, frozen=True):
    """The first message to an engine's process.

    Args:
        options: plain values, as :func:`eecore.load` takes them.
        threads: CPU threads; None for torch's choice.
        max_num_seqs: sequences that run at once; None for the model's default.
    """

    path: Path
    options: dict[str, Any]
    threads: int | None = None
    max_num_seqs: int | None = None


class Request(msgspec.Struct, array_like=True):
    """A request that the server has checked."""

    key: int
    name: str
    prompt_ids: list[int]
    input_ids: list[int] | None
    exit: PlainExit
    sampling: SamplingParams
    special_texts: dict[int, str]
    """The text that special tokens are shown as."""
    whole: bool
    """Whether the server wants the output only, not the steps."""


class ToEngine(msgspec.Struct, omit_defaults=True):
    """A message from the server."""

    start: Start | None = None
    classifier: tuple[str, bytes] | None = None
    """A digest and tensors, sent before the first request with that classifier."""
    add: Request | None = None
    cancel: int | None = None
    """The key of a request to cancel."""
    read: tuple[int, int] | None = None
    """The key of a request, and the number of its steps that have been read."""
    resets_cache: bool = False
    compile: tuple[int, Guide] | None = None
    """The number of the reply, and the guide to compile."""


class Error(msgspec.Struct, array_like=True):
    """An error, for :func:`error_of`."""

    kinds: list[str]
    """The names of the error's class and of its bases."""
    text: str
    of_system: tuple[int, str, str | None] | None
    where: str


class Loaded(msgspec.Struct):
    """The loaded model and its engine."""

    model: ModelConfig | None
    encoder_model: T5Config | None
    """The model's configuration, where it has an encoder."""
    device: str
    source: ModelSource | None
    vocabulary_sha256: str | None
    """The digest of the tokens that the model's draft head knows; None without a head."""
    limits: EngineConfig
    has_prefix_cache: bool


class Occupancy(msgspec.Struct, array_like=True):
    """How full the engine is, and how often an iteration of it failed."""

    num_running: int = 0
    num_waiting: int = 0
    num_held: int = 0
    num_used_pages: int = 0
    num_cached_pages: int = 0
    num_failed_iterations: int = 0


Step = tuple[int, StepOutput, str | None]
"""The key of a request, what a step added to it, and the text of that; None where the server
decodes it.
"""


class FromEngine(msgspec.Struct, omit_defaults=True):
    """A message from the engine."""

    loaded: Loaded | None = None
    failed: Error | None = None
    """The reason for which there is no engine."""
    warning: str | None = None
    steps: list[Step] = []
    ended: list[tuple[int, Error]] = []
    """The keys of requests that ended without an output."""
    occupancy: Occupancy | None = None
    compiled: tuple[int, Error | None] | None = None
    """The number of a guide, and the reason for which it cannot be followed."""


def encode(message: ToEngine | FromEngine) -> bytes:
    """A message as bytes.

    Raises:
        UnicodeEncodeError: the message has text that UTF-8 cannot express.
    """
    return _ENCODER.encode(message)


def decode(data: bytes, kind: type[Any]) -> Any:
    """The message in ``data``."""
    return _DECODERS[kind].decode(data)


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return os.fsencode(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"expected a plain value, got {type(value).__name__}")


def _value(kind: type[Any], plain: bytes) -> Any:
    return kind(os.fsdecode(plain))


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_DECODERS: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind, dec_hook=_value) for kind in (ToEngine, FromEngine)
}


def plain_step(key: int, step: StepOutput) -> Step:
    """A step of a request with a key; with its text where it has to be decoded here."""
    return key, replace(step, piece=None), None if step.piece is None else step.text


def plain_exit(policy: Exit) -> PlainExit:
    """An exit policy as plain values."""
    values = {field.name: getattr(policy, field.name) for field in fields(policy)}
    if values.get("classifier") is not None:
        values["classifier"] = values["classifier"].sha256
    return type(policy).__name__, values


def exit_of(plain: PlainExit, classifiers: Mapping[str, ExitClassifier]) -> Exit:
    """The exit policy, back from :func:`plain_exit`."""
    name, values = plain
    if values.get("classifier") is not None:
        values["classifier"] = classifiers[values["classifier"]]
    if values.get("calibration") is not None:
        values["calibration"] = msgspec.convert(values["calibration"], Calibration)
    policy: Exit = getattr(exits, name)(**values)
    return policy


def plain_classifier(classifier: ExitClassifier) -> bytes:
    """The tensors of a classifier, as a safetensors file of float32."""
    given = {name: getattr(classifier, name) for name in CLASSIFIER_TENSORS}
    return bytes_of(
        {n: t.detach().float().cpu().contiguous() for n, t in given.items() if t is not None}
    )


def classifier_of(tensors: bytes) -> ExitClassifier:
    """The classifier, back from :func:`plain_classifier`."""
    return ExitClassifier(**tensors_of(tensors))


def plain_error(error: BaseException) -> Error:
    """An error, for :func:`error_of`."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    of_system = None
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        name = None if error.filename is None else _sayable(str(error.filename))
        of_system = (error.errno, error.strerror, name)
    where = "".join(traceback.format_exception(error)).rstrip()
    return Error(kinds, _sayable(str(error)), of_system, _sayable(where))


def _sayable(text: str) -> str:
    """A text with escapes for what UTF-8 cannot express."""
    return text.encode(errors="backslashreplace").decode()


def error_of(plain: Error) -> Exception:
    """The error again: of the same type where that is eecore's or Python's, with the same text."""
    kinds, text = plain.kinds, plain.text
    known = next((found for name in kinds if (found := _error_kind(name))), RuntimeError)
    kind = known if known.__name__ == kinds[0] else type(kinds[0], (known,), {})
    try:
        error: Exception = kind(*(plain.of_system or (text,)))
    except TypeError:  # its class takes something else than a text
        error = type(kinds[0], (RuntimeError,), {})(text)
    error.__cause__ = _ElsewhereError(plain.where)
    return error


class _ElsewhereError(Exception):
    """The traceback of an error in the other process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _error_kind(name: str) -> type[Exception] | None:
    found = getattr(errors, name, None) or getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None
