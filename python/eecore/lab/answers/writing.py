"""Files of lines that a model writes, such as its answers, which survive an interrupted run.

A file's first line has the model and the settings; each other line has its own index and is written
as soon as its text is finished. Half a line, which a kill leaves, is dropped. A text that was
unfinished is written again by the next run: every text depends only on its prompt and its seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eecore.config import SamplingParams
from eecore.errors import RequestError
from eecore.files.json_fields import JsonFields, parse_json
from eecore.files.readable import is_file, kind_of, shown_path
from eecore.files.whole import write_text
from eecore.generation import Model
from eecore.output import Output

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from eecore.models import Tokenizer

SEEDS = 1 << 31
MAX_TOKEN_ID = 1 << 24
"""The largest token id in a file."""


def seed_of(seed: int, index: int) -> int:
    """The seed of one of many texts, independent of the others."""
    return (seed * 1_000_003 + index) % SEEDS


@dataclass(frozen=True)
class Ask:
    """A text that a model should write."""

    index: int
    name: str
    """The name in error messages."""
    prompt: list[int]
    sampling: SamplingParams


@dataclass(frozen=True)
class NumberedLine:
    """A line after the first."""

    index: int
    fields: JsonFields
    where: str
    """``answers.jsonl:3``"""


@dataclass(frozen=True)
class LinesFile:
    """A file of lines, which need not exist yet.

    Attributes:
        path: the file's path.
        what: the kind of lines, in the plural, for errors.
        settings: the settings of all lines; a file with others is refused.
    """

    path: Path
    what: str
    settings: DataclassInstance

    @property
    def format(self) -> str:
        """The format that the first line names."""
        return f"eecore {self.what} 1"

    def begin(self) -> list[NumberedLine]:
        """The lines of the file; a new or empty file gets its first line.

        Raises:
            RequestError: the file is malformed, or has other settings.
        """
        content = self.path.read_bytes() if is_file(self.path) else b""
        whole = content.rfind(b"\n") + 1
        if not whole:
            header = {"format": self.format, **asdict(self.settings)}
            write_text(self.path, json.dumps(header) + "\n")
            return []
        lines = list(self.lines())
        if whole < len(content):
            with self.path.open("r+b") as file:
                file.truncate(whole)
        return lines

    def lines(self) -> Iterator[NumberedLine]:
        """The lines so far, in the order in which they were finished.

        Raises:
            RequestError: the file is malformed, or has other settings.
        """
        if kind_of(self.path) == "nothing":
            return
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise RequestError(f"{shown_path(self.path)}: {error.strerror or error}") from None
        first, *lines = content.split(b"\n")[:-1] or [b""]  # the last part is empty, or half a line
        self._check_header(first)
        seen = set()
        for number, line in enumerate(lines, 2):
            where = f"{shown_path(self.path)}:{number}"
            fields = JsonFields.of(parse_json(line, where, RequestError), where, RequestError)
            index = fields.integer("index", 0)
            if index in seen:
                raise RequestError(f"{where}: index: expected each once, got {index} again")
            seen.add(index)
            yield NumberedLine(index, fields, where)

    def write(
        self,
        model: Model,
        asked: Iterator[Ask],
        fields_of: Callable[[int, Output], dict[str, Any]],
        *,
        rows: int,
        wants_more: Callable[[], bool] = lambda: True,
        should_stop: Callable[[], bool] | None = None,
    ) -> bool:
        """Write texts at full depth, a line each, until there are enough or ``asked`` ends.

        Args:
            model: its engine runs nothing else meanwhile.
            asked: the texts, taken as the engine has room.
            fields_of: the fields of a line, from a text's index and output.
            rows: texts that are written at once.
            wants_more: called before another text begins; running texts are finished.
            should_stop: called after each step; True stops, and running texts are lost.

        Returns:
            True: finished; False: stopped by ``should_stop``.

        Raises:
            RequestError: a request failed or was refused; the message names the text.
        """
        engine, running = model.engine(), dict[str, Ask]()
        with self.path.open("a", encoding="utf-8") as file:
            while True:
                while len(running) < rows and wants_more() and (ask := next(asked, None)):
                    try:
                        name = engine.add_request(ask.prompt, exit="full", sampling=ask.sampling)
                    except RequestError as error:
                        raise RequestError(f"{ask.name}: {error}") from None
                    running[name] = ask
                if not running:
                    return True
                for step in engine.step():
                    if step.output is not None:
                        ask = running.pop(step.request_id)
                        if step.output.error is not None:
                            raise RequestError(f"{ask.name}: {step.output.error}")
                        line = {"index": ask.index, **fields_of(ask.index, step.output)}
                        file.write(json.dumps(line, separators=(",", ":")) + "\n")
                        file.flush()
                if should_stop is not None and should_stop():
                    return False

    def _check_header(self, line: bytes) -> None:
        got: Any = parse_json(line, f"{shown_path(self.path)}:1", RequestError)
        if not isinstance(got, dict) or got.get("format") != self.format:
            raise RequestError(
                f"{shown_path(self.path)}:1: expected a file of {self.what}, {self.format!r}"
            )
        for name, expected in asdict(self.settings).items():
            if got.get(name) != expected:
                raise RequestError(
                    f"{shown_path(self.path)}: {name}: expected {expected!r}, as this run has, got "
                    f"{got.get(name)!r}: of another run"
                )


@dataclass(frozen=True)
class AnswerSettings:
    """The settings of a file of answers.

    Attributes:
        model: the model's digest.
        weights: the format that its weights are stored in.
        questions: their source: ``built in``, or a digest of the user's.
        max_tokens: tokens of an answer, at most.
        temperature: for every other answer; the answers between are greedy.
        seed: for the built-in questions and for sampling.
    """

    model: str
    weights: str
    questions: str
    max_tokens: int = 256
    temperature: float = 0.8
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """A question and its answer in tokens of the model, a stop token included."""

    index: int
    """The question's index."""
    prompt: list[int]
    answer: list[int]


