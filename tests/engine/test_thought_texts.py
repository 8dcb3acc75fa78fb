"""Thoughts before answers: split from the text, whole and streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import eecore
from eecore.engine.text import TextStream
from eecore.models import Tokenizer
from eecore.models.text.thinking import Thinking
from thinking_models import ALWAYS, CLOSES, HYBRID, OPENS, QUESTION, WORDS, write_thinking_model


@pytest.fixture(scope="module")
def always(tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    """A model whose template opens the thought."""
    directory = write_thinking_model(tmp_path_factory.mktemp("thoughts") / "always", ALWAYS)
    return eecore.load(directory, kv_cache_tokens=4096)


def asked(model: eecore.Model, **variables: Any) -> list[int]:
    assert model.tokenizer is not None
    return model.tokenizer.encode_chat(QUESTION, **variables)


def thinks(model: eecore.Model, count: int = 40, **settings: Any) -> list[eecore.Output]:
    """Answers of different seeds that close their thoughts at different places."""
    params = [
        eecore.SamplingParams(
            max_tokens=count, temperature=1.0, seed=seed, logit_bias={CLOSES: 5}, **settings
        )
        for seed in range(6)
    ]
    return eecore.generate(model, [asked(model)] * len(params), sampling=params)


def test_an_output_has_its_thought_beside_its_text(always: eecore.Model) -> None:
    tokenizer = always.tokenizer
    assert tokenizer is not None
    outputs = thinks(always)
    assert len({output.stats.thought_tokens for output in outputs}) > 2
    for output in outputs:
        count = output.stats.thought_tokens
        assert output.token_ids.index(CLOSES) == count - 1
        assert len(output.token_ids) == 40
        thought = tokenizer.decode_after(asked(always), output.token_ids[: count - 1])
        assert output.thought == thought.strip("\n")
        text = tokenizer.decode_after(output.token_ids[:count], output.token_ids[count:])
        assert output.text == text.lstrip("\n")
        assert "\ufdd1" not in output.text


@pytest.mark.parametrize(
    "settings", [{}, {"stop": ("e", "\x01N7")}, {"thinking_budget": 1}, {"exit": "auto"}], ids=str
)
@pytest.mark.parametrize("seed", [1, 3])
def test_steps_say_which_part_their_text_is_of(
    always: eecore.Model, settings: dict[str, Any], seed: int
) -> None:
    fields = {"max_tokens": 40, "temperature": 1.0, "seed": seed, "logit_bias": {CLOSES: 5}}
    (whole,) = eecore.generate(always, [asked(always)], **fields, **settings)
    steps = list(eecore.stream(always, [asked(always)], **fields, **settings))
    assert "".join(step.thought for step in steps) == whole.thought
    assert "".join(step.text for step in steps) == whole.text
    assert steps[-1].output is not None
    assert steps[-1].output.thought == whole.thought
    said = [bool(step.text) for step in steps if step.text or step.thought]
    assert said == sorted(said)  # the thought comes first


def test_a_thought_that_never_ends_is_all_thought(always: eecore.Model) -> None:
    (output,) = eecore.generate(always, [asked(always)], max_tokens=12, logit_bias={CLOSES: -100})
    assert output.text == ""
    assert output.thought
    assert output.stats.thought_tokens == 12


def test_a_raw_text_has_no_thought(always: eecore.Model) -> None:
    (output,) = eecore.generate(always, "Once", max_tokens=12, logit_bias={CLOSES: 5})
    assert output.thought is None
    assert output.stats.thought_tokens == 0


def streamed(
    directory: Path,
    template: str,
    text: str,
    *,
    stop: tuple[str, ...] = (),
    markers: bool = True,
    joined: bool = False,
    opens: bool = False,
    hidden: bool = False,
) -> tuple[str | None, str, int, bool]:
    """The thought, the text and the thought's tokens of a scripted answer, and whether it stops."""
    write_thinking_model(directory, template, markers=markers)
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer is not None
    prompt = tokenizer.encode_chat(QUESTION)
    ids = tokenizer.encode(text, add_special_tokens=False)
    shown = TextStream(tokenizer, prompt, stop, ids, Thinking.of(tokenizer))
    if joined:
        shown.join(opens=opens)
    shown.has_thought = not hidden
    pieces = [shown.show_up_to(count, final=count == len(ids)) for count in range(1, len(ids) + 1)]
    decoded = shown.decoded
    assert "".join(piece.text for piece in pieces) == decoded.text
    thought = shown.thought(decoded)
    assert "".join(piece.thought for piece in pieces) == (thought or "")
    return thought, decoded.text, shown.num_thought(decoded), decoded.stops


def test_stop_strings_end_the_answer_alone(tmp_path: Path) -> None:
    text = "So STOP here\n</think>\n\nIt is STOP not"
    assert streamed(tmp_path / "a", ALWAYS, text, stop=("STOP",)) == (
        "So STOP here",
        "It is ",
        14,
        True,
    )
    text = "<think>\nSTOP</think>It is</think>"
    assert streamed(tmp_path / "b", HYBRID, text, stop=("STOP", "</t")) == (
        "STOP",
        "It is",
        7,
        True,
    )


def test_a_model_that_does_not_think_answers(tmp_path: Path) -> None:
    assert streamed(tmp_path / "a", HYBRID, "\nIt is <think>") == (
        None,
        "\nIt is <think>",
        0,
        False,
    )


def test_markers_in_words_are_split_and_counted(tmp_path: Path) -> None:
    text = "Here is my thought process:\nÜ? Here is\n\nHere is my response:\n\nHere it is"
    count = len(text.split("\n\nHere it")[0].encode())
    found = streamed(tmp_path / "a", WORDS, text, markers=False)
    assert found == ("Ü? Here is", "Here it is", count, False)


def test_a_text_can_keep_its_thought(tmp_path: Path) -> None:
    text = "So\n</think>\n\nIt is"
    assert streamed(tmp_path / "a", ALWAYS, text, joined=True) == (None, text, 0, False)
    found = streamed(tmp_path / "b", ALWAYS, text, joined=True, opens=True, stop=("<th", "It"))
    assert found == (None, "<think>\nSo\n</think>\n\n", 0, True)
    found = streamed(tmp_path / "c", HYBRID, f"<think>{text}", joined=True, opens=True)
    assert found == (None, f"<think>{text}", 0, False)


def test_a_text_can_leave_its_thought_out(tmp_path: Path) -> None:
    text = "So\n</think>\n\nIt is"
    assert streamed(tmp_path / "a", ALWAYS, text, hidden=True) == (None, "It is", 4, False)


def test_markers_are_tokens_of_the_model(always: eecore.Model) -> None:
    assert always.tokenizer is not None
    assert always.tokenizer.token_id("<think>") == OPENS
