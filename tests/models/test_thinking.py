"""Thoughts: what is around them, where they can come, and how a text is split."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from eecore.models import Tokenizer
from eecore.models.text.thinking import SHOWN, Part, Reading, Thinking
from thinking_models import ALWAYS, HYBRID, QUESTION, WORDS, write_thinking_model
from tiny_models import CHAT_TEMPLATE


def tokenizer_of(directory: Path, template: str, *, markers: bool = True) -> Tokenizer:
    write_thinking_model(directory, template, markers=markers)
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer is not None
    return tokenizer


def thinking_of(directory: Path, template: str, *, markers: bool = True) -> Thinking:
    thinking = Thinking.of(tokenizer_of(directory, template, markers=markers))
    assert thinking is not None
    return thinking


def test_markers_are_found_in_the_tokenizer_or_the_template(tmp_path: Path) -> None:
    hybrid = thinking_of(tmp_path / "a", HYBRID)
    assert (hybrid.markers, hybrid.shown) == (
        ("<think>", "</think>"),
        dict(zip((260, 261), SHOWN, strict=True)),
    )
    spelled = thinking_of(tmp_path / "b", HYBRID, markers=False)
    assert (spelled.markers, spelled.shown) == (("<think>", "</think>"), {})
    words = thinking_of(tmp_path / "c", WORDS, markers=False)
    assert words.markers[1] == "Here is my response:"
    assert Thinking.of(tokenizer_of(tmp_path / "d", CHAT_TEMPLATE, markers=False)) is None
    assert Thinking.of(None) is None


@pytest.mark.parametrize(
    ("template", "variables", "part"),
    [
        (HYBRID, {}, Part.BEGINNING),
        (HYBRID, {"enable_thinking": False}, None),
        (HYBRID, {"add_generation_prompt": False}, None),
        (ALWAYS, {}, Part.OPENED),
        (ALWAYS + "</think>", {}, None),
        (
            ALWAYS + "{{ '</think>' if not enable_thinking }}",
            {"enable_thinking": True},
            Part.OPENED,
        ),
        (WORDS, {}, Part.BEGINNING),
    ],
)
@pytest.mark.parametrize("markers", [True, False])
def test_a_thought_can_come_where_the_prompt_asks_for_an_answer(
    tmp_path: Path,
    template: str,
    variables: dict[str, Any],
    part: Part | None,
    markers: bool,
) -> None:
    tokenizer = tokenizer_of(tmp_path / "model", template, markers=markers)
    thinking = Thinking.of(tokenizer)
    assert thinking is not None
    if template == WORDS and markers:
        return  # its markers are tokens then
    for question in ("Why?", "What is <think>?", "Is </think> a token?"):
        prompt = tokenizer.encode_chat([{"role": "user", "content": question}], **variables)
        reading = thinking.start(prompt)
        assert (None if reading is None else reading.part) == part


def test_a_prompt_may_end_within_a_thought_and_a_raw_text_has_none(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path / "model", ALWAYS)
    thinking = Thinking.of(tokenizer)
    assert thinking is not None
    begun = [*tokenizer.encode_chat(QUESTION), *tokenizer.encode("Let me")]
    assert thinking.start(begun) == Reading(Part.OPENED)
    assert thinking.start([*begun, *tokenizer.encode("</think>\nSo")]) is None
    assert thinking.start(tokenizer.encode("Once upon a time")) is None


OPEN, CLOSE = SHOWN
TEXTS = [
    (Part.OPENED, f"hm\nso\n{CLOSE}\n\nIt is\n", "hm\nso", "It is\n"),
    (Part.OPENED, f"\n\nhm{CLOSE}It", "hm", "It"),
    (Part.OPENED, f"{CLOSE}\n\n\n", "", ""),
    (Part.OPENED, "hm\n\nand then\n", "hm\n\nand then", ""),
    (Part.OPENED, "", "", ""),
    (Part.BEGINNING, f"{OPEN}\nhm\n{CLOSE}\n\nIt is", "hm", "It is"),
    (Part.BEGINNING, f"\n {OPEN}{CLOSE}  It", "", "  It"),
    (Part.BEGINNING, "\nIt is", None, "\nIt is"),
    (Part.BEGINNING, f"It {OPEN}is{CLOSE}", None, f"It {OPEN}is{CLOSE}"),
    (Part.BEGINNING, "  ", None, "  "),
    (Part.OPENED, f"hm{CLOSE}a{OPEN}b{CLOSE}c", "hm", f"a{OPEN}b{CLOSE}c"),
]


@pytest.mark.parametrize(("part", "text", "thought", "answer"), TEXTS)
@pytest.mark.parametrize("in_words", [False, True])
def test_a_text_is_split_however_it_comes(
    tmp_path: Path, part: Part, text: str, thought: str | None, answer: str, in_words: bool
) -> None:
    thinking = thinking_of(tmp_path / "model", WORDS if in_words else HYBRID, markers=not in_words)
    if in_words:
        for shown, marker in zip(SHOWN, thinking.markers, strict=True):
            text, answer = text.replace(shown, marker), answer.replace(shown, marker)
    for size in (1, 2, 3, 7, len(text) or 1):
        reading, thoughts, answers = Reading(part), list[str](), list[str]()
        for begin, end in pairwise([*range(0, len(text), size), len(text)]):
            reading, more, said = thinking.read(reading, text[begin:end])
            thoughts += [] if more is None else [more]
            answers.append(said)
        reading, more, said = thinking.read(reading, "", last=True)
        thoughts += [] if more is None else [more]
        assert "".join([*answers, said]) == answer
        assert ("".join(thoughts) if thoughts else None) == thought
