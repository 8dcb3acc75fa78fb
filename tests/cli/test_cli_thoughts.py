"""Thoughts on the command line."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

import eecore
from command_line import REQUEST, error_of
from eecore.cli.app import run
from eecore.cli.depth import depth_style
from eecore.cli.results import JsonLines, Results, StreamedText, TextByPrompt
from eecore.output import Output, Piece, StepOutput
from thinking_models import ALWAYS, QUESTION, write_thinking_model

TEXT = "So\nwhat\n</think>\n\nIt is"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    directory = write_thinking_model(tmp_path_factory.mktemp("thoughts") / "model", ALWAYS)
    return eecore.load(directory, kv_cache_tokens=1024)


@pytest.fixture(scope="module")
def output(thinker: eecore.Model) -> Output:
    assert thinker.tokenizer is not None
    prompt = thinker.tokenizer.encode_chat(QUESTION)
    (output,) = eecore.generate(thinker, prompt, max_tokens=1)
    ids = thinker.tokenizer.encode(TEXT, add_special_tokens=False)
    layers = [index % 4 + 1 for index in range(len(ids))]
    return replace(output, token_ids=ids, exit_layers=layers, thought="So\nwhat", text="It is")


def coloured(results: Results) -> io.StringIO:
    file = io.StringIO()
    results.console = Console(file=file, force_terminal=True, color_system="truecolor")
    results._markers = ("", "")
    return file


def streamed(results: StreamedText, output: Output) -> None:
    pieces = [Piece(thought="So"), Piece(thought="\nwhat"), Piece("It"), Piece(" is")]
    places = [0, 2, 7, 13, len(output.token_ids)]
    for piece, (begin, end) in zip(pieces, pairwise(places), strict=True):
        ids, layers = output.token_ids[begin:end], output.exit_layers[begin:end]
        last = output if end == places[-1] else None
        results.step(0, StepOutput("r", ids, layers, [], last, piece=lambda piece=piece: piece))


def test_a_thought_stands_between_its_markers_without_colours(
    thinker: eecore.Model, output: Output, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = StreamedText(["a"], thinker, None, output.prompt_token_ids)
    streamed(shown, output)
    assert capsys.readouterr().out == "<think>\nSo\nwhat\n</think>\n\nIt is\n"
    assert (shown.thought, shown.text) == ("So\nwhat", "It is")
    TextByPrompt(["a"], thinker, None).done(0, output)
    assert capsys.readouterr().out == "==> 1/1: a\n<think>\nSo\nwhat\n</think>\n\nIt is\n"
    JsonLines(["a"], thinker, None).done(0, output)
    record = json.loads(capsys.readouterr().out)
    assert (record["thought"], record["text"]) == ("So\nwhat", "It is")


def test_a_thought_is_dim_on_a_terminal(
    thinker: eecore.Model, output: Output, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = StreamedText(["a"], thinker, None, output.prompt_token_ids)
    file = coloured(shown)
    streamed(shown, output)
    assert file.getvalue() == "\x1b[2mSo\x1b[0m\n\x1b[2mwhat\x1b[0m"
    assert capsys.readouterr().out == "\n\nIt is\n"


def test_a_thought_that_goes_on_shows_no_closing_marker(
    thinker: eecore.Model, output: Output, capsys: pytest.CaptureFixture[str]
) -> None:
    StreamedText(["a"], thinker, None, output.prompt_token_ids).done(0, replace(output, text=""))
    assert capsys.readouterr().out == "<think>\nSo\nwhat\n"


def test_depths_are_those_of_the_shown_characters(
    thinker: eecore.Model, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eecore.cli.results.has_colours", lambda _: True)
    shown = StreamedText(["a"], thinker, eecore.ConfidentExit(0.9), output.prompt_token_ids)
    painter = shown._painter
    assert painter is not None
    painted: list[Text] = []
    paint = painter.paint
    monkeypatch.setattr(painter, "paint", lambda text: painted.append(paint(text)) or painted[-1])
    streamed(shown, output)
    styles = [span.style for made in painted if made.plain == "It" for span in made.spans]
    assert styles == [depth_style(layer, 1, 4) for layer in output.exit_layers[-5:-3]]


def test_a_budget_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    thinker = str(write_thinking_model(tmp_path / "model", ALWAYS))
    options = ("-n", "40", "--ignore-eos", "--json", "-t", "0")
    assert run(["generate", thinker, "a", *options, "--thinking-budget", "0"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["thought"] == ""
    assert record["text"]
    assert run(["generate", thinker, "a", *options, "--thinking-budget", "-1"]) == REQUEST
    assert error_of(capsys.readouterr()).startswith("error: thinking_budget: expected None or")
    assert run(["generate", model, "a", *options, "--thinking-budget", "4"]) == REQUEST
    assert "expected a model with markers of thoughts" in error_of(capsys.readouterr())


def test_a_chat_sends_thoughts_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    thinker = str(write_thinking_model(tmp_path / "model", ALWAYS))
    saved = tmp_path / "saved.json"
    lines = f"a\n/save {saved}\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    options = ("-n", "50", "--ignore-eos", "--thinking-budget", "5", "--seed", "3")
    assert run(["chat", thinker, *options]) == 0
    answer = json.loads(saved.read_text())["messages"][-1]
    assert answer["reasoning_content"]
    assert answer["content"]
    said = capsys.readouterr().out
    assert said.startswith(f"<think>\n{answer['reasoning_content']}")
    assert f"</think>\n\n{answer['content']}" in said
