"""Errors of a command as one line on stderr and an exit code."""

from __future__ import annotations

import functools
import sys
import textwrap
import traceback
from collections.abc import Callable
from typing import ParamSpec

import typer

from eecore.cli.process import INTERRUPTED, NO_READER, OUTPUT_LOST, lost_output, say
from eecore.errors import EecoreError, ModelError, RequestError

FAILED, USAGE, MODEL, REQUEST = 1, 2, 3, 4
MAX_LETTERS = 2000

EXIT_CODES = (
    "Exit codes: 0 done, 1 failed while running, 2 wrong usage, 3 the model cannot be loaded, 4 "
    "the request cannot be served (exit layer out of range, empty or too long prompt, ...), 130 "
    "interrupted with Ctrl-C (what was written stays), 141 the reader of the output went away, 143 "
    "terminated."
)

UsageError = typer.BadParameter
# Some releases of typer have their own copy of click: take the base class from its exports.
_AnyUsageError: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)

P = ParamSpec("P")


def reports_failures(command: Callable[P, int]) -> Callable[P, int]:
    """The command, with every exception but usage errors turned into a message and an exit code."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            code = command(*args, **kwargs)
            sys.stdout.flush()
            return code
        except (_AnyUsageError, typer.Exit):
            raise
        except BaseException as error:
            return failure(error, debug=bool(kwargs.get("debug")))

    return guarded


def failure(error: BaseException, *, debug: bool = False) -> int:
    """Print the error; returns the exit code. An exception that asks the process to end is raised
    again.
    """
    if isinstance(error, (SystemExit, GeneratorExit)):
        raise error
    lost = lost_output()
    if is_interrupt(error):
        say("interrupted")
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return NO_READER
    if debug:
        say(traceback.format_exc().rstrip())
    if isinstance(error, _AnyUsageError):
        if message := _usage_message(error):
            say(message)
        return USAGE
    if lost is not None and isinstance(error, OSError) and error.filename is None:
        say(f"error: stdout: {lost.strerror}")
        return OUTPUT_LOST
    say(f"error: {_one_line(error)}")
    if isinstance(error, ModelError):
        return MODEL
    return REQUEST if isinstance(error, RequestError) else FAILED


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an exception is Ctrl-C's, or one that a library has put in its place."""
    while error is not None:
        if isinstance(error, (KeyboardInterrupt, typer.Abort)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _usage_message(error: Exception) -> str:
    """The message of a usage error, empty where help has been shown."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "eecore"
    said = _bad_value(error) or error.format_message()  # type: ignore[attr-defined]
    message = " ".join(said.split())
    message = _short(message.removeprefix("Invalid value: "))
    return f"error: {message} (see {command} --help)" if message else ""


def _bad_value(error: Exception) -> str:
    """A wrong value of an option in eecore's words; empty where the error is not pydantic's, which
    some releases of typer use.
    """
    refused = getattr(error.__cause__, "errors", None)
    parameter = getattr(error, "param", None)
    if not callable(refused) or parameter is None:
        return ""
    first = refused()[0]
    said, name = first["msg"], max(parameter.opts, key=len)
    if not said.startswith("Input should be "):
        said = said.removeprefix("Value error, ").removesuffix(".")
        return f"{name}: {said}, got {first['input']!r}"
    expected = said.removeprefix("Input should be ").partition(", unable to parse")[0]
    return f"{name}: expected {expected}, got {first['input']!r}"


def _one_line(error: BaseException) -> str:
    """The whole message of eecore's own errors; of others the kind and the first line."""
    text = str(error).strip()
    if isinstance(error, EecoreError):
        return _short(" ".join(text.split()))
    if isinstance(error, OSError) and error.strerror:
        return _short(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    first = textwrap.shorten(text.splitlines()[0], 200, placeholder=" ...") if text else ""
    return f"{type(error).__name__}: {first} (--debug shows where)"


def _short(message: str) -> str:
    """A message cut to a bounded length, since arguments may be very long."""
    half = MAX_LETTERS // 2
    return message if len(message) <= MAX_LETTERS else f"{message[:half]} ... {message[-half:]}"
