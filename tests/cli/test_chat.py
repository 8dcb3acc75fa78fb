"""``eecore chat``: several turns, its commands, a terminal's display, and how it ends."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import eecore
from command_line import LONG, QUIET, REQUEST, USAGE, error_of
from eecore.cli import chat
from eecore.cli.app import run
from eecore.cli.depth import DepthPainter, depth_style
from eecore.cli.generate import SamplingOptions
from eecore.config import ANSWERS
from tiny_models import write_model

Talk = Callable[..., Any]
SIX = ("-n", "6", "--seed", "3")
"""Options for answers of six tokens, the same each time."""


@pytest.fixture
def talk(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Send lines to a chat; its output, and its exit code."""

    def said(*lines: str, options: tuple[str, ...] = SIX, code: int = 0) -> Any:
        text = "".join(f"{line}\n" for line in lines)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert run(["chat", model, *options]) == code
        return capsys.readouterr()

    return said


def answers_to(model: str, *said: str, system: str | None = None, **settings: Any) -> list[str]:
    """The library's answers, turn by turn."""
    loaded = eecore.load(model)
    assert loaded.tokenizer is not None
    messages = [] if system is None else [{"role": "system", "content": system}]
    answers = []
    for message in said:
        messages.append({"role": "user", "content": message})
        ids = loaded.tokenizer.encode_chat(messages)
        usual = {} if loaded.config.sampling else ANSWERS
        sampling = eecore.SamplingParams.of(
            loaded, **{**usual, "max_tokens": 6, "seed": 3, **settings}
        )
        (output,) = eecore.generate(loaded, ids, sampling=sampling)
        answers.append(output.text or "")
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_each_line_is_a_turn(model: str, talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    shown = talk("hello", "", "and then?", f"/save {file}")
    expected = answers_to(model, "hello", "and then?")
    assert shown.out == "".join(text if text.endswith("\n") else f"{text}\n" for text in expected)
    assert shown.err == f"wrote {file}\n"
    saved = json.loads(file.read_text())["messages"]
    assert [each["role"] for each in saved] == ["user", "assistant"] * 2
    assert [each["content"] for each in saved] == ["hello", expected[0], "and then?", expected[1]]


def test_a_system_message_and_a_new_beginning(model: str, talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    lines = (
        "hello",
        "/clear",
        "/system be short",
        "/system",
        "again",
        f"/save {file}",
        "/quit",
        "x",
    )
    shown = talk(*lines, options=(*SIX, "--system", "be long"))
    (again,) = answers_to(model, "again", system="be short")
    assert [each["content"] for each in json.loads(file.read_text())["messages"]] == [
        *("be short", "again", again)
    ]
    assert shown.err.splitlines()[:3] == [
        "the conversation begins anew",
        *["system message: be short"] * 2,
    ]


def test_exit_modes_and_stats(talk: Talk) -> None:
    shown = talk("/stats", "a", "/exit-mode fixed:2", "b", "/exit-mode", "/stats")
    lines = shown.err.splitlines()
    assert lines[0] == "stats: after each answer"
    assert lines[1].endswith("; all 4 layers for each token")
    assert lines[2].startswith("exit mode: fixed exit after layer 2")
    assert any(line.endswith("; 2.0 of 4 layers run a token") for line in lines)
    assert lines[-1] == "stats: not shown"


def test_depth_is_said_where_there_are_no_colours(talk: Talk) -> None:
    said = talk("/depth", "a", "/depth", options=("-n", "3", "--ignore-eos", "--exit", "fixed:2"))
    assert said.err.splitlines()[-3:] == [
        "depth: in words after each answer",
        "[exit layers: 2x3]",
        "depth: not shown",
    ]


def test_what_cannot_be_is_said(talk: Talk) -> None:
    assert "/nothing: expected one of /system" in error_of(talk("/nothing", code=USAGE))
    assert "/save: expected the name" in error_of(talk("/save", code=USAGE))
    for said in ("deep", "confident:x", "draft-verify", "calibrated:state"):
        error = error_of(talk(f"/exit-mode {said}", code=USAGE))
        assert error.startswith("error: /exit-mode: expected ")
        assert "--exit" not in error
    assert "exit_layer: expected 1..4" in error_of(talk("/exit-mode fixed:9", code=REQUEST))
    assert "expected at most 511" in error_of(talk("x" * 600, code=REQUEST))
    assert "temperature" in error_of(talk("a", options=("-t", "-1"), code=REQUEST))


def test_a_message_that_fails_is_no_turn(model: str) -> None:
    """On a terminal the conversation goes on after it."""
    loaded, sampling = eecore.load(model), SamplingOptions(max_tokens=2)
    talk = chat._Talk(loaded, Path(model), eecore.Full(), sampling, None, False, False)
    with pytest.raises(eecore.RequestError, match="/clear begins anew"):
        talk.take("x" * 600)
    assert talk.turns == []


def test_without_a_model_it_is_the_small_one_that_is_at_hand(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat, "is_at_hand", lambda name: name == chat.CHAT_MODEL)
    monkeypatch.setattr(chat, "CHAT_MODEL", model)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    assert run(["chat", *SIX]) == 0
    assert capsys.readouterr().out.rstrip("\n") == answers_to(model, "hello")[0].rstrip("\n")


def test_the_model_has_to_talk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat, "is_at_hand", lambda _: False)
    assert run(["chat"]) == USAGE
    said = error_of(capsys.readouterr())
    assert "MODEL: expected a chat model, got none" in said
    assert "eecore chat HuggingFaceTB/SmolLM2-135M-Instruct" in said
    bare = str(write_model(tmp_path / "bare", tokenizer=False))
    assert run(["chat", bare]) == USAGE
    assert "expected a model with a chat template, got one without" in error_of(capsys.readouterr())


def test_an_answer_runs_to_the_end_of_the_context(talk: Talk) -> None:
    said = talk("a", options=("--ignore-eos",)).err
    assert said == "note: the answer was cut at the end of the context; /clear begins anew\n"


# What is shown


def test_drafts_that_were_verified_have_one_colour(tiny: eecore.Model) -> None:
    assert tiny.tokenizer is not None
    ids = tiny.tokenizer.encode("ab", add_special_tokens=False)
    for verified, drafted in ((True, 0), (False, 2)):
        painter = DepthPainter(tiny, ids, 0 if verified else 1, verified=verified)
        painted = painter.add(ids, [2, 4], "ab")
        lowest = 0 if verified else 1
        expected = [depth_style(drafted, lowest, 4), depth_style(4, lowest, 4)]
        assert [span.style for span in painted.spans] == expected


class Terminal:
    """A chat on a terminal of its own."""

    def __init__(self, process: subprocess.Popen[bytes], end: int) -> None:
        self.process, self._end, self.shown, self._at = process, end, "", 0

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def wait_for(self, words: str) -> None:
        """Read until the words appear after those that were waited for before."""
        while words not in self.shown[self._at :]:
            try:
                chunk = os.read(self._end, 4096)
            except OSError:  # the other side is closed
                chunk = b""
            assert chunk, self.shown
            self.shown += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", chunk.decode(errors="replace"))
        self._at = self.shown.index(words, self._at) + len(words)


@contextmanager
def on_a_terminal(*arguments: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "eecore", "chat", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, **QUIET, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_ctrl_c_ends_the_answer_and_ctrl_d_the_program(endless: str) -> None:
    with on_a_terminal(endless, "-n", str(LONG), "--ignore-eos", "--depth") as terminal:
        terminal.wait_for(">>>")
        terminal.type("hello\r")
        terminal.wait_for("hello")
        terminal.wait_for("\n")
        terminal.wait_for("\n")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("interrupted")
        terminal.wait_for(">>>")
        terminal.type("/nothing\r")
        terminal.wait_for("error: /nothing: expected one of")
        terminal.wait_for(">>>")
        terminal.type("/depth\r")
        terminal.wait_for("depth: not shown")
        terminal.wait_for(">>>")
        terminal.type("/depth\r")
        terminal.wait_for("computed by all 4 layers")
        terminal.wait_for(">>>")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=120) == 0