def write_answers(
    model: Model,
    questions: Iterable[tuple[int, str]],
    path: Path,
    num_tokens: int,
    settings: AnswerSettings,
    *,
    rows: int = 64,
    progress: Callable[[int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> bool:
    """Write answers into a file until it has ``num_tokens`` tokens of answers; a file that exists
    is continued. An answer is cut off where it would bring more.

    Questions are asked as ``eecore generate`` asks them, each once, those with an even index
    greedily.

    Args:
        model: with a tokenizer and a chat template.
        questions: each with its index, in an order that is always the same.
        path: the file; a file with other settings is refused.
        num_tokens: the tokens wanted, the existing ones included; there are fewer where the
            questions run out.
        rows: answers that are written at once, at most. The result is that of
            :meth:`LinesFile.write`.
        progress: called with the number of tokens, at the beginning and after each answer.
        should_stop: called after each step; True stops.

    Raises:
        RequestError: a question cannot be asked, or the file has other settings.
    """
    lines = _file(path, settings)
    done = {answer.index: len(answer.answer) for answer in map(_answer, lines.begin())}
    tokens = sum(done.values())
    begun: dict[int, int] = {}
    """Answers under way, and the most tokens of each."""

    def left() -> int:
        return num_tokens - tokens - sum(begun.values())

    def asks() -> Iterator[Ask]:
        for index, question in questions:
            if index not in done:
                begun[index] = min(settings.max_tokens, left())
                yield _asked(model, index, question, settings, begun[index])

    def add(count: int) -> None:
        nonlocal tokens
        tokens += count
        if progress is not None:
            progress(tokens)

    def fields_of(index: int, output: Output) -> dict[str, Any]:
        del begun[index]
        add(len(output.token_ids))
        return {"prompt": output.prompt_token_ids, "answer": output.token_ids}

    add(0)
    return lines.write(
        model,
        asks(),
        fields_of,
        rows=rows,
        wants_more=lambda: left() > 0,
        should_stop=should_stop,
    )


def read_answers(path: Path, settings: AnswerSettings) -> list[Answer]:
    """The answers of a file, in the order of their questions.

    Raises:
        RequestError: the file is malformed, or has other settings.
    """
    answers = map(_answer, _file(path, settings).lines())
    return sorted(answers, key=lambda answer: answer.index)


def _asked(
    model: Model, index: int, question: str, settings: AnswerSettings, max_tokens: int
) -> Ask:
    name = f"question {index + 1}"
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=settings.temperature if index % 2 else 0.0,
        seed=seed_of(settings.seed, index),
    )
    try:
        return Ask(index, name, chat_ids(model, question), sampling)
    except RequestError as error:
        raise RequestError(f"{name}: {error}") from None


def chat_ids(model: Model, question: str) -> list[int]:
    """The tokens of a question in the model's chat template; a RequestError where the template
    refuses it.
    """
    return tokenizer_of(model).encode_chat([{"role": "user", "content": question}])


def tokenizer_of(model: Model) -> Tokenizer:
    """The model's tokenizer; a RequestError where it has none."""
    if model.tokenizer is None:
        raise RequestError("model: expected one with a tokenizer, got one without")
    return model.tokenizer


def _file(path: Path, settings: AnswerSettings) -> LinesFile:
    return LinesFile(path, "answers", settings)


def _answer(line: NumberedLine) -> Answer:
    prompt, answer = (
        list(line.fields.integers(name, 0, MAX_TOKEN_ID)) for name in ("prompt", "answer")
    )
    if not prompt or not answer:
        raise RequestError(f"{line.where}: expected tokens of a prompt and an answer, got none")
    return Answer(line.index, prompt, answer)
