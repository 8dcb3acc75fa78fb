"""The map of a text's exit layers: where tokens exit, and the page that shows it."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import eecore
from eecore import ConfidentExit, ExitClassifier, FixedExit, Full, RequestError
from eecore.cli.app import run
from eecore.lab.evaluation.exit_map import map_exits

VOID = {"br", "meta"}


class Page(HTMLParser):
    """The tokens that a page shows; a tag that is not closed is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.exit_layers: list[int] = []
        self.links: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.links += [value for name in ("src", "href") if (value := values.get(name))]
        if values.get("class") == "token":
            self.exit_layers.append(int(values["data-exit-layer"] or 0))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_written_text_has_the_depths_of_its_output(model: eecore.Model) -> None:
    policy = ConfidentExit(0.3)
    (output,) = eecore.generate(model, "<a & b>", exit=policy, max_tokens=9)
    found = map_exits(model, "<a & b>", policy, max_tokens=9)
    layers = [token.exit_layer for token in found.tokens]
    assert layers == [None, *output.exit_layers]
    assert found.mean_exit_layer == pytest.approx(output.stats.mean_exit_layer)
    page = Page(found.html())
    assert page.exit_layers == output.exit_layers
    assert page.links == []
    assert "&lt;a &amp; b&gt;" in found.html()


def test_confidences_are_those_of_each_layer(model: eecore.Model) -> None:
    """The first token comes from the exact KV of the prompt: its confidence is the generation's."""
    found = map_exits(model, "some prompt", Full(), max_tokens=3)
    for exit_layer in range(1, 5):
        (output,) = eecore.generate(model, "some prompt", exit=FixedExit(exit_layer), max_tokens=1)
        got = found.tokens[1].confidences[exit_layer]
        assert got == pytest.approx(output.confidences[0], abs=1e-5)


@pytest.mark.parametrize("measure", ["softmax", "state", "classifier"])
def test_a_given_text_exits_where_its_prediction_is_accepted(
    model: eecore.Model, measure: str
) -> None:
    classifier = ExitClassifier(torch.linspace(-0.1, 0.1, 128).view(2, 64))
    policy = ConfidentExit(
        0.5,
        measure,  # type: ignore[arg-type]
        exit_points=(2, 3),
        classifier=classifier if measure == "classifier" else None,
    )
    found = map_exits(model, "given", policy, text=" and then\nread")
    assert "".join(token.text for token in found.tokens) == "given and then\nread"
    for token in found.tokens[1:]:
        assert list(token.confidences) == [1, 2, 3, 4]
        accepted = [layer for layer in (2, 3) if token.confidences[layer] >= 0.5]
        assert token.exit_layer == min([*accepted, 4])
    assert found.html().count("<br>") == 1


def test_what_cannot_be_mapped(model: eecore.Model) -> None:
    with pytest.raises(RequestError, match="either a text or max_tokens, got both or neither"):
        map_exits(model, "a", Full())
    with pytest.raises(RequestError, match=r"ConfidentExit for a given text, got Full\(\)"):
        map_exits(model, "a", Full(), text="b")
    with pytest.raises(RequestError, match="expected at most 512 tokens, got 601"):
        map_exits(model, "a", ConfidentExit(), text="b" * 600)


def test_the_command_line(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, text = tmp_path / "exits.html", tmp_path / "text.txt"
    words = ["exits", str(directory), "prompt", "--threads", "1"]
    assert run([*words, "--max-tokens", "5", "--exit", "fixed:2", "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "exit layers: 2x5" in printed
    assert "mean exit layer 2.00 of 4" in printed
    assert Page(page.read_text()).exit_layers == [2] * 5

    text.write_text("some text")
    assert run([*words, "--text", str(text), "--exit", "confident:0.2"]) == 0
    assert "promptsome text" in capsys.readouterr().out
    assert run([*words, "--text", str(tmp_path / "none")]) == 4
    assert "No such file" in capsys.readouterr().err
    assert run([*words, "--html", str(tmp_path / "none" / "x.html")]) == 2
    assert "expected a directory, got nothing" in capsys.readouterr().err
