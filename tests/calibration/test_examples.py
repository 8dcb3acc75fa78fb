"""Examples from files, and the similarity of texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from eecore import RequestError
from eecore.calibration import SIMILARITIES, Example, read_examples


def test_examples_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"input": "a", "target": "b"}\n\n{"input": "c", "more": 1}\n')
    assert read_examples(path) == [Example("a", "b"), Example("c")]
    assert read_examples(path, limit=1, needs_target=True) == [Example("a", "b")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected at least one example, got none"),
        ('{"input": "a"}\n{', r"data\.jsonl:2: expected JSON, got"),
        ('{"input": ""}', r'data\.jsonl:1: expected \{"input": text'),
        ('{"input": "a", "target": 3}', r"data\.jsonl:1: expected .*got \{.*3\}"),
        ("[1]", r"data\.jsonl:1: expected"),
        (b"\xff", "expected UTF-8 text"),
    ],
)
def test_bad_examples(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RequestError, match=message):
        read_examples(path)


def test_a_missing_target_and_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"input": "a"}\n')
    with pytest.raises(RequestError, match=r'expected \{"input": text, "target": text\}'):
        read_examples(path, needs_target=True)
    with pytest.raises(RequestError, match="No such file"):
        read_examples(tmp_path / "none.jsonl")


def test_similarities() -> None:
    rouge_l, rouge_2, exact = (SIMILARITIES[name] for name in ("rougeL", "rouge2", "exact"))
    # Longest common subsequence "the sat": precision 2/3, recall 2/3.
    assert rouge_l("the dog sat", "the cat sat") == pytest.approx(2 / 3)
    # One bigram of three in common: precision and recall 1/3.
    assert rouge_2("a b c d", "x a b y") == pytest.approx(1 / 3)
    assert exact(" a b ", "a b") == 1.0
    assert exact("a b", "a c") == 0.0
    for alike in (rouge_l, rouge_2, exact):
        assert alike("", "") == 1.0
        assert alike("[]", "[]") == 1.0
        assert alike("", "word") == 0.0
