"""Passages of a user's files, and the questions about them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from eecore.errors import RequestError
from eecore.lab.answers.questions import (
    CODE_CHANGES,
    LONGEST,
    SHORTEST,
    TEXT_CHANGES,
    Passage,
    questions_about,
    read_passages,
    templates,
)

SENTENCE = "The quick brown fox jumps over the lazy dog near the river bank. "
PARAGRAPH = (SENTENCE * 6).strip()
FUNCTION = "def area(width, height):\n" + "".join(
    f"    step_{i} = width * height + {i}\n" for i in range(12)
)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def texts(passages: list[Passage], *, is_code: bool = False) -> list[str]:
    return [passage.text for passage in passages if passage.is_code is is_code]


def test_paragraphs_are_put_together(tmp_path: Path) -> None:
    file = write(tmp_path / "a.md", "\r\n\r\n".join([PARAGRAPH] * 7) + "\r\n")
    together = "\n\n".join([PARAGRAPH] * 5)
    assert len(together) <= LONGEST < len(together) + len(PARAGRAPH)
    assert texts(read_passages([file])) == [together, "\n\n".join([PARAGRAPH] * 2)]


def test_a_long_paragraph_is_cut_after_sentences(tmp_path: Path) -> None:
    text = "".join(f"{number:02}: {SENTENCE}" for number in range(70)).strip()
    found = texts(read_passages([write(tmp_path / "a.txt", text)]))
    assert " ".join(found) == text
    assert all(LONGEST - len(SENTENCE) - 5 < len(part) <= LONGEST for part in found[:-1])


@pytest.mark.parametrize(
    "text",
    ["Too short.", "| 1 | 2 | 3 |\n" * 40, "word" * LONGEST, ""],
    ids=["short", "a table", "without an end", "nothing"],
)
def test_what_is_no_passage(tmp_path: Path, text: str) -> None:
    file = write(tmp_path / "a.txt", text)
    with pytest.raises(RequestError, match=f"passages of {SHORTEST} to {LONGEST} characters"):
        read_passages([file])


def test_code_is_functions_classes_and_what_they_say(tmp_path: Path) -> None:
    method = "".join(f"    {line}\n" for line in FUNCTION.splitlines())
    large = "class Large:\n" + "".join(method.replace("area", f"area_{i}") + "\n" for i in range(8))
    small = f'@decorated\nclass Small:\n    """{PARAGRAPH}"""\n'
    source = f"import os\n\n{FUNCTION}\n\n{small}\n\n{large}\n\ndef short():\n    pass\n"
    found = read_passages([write(tmp_path / "a.py", source)])
    assert texts(found) == [PARAGRAPH]
    code = texts(found, is_code=True)
    assert code[:2] == [FUNCTION.strip(), small.strip()]
    assert code[2:] == [FUNCTION.strip().replace("area", f"area_{i}") for i in range(8)]


def test_directories_and_files_each_passage_once(tmp_path: Path) -> None:
    write(tmp_path / "docs" / "deep" / "b.rst", PARAGRAPH + " One.")
    write(tmp_path / "docs" / "a.txt", PARAGRAPH + " Two.")
    write(tmp_path / "docs" / "broken.py", "def (:")
    write(tmp_path / "docs" / "c.csv", PARAGRAPH + " Three.")
    (tmp_path / "docs" / "latin.txt").write_bytes(b"\xff" * 500)
    notes = write(tmp_path / "notes", PARAGRAPH + " Four.")
    ends = [text[-4:] for text in texts(read_passages([tmp_path / "docs", notes, tmp_path]))]
    assert ends == ["Two.", "One.", "our."]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("broken.py", b"def (:", "broken.py: expected Python code, got invalid syntax"),
        ("latin.txt", b"\xff", "latin.txt: expected UTF-8 text, got "),
        ("none.txt", None, "none.txt: expected a file or a directory of texts, got nothing"),
    ],
)
def test_a_file_that_is_named_is_to_be_read(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RequestError, match=said):
        read_passages([tmp_path / name])


def test_each_is_asked_about_before_one_comes_again() -> None:
    prose = [Passage(f"Text {i}. " + PARAGRAPH, is_code=False) for i in range(20)]
    code = [Passage(FUNCTION.replace("area", f"area_{i}"), is_code=True) for i in range(5)]
    passages = prose + code
    asked = list(questions_about(passages, 3))
    changes = {False: templates(TEXT_CHANGES), True: templates(CODE_CHANGES)}
    wanted = {
        change.replace("{}", passage.text)
        for passage in passages
        for change in changes[passage.is_code]
    }
    assert len(asked) == len(wanted)
    assert set(asked) == wanted
    firsts = asked[:10]  # in turns
    assert ["def area_" in question for question in firsts] == [False, True] * 5
    about_text = [question for question in asked if "def area_" not in question]
    for passage in prose:
        assert sum(passage.text in question for question in about_text[:20]) == 1
    assert list(islice(questions_about(passages, 3), 10)) == firsts
    assert list(islice(questions_about(passages, 4), 10)) != firsts
