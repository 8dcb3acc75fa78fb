"""The progress bar of a long prompt: its text, its place, and its end."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from eecore.cli import prompt_bar


class Stderr(io.StringIO):
    """A stderr that may be a terminal, and tells when the prompt is mentioned."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self.mentioned = threading.Event()

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        if "600/2000" in text:
            self.mentioned.set()
        return super().write(text)


class Reading:
    """An engine in the middle of two prompts, which gives two steps once the bar is shown."""

    def __init__(self, seen: threading.Event | None) -> None:
        requests = [(512, [0] * 1900), (90, [0] * 88), (0, [0] * 12)]
        made = [SimpleNamespace(num_computed=n, given_ids=ids) for n, ids in requests]
        self.scheduler = SimpleNamespace(requests=dict(enumerate(made)))
        self._seen = seen

    def run(self) -> Iterator[Any]:
        if self._seen is not None:
            assert self._seen.wait(60)
        yield "first"
        yield "second"


def steps(monkeypatch: pytest.MonkeyPatch, stderr: Stderr, engine: Any) -> list[Any]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", stderr)
    return list(prompt_bar.with_prompt_bar(engine))


def test_a_prompt_that_takes_long_has_a_bar_until_its_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_bar, "PATIENCE_SECONDS", 0.0)
    stderr = Stderr(is_terminal=True)
    assert steps(monkeypatch, stderr, Reading(stderr.mentioned)) == ["first", "second"]
    assert "reading the prompt" in stderr.getvalue()
    erases_its_line = "\x1b[2K"
    assert stderr.getvalue().rstrip().endswith(erases_its_line)


def test_a_short_prompt_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_bar, "PATIENCE_SECONDS", 1e6)
    stderr = Stderr(is_terminal=True)
    assert steps(monkeypatch, stderr, Reading(None)) == ["first", "second"]
    assert stderr.getvalue() == ""


def test_without_a_terminal_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_bar, "PATIENCE_SECONDS", 0.0)
    stderr = Stderr(is_terminal=False)
    assert steps(monkeypatch, stderr, Reading(None)) == ["first", "second"]
    assert stderr.getvalue() == ""
