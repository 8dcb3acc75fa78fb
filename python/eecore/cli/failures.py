"""From what went wrong to one line on stderr and an exit code."""

from __future__ import annotations

import functools
import os
import sys
import textwrap
import traceback
from collections.abc import Callable
from typing import ParamSpec

import typer

from eecore.errors import EecoreError, ModelError, RequestError

__all__ = ["EXIT_CODES", "INTERRUPTED", "UsageError", "reports_failures", "usage_message"]

FAILED, USAGE, MODEL, REQUEST, INTERRUPTED, NO_READER = 1, 2, 3, 4, 130, 141

EXIT_CODES = (
    "Exit codes: 0 done, 1 failed while running, 2 wrong usage, 3 the model cannot be loaded, 4 "
    "the request cannot be served (exit layer out of range, empty or too long prompt, ...), 130 "
    "interrupted with Ctrl-C (what was written stays), 141 the reader of the output went away."
)

UsageError = typer.BadParameter
# Typer carries its own copy of click in some releases: take the base class from what it exports.
_AnyUsageError: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)

P = ParamSpec("P")


def reports_failures(command: Callable[P, int]) -> Callable[P, int]:
    """The command, with exceptions but usage errors turned into a message and an exit code."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            code = command(*args, **kwargs)
            sys.stdout.flush()
            return code
        except (_AnyUsageError, typer.Exit):
            raise
        except KeyboardInterrupt:
            return _fail("interrupted", INTERRUPTED)
        except BrokenPipeError:
            # What is still buffered has no reader either; without this Python complains at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return NO_READER
        except Exception as error:
            if kwargs.get("debug"):
                traceback.print_exc()
            return _fail(f"error: {_one_line(error)}", _code(error))

    return guarded


def usage_message(error: Exception) -> str | None:
    """The message of a usage error, empty where help has been shown; None for anything else."""
    if not isinstance(error, _AnyUsageError):
        return None
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "eecore"
    message = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    message = message.removeprefix("Invalid value: ")
    return f"error: {message} (see {command} --help)" if message else ""


def _fail(message: str, code: int) -> int:
    sys.stdout.flush()
    print(message, file=sys.stderr)
    return code


def _code(error: Exception) -> int:
    if isinstance(error, ModelError):
        return MODEL
    return REQUEST if isinstance(error, RequestError) else FAILED


def _one_line(error: Exception) -> str:
    """Our own messages whole; of others the kind and the first line."""
    text = str(error).strip()
    if isinstance(error, EecoreError):
        return " ".join(text.split())
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    first = textwrap.shorten(text.splitlines()[0], 200, placeholder=" ...") if text else ""
    return f"{type(error).__name__}: {first} (--debug shows where)"
