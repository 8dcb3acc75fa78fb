"""Files of tokenizers: a part that cannot be used is an error of eecore's that names it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers

import eecore
from eecore.errors import CheckpointError, ModelError, RequestError
from eecore.models import Tokenizer
from eecore.models.text import tokenizer_files
from eecore.models.text.tokenizer_files import MAX_GROWTH
from tiny_models import write_byte_tokenizer, write_model

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Writes the byte tokenizer with other parts."""
    write_byte_tokenizer(tmp_path)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())

    def write(parts: dict[str, Any]) -> Path:
        changed = {**copy.deepcopy(whole), **parts}
        if "model" in parts:
            changed["model"] = {**whole["model"], **parts["model"]}
        (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
        return tmp_path

    return write


def template(*names: str, ids: list[int] | None = None) -> dict[str, Any]:
    """A post-processor that puts special tokens before a text."""
    special = (
        {}
        if ids is None
        else {name: {"id": name, "ids": ids, "tokens": ["x"] * len(ids)} for name in names}
    )
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single = [*({"SpecialToken": {"id": name, "type_id": 0}} for name in names), text]
    pair = [text, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def replacing(count: int) -> list[dict[str, Any]]:
    """A normalizer of so many doublings of a letter."""
    return [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * count


def test_a_file_without_end_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=f"got {1 << 40}"):
        Tokenizer.from_directory(tmp_path)


def test_growth_has_a_measure(changed: Callable[[dict[str, Any]], Path]) -> None:
    few = {"type": "Sequence", "normalizers": replacing(MAX_GROWTH.bit_length() - 1)}
    tokenizer = Tokenizer.from_directory(changed({"normalizer": few}))
    assert tokenizer is not None
    assert len(tokenizer.encode("a")) == MAX_GROWTH


class Panic(BaseException):
    """As the library raises it."""

    __module__ = "pyo3_runtime"


class Panicking:
    """Stands in for a tokenizer of the library that panics with texts that have a letter.

    Such files exist for tokenizers 0.23: steps with impossible numbers, and regular expressions
    that exceed its limit of retries.
    """

    def __init__(self, backend: Any, letter: str) -> None:
        self._backend, self._letter = backend, letter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode(self, text: str, **options: Any) -> Any:
        if self._letter in text:
            raise Panic("no retries left")
        return self._backend.encode(text, **options)


@pytest.mark.parametrize("letter", [tokenizer_files.TRIAL[0], "b"])
def test_a_tokenizer_that_panics(
    changed: Callable[[dict[str, Any]], Path], monkeypatch: pytest.MonkeyPatch, letter: str
) -> None:
    """With any text, as the trial finds out, or with some."""
    directory, read = changed({}), tokenizers.Tokenizer.from_buffer
    library = SimpleNamespace(from_buffer=lambda content: Panicking(read(content), letter))
    monkeypatch.setattr(tokenizer_files, "tokenizers", SimpleNamespace(Tokenizer=library))
    if letter != "b":
        with pytest.raises(CheckpointError, match=r"expected a tokenizer, got: no retries left"):
            Tokenizer.from_directory(directory)
        return
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer is not None
    assert tokenizer.encode("hello")
    with pytest.raises(ModelError, match=r"json: expected to take text, got: no retries left"):
        tokenizer.encode("ab")


def test_what_is_no_text_and_no_token_ids(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer is not None
    for text in ("\ud800", 5, None, ["a"]):
        with pytest.raises(RequestError, match="text: expected text that UTF-8 can encode, got"):
            tokenizer.encode(text)  # type: ignore[arg-type]
    for ids in ([-1], [1 << 32], ["a"], [1.5]):
        with pytest.raises(RequestError, match="token_ids: expected token ids"):
            tokenizer.decode(ids)  # type: ignore[arg-type]


def test_tokens_that_the_model_does_not_have(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "small", vocab_size=300)
    path = directory / "tokenizer.json"
    whole = json.loads(path.read_text())
    eecore.load(directory)

    path.write_text(json.dumps({**whole, "post_processor": template("<x>", ids=[300])}))
    with pytest.raises(
        CheckpointError, match="post_processor: expected token ids below 300, got 300"
    ):
        eecore.load(directory)

    added = [dict(whole["added_tokens"][0], id=260 + i, content=f"<{i}>") for i in range(41)]
    path.write_text(json.dumps({**whole, "added_tokens": whole["added_tokens"] + added}))
    with pytest.warns(UserWarning, match=r"'<40>': expected an id below 300, got 300"):
        model = eecore.load(directory)
    with pytest.raises(RequestError, match=r"prompt: expected token ids 0..299, got 300"):
        eecore.generate(model, "text <40>", max_tokens=1)

    vocab = {**whole["model"]["vocab"], **{f"t{i}": 256 + i for i in range(64)}}
    path.write_text(
        json.dumps({**whole, "added_tokens": [], "model": {**whole["model"], "vocab": vocab}})
    )
    with pytest.raises(CheckpointError, match="expected at most 300 tokens, as the model has"):
        eecore.load(directory)


# tokenizer_config.json and the templates beside it


def settings(directory: Path, **fields: Any) -> Tokenizer:
    write_byte_tokenizer(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize(
    "templates",
    [
        [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}],
        {"default": "plain", "tool_use": "tools"},
    ],
)
def test_templates_have_names(tmp_path: Path, templates: Any) -> None:
    tokenizer = settings(tmp_path, chat_template=templates)
    assert tokenizer.apply_chat_template(MESSAGES) == "plain"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{"type": "function"}]) == "tools"
    assert tokenizer.apply_chat_template(MESSAGES) == "plain"


def test_templates_lie_beside_it(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (tmp_path / "chat_template.jinja").write_text("whole")
    tokenizer = settings(tmp_path)
    assert tokenizer.apply_chat_template(MESSAGES) == "whole"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[]) == "tools"


def test_settings_that_say_nothing(tmp_path: Path) -> None:
    tokenizer = settings(tmp_path, chat_template=[], bos_token=None, eos_token=None)
    assert tokenizer.special_tokens == {}
    with pytest.raises(ModelError, match="chat_template: expected one in the model directory"):
        tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("chat_template.jinja", b"\xff", "expected UTF-8 text"),
        ("chat_template.jinja", b"a" * (5 << 20), "expected at most 4194304 bytes, got 5242880"),
        ("tokenizer_config.json", b"\xff", "expected JSON"),
        ("tokenizer_config.json", b"[]", r"expected a JSON object, got \[\]"),
        ("tokenizer_config.json", b"[" * 100_000, "expected JSON"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name}: {said}"):
        Tokenizer.from_directory(tmp_path)
