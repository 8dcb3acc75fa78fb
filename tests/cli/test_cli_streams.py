"""The command line with bad streams, signals, arguments and disks."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import eecore
from command_line import (
    FAILED,
    INTERRUPTED,
    LONG,
    MODEL,
    QUIET,
    REQUEST,
    TERMINATED,
    USAGE,
    error_of,
    start,
)
from eecore.cli import process
from eecore.cli.app import run
from eecore.cli.failures import failure

# Streams that are closed, full, or cannot say a letter


def through_a_shell(
    words: Sequence[str], redirections: str, **env: str
) -> subprocess.CompletedProcess[bytes]:
    """Run the command by a shell."""
    line = f'exec "$0" -m eecore "$@" {redirections}'
    return subprocess.run(
        ["sh", "-c", line, sys.executable, *words],
        capture_output=True,
        timeout=120,
        check=False,
        env={**os.environ, **QUIET, **env},
    )


@pytest.mark.parametrize(
    ("words", "redirections", "code", "said"),
    [
        (["generate", "MODEL", "hi", "-n", "2"], "> /dev/full", FAILED, "error: stdout: No space"),
        (["generate", "MODEL"], "<&-", REQUEST, "error: prompt: expected some text"),
        (["generate", "MODEL", "hi", "-n", "2", "--stats"], "2>&-", 0, ""),
    ],
)
def test_streams_that_are_closed_or_full(
    model: str, words: list[str], redirections: str, code: int, said: str
) -> None:
    done = through_a_shell([model if w == "MODEL" else w for w in words], redirections)
    assert b"Traceback" not in done.stderr + done.stdout
    assert b"Exception ignored" not in done.stderr
    lines = done.stderr.decode().strip().splitlines()
    assert done.returncode == code, lines
    assert [line[: len(said)] for line in lines] == ([said] if said else [])


def test_a_stdout_that_cannot_say_a_letter(model: str) -> None:
    env = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = ["generate", model, "é", "-n", "40", "--raw", "--ignore-eos", "-t", "2", "--seed"]
    told, expected = through_a_shell([*command, "3"], "", **env), text_of(model, "é")
    assert told.returncode == 0, told.stderr
    assert told.stdout.isascii()
    assert expected is not None
    assert not expected.isascii()


def text_of(model: str, prompt: str) -> str | None:
    """The library's text for the same request."""
    sampling: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "temperature": 2.0, "seed": 3}
    return eecore.generate(eecore.load(model), prompt, **sampling)[0].text


@pytest.mark.parametrize(
    ("number", "seconds"),
    [
        (signal.SIGINT, 0.02),
        (signal.SIGINT, 0.5),
        (signal.SIGTERM, 0.5),
    ],
)
def test_a_signal_at_any_moment(endless: str, number: signal.Signals, seconds: float) -> None:
    """A signal at any moment from the first import on gives one line or none, and its exit code."""
    marked = ("-c", "import eecore.cli; print(flush=True); eecore.cli.main()")
    arguments = ["generate", endless, "hi", "-n", str(LONG), "--ignore-eos"]
    command = start(arguments, program=marked)
    assert command.stdout is not None
    command.stdout.readline()
    time.sleep(seconds)
    command.send_signal(number)
    _, error = command.communicate(timeout=120)
    if number == signal.SIGINT:
        assert command.returncode == INTERRUPTED, error
        assert error in ("interrupted\n", "")
    else:
        assert command.returncode in (TERMINATED, -signal.SIGTERM), error
        assert error == ""


def test_no_exception_is_raised_into_the_import_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(_initializing=True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__spec__=spec))
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process.listen()
        signal.raise_signal(signal.SIGINT)
        spec._initializing = False
        with pytest.raises(KeyboardInterrupt):  # it comes again
            time.sleep(60)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_that_a_library_replaces_is_one() -> None:
    def replaced() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise ImportError("half a module")  # noqa: B904

    with pytest.raises(ImportError) as error:
        replaced()
    assert failure(error.value) == INTERRUPTED


# Arguments of all kinds


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["generate", "MODEL", "a\0b"], USAGE),
        (["generate", "\0"], USAGE),
        (["generate", "x" * 5000, "hi"], MODEL),
        (
            ["generate", "MODEL", "hi", "--exit", "confident", "--exit-points", "0-99999999999"],
            USAGE,
        ),
        (["generate", "MODEL", "hi", "--exit", "fixed:" + "9" * 5000], USAGE),
        (["generate", "MODEL", "hi", "--threads", "100000"], USAGE),
        (["generate", "MODEL", "-f", "/dev/zero/x"], REQUEST),
        (["generate", "MODEL", "-f", "."], REQUEST),
        (["generate", "\udcff", "hi"], MODEL),
        (["generate", "~no-such-user/x", "hi"], MODEL),
        (["sweep", "MODEL", "--data", "x", "--out", "/"], USAGE),
        (["sweep", "MODEL", "--data", "x", "--out", "/dev/null/x"], USAGE),
        (["train", "MODEL", "--data", "x", "--out", "x", "--epochs", "nan"], USAGE),
        (["train-classifier", "MODEL", "--data", "x", "--out", "x", "--context", "9" * 20], USAGE),
    ],
)
def test_arguments_of_all_kinds(
    model: str, arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([model if word == "MODEL" else word for word in arguments]) == code
    message = error_of(capsys.readouterr())
    assert "--debug" not in message
    assert len(message) < 3000


def test_a_stream_without_end_is_not_kept(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eecore.files.texts.MAX_FROM_PIPE", 1000)
    assert run(["generate", model, "-f", "/dev/zero"]) == REQUEST
    assert "expected at most 1000 bytes" in error_of(capsys.readouterr())


# Files stay whole


def test_a_full_disk_keeps_what_was_written_before(
    model: str,
    lines: Callable[[str, str], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "written"
    folder.mkdir()
    skips = folder / "skips.json"
    skips.write_text("old")
    text = lines("text.txt", "some text to look at, twice over")
    search = ["search", model, "--text", text, "--max-tokens", "16", "--max-skipped", "1"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        code = run([*search, "--out", str(skips)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == FAILED
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert errors == [f"error: {skips}: File too large"]
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"skips.json": "old"}
