"""The standard streams of a process, which may be closed, full, or unable to encode a letter.

Output that cannot be written is an error, which is reported on stderr; writing to stderr never
fails.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any

from eecore.cli.line_breaks import whole_words

OUTPUT_LOST, NO_READER = 1, 141


def prepare_streams() -> None:
    """Give the process three usable streams, whatever it was started with.

    A closed descriptor becomes the null device. Otherwise a file that is opened later would get its
    number, and with it the output of the stream.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # A process that this one starts needs the three, too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = _Closed()
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if not isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = open(os.devnull, "a", encoding="utf-8")  # noqa: SIM115
    sys.stderr = _Diagnostics(sys.stderr)


class _Closed(io.TextIOBase):
    """A stdout that was closed when the process started."""

    encoding = "utf-8"

    def writable(self) -> bool:
        return True

    def write(self, _text: str) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), "stdout")


class _Diagnostics(io.TextIOWrapper):
    """A stderr that drops what it cannot write."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__(stream.buffer, stream.encoding, "backslashreplace", line_buffering=True)
        self._stream = stream  # kept, since its end would close the buffer

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            super().flush()


def say(line: str) -> None:
    """Print a line on stderr, if it can be written there; on a terminal it breaks between words."""
    with suppress(OSError, ValueError):
        line = whole_words(line, os.get_terminal_size(sys.stderr.fileno()).columns).plain
    try:
        print(line, file=sys.stderr, flush=True)
    except UnicodeEncodeError:
        print(line.encode("ascii", "backslashreplace").decode(), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return


def says_all(stream: Any) -> bool:
    """Whether a stream can encode every letter."""
    return (getattr(stream, "encoding", None) or "").lower().startswith("utf")


def flush_output() -> OSError | None:
    """Flush stdout. The error where that fails; nothing is written to it any more then."""
    try:
        sys.stdout.flush()
    except OSError as error:
        _give_up_output()
        return error
    except ValueError:  # closed
        return None
    return None


def finish_output(code: int) -> int:
    """The exit code of a process that ends with ``code``, once its output has been written."""
    lost = flush_output()
    if lost is None or code != 0:
        return code
    if isinstance(lost, BrokenPipeError):
        return NO_READER
    say(f"error: stdout: {lost.strerror}")
    return OUTPUT_LOST


def _give_up_output() -> None:
    """Drop what is still buffered; Python would otherwise report an error at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
        sys.stdout.flush()
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "a", encoding="utf-8")  # noqa: SIM115
    finally:
        os.close(nowhere)
