"""A model's answers to questions, into a file of JSON lines that survives whatever ends the run.

The first line says of which model and settings they are; each of the others is an answer, in token
ids, put down as soon as it is finished. What was under way is written again by the next run: every
answer depends on its question and its seed alone.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from eecore.config import SamplingParams
from eecore.engine.engine import Engine
from eecore.errors import RequestError
from eecore.files import write_text
from eecore.generation import Model
from eecore.json_fields import JsonFields, parse_json
from eecore.output import Output
from eecore.readable import is_file, shown_path

__all__ = ["Answer", "AnswerSettings", "AnswersReport", "read_answers", "write_answers"]

FORMAT = "eecore answers 1"
SEEDS = 1 << 31
MOST_TOKENS = 1 << 24


@dataclass(frozen=True)
class AnswerSettings:
    """Whose answers, and how they are written.

    Attributes:
        model: the model's digest.
        weights: what its weights are stored in.
        questions: where they are from: ``built in``, or a digest of the user's.
        max_tokens: most of an answer.
        temperature: of every other answer; those between are greedy.
        seed: of the built-in questions and of sampling.
    """

    model: str
    weights: str
    questions: str
    max_tokens: int = 256
    temperature: float = 0.8
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """An answer, and what was asked: in tokens of the model, a stop token included."""

    index: int
    """Of the question."""
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class AnswersReport:
    """How far the writing has come, with what earlier runs wrote."""

    answers: int
    tokens: int
    num_tokens: int
    """How many are wanted."""
    tokens_per_s: float
    """Of this run."""


def write_answers(
    model: Model,
    questions: Iterable[str],
    path: Path,
    num_tokens: int,
    settings: AnswerSettings,
    *,
    rows: int = 64,
    progress: Callable[[AnswersReport], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> bool:
    """Go on with a file of answers, or begin it, until it has so many tokens of answers.

    Questions are asked as ``eecore generate --chat`` asks them, each once, those with an even
    index greedily.

    Args:
        model: with a tokenizer and a chat template.
        questions: in an order that is always the same.
        path: the file; one of other settings is refused.
        num_tokens: how many are wanted at least, with those that are there; fewer where there are
            no more questions.
        settings: of the file.
        rows: answers that are written at once.
        progress: called after each answer.
        should_stop: asked after each step; when it says True what is finished is in the file.

    Returns:
        Whether it came to its end; False when it was told to stop.

    Raises:
        RequestError: a question cannot be asked, or the file is of other settings.
    """
    done = {answer.index: len(answer.answer) for answer in _open(path, settings)}
    report = _Reporter(len(done), sum(done.values()), num_tokens, progress)
    asked = (pair for pair in enumerate(questions) if pair[0] not in done)
    engine = model.engine()
    running: dict[str, int] = {}
    with path.open("a", encoding="utf-8") as file:
        while True:
            room = rows - len(running) if report.tokens < num_tokens else 0
            for index, question in itertools.islice(asked, room):
                running[_ask(model, engine, index, question, settings)] = index
            if not running:
                return True
            for step in engine.step():
                if step.output is not None:
                    _put_down(file, running.pop(step.request_id), step.output)
                    report.add(len(step.output.token_ids))
            if should_stop is not None and should_stop():
                return False


def read_answers(path: Path, settings: AnswerSettings) -> list[Answer]:
    """The answers of a file, in the order of their questions.

    Raises:
        RequestError: it is not such a file, or of other settings.
    """
    return sorted(_read(path, settings), key=lambda answer: answer.index)


class _Reporter:
    def __init__(
        self,
        answers: int,
        tokens: int,
        num_tokens: int,
        progress: Callable[[AnswersReport], None] | None,
    ) -> None:
        self.answers, self.tokens, self.num_tokens = answers, tokens, num_tokens
        self._progress = progress
        self._started, self._before = time.monotonic(), tokens

    def add(self, num_tokens: int) -> None:
        self.answers += 1
        self.tokens += num_tokens
        if self._progress is not None:
            seconds = max(time.monotonic() - self._started, 1e-9)
            speed = (self.tokens - self._before) / seconds
            self._progress(AnswersReport(self.answers, self.tokens, self.num_tokens, speed))


def _ask(model: Model, engine: Engine, index: int, question: str, settings: AnswerSettings) -> str:
    """Have a question answered; the request's name."""
    try:
        ids = _chat_ids(model, question)
        return engine.add_request(ids, exit="full", sampling=_sampling(settings, index))
    except RequestError as error:
        raise RequestError(f"question {index + 1}: {error}") from None


def _chat_ids(model: Model, question: str) -> list[int]:
    if model.tokenizer is None:
        raise RequestError("model: expected one with a tokenizer, got one without")
    text = model.tokenizer.apply_chat_template([{"role": "user", "content": question}])
    return model.tokenizer.encode(text, add_special_tokens=False)


def _sampling(settings: AnswerSettings, index: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=settings.max_tokens,
        temperature=settings.temperature if index % 2 else 0.0,
        seed=(settings.seed * 1_000_003 + index) % SEEDS,
    )


def _put_down(file: IO[str], index: int, output: Output) -> None:
    """A line of the file; what failed is not an answer."""
    if output.error is not None:
        raise RequestError(f"question {index + 1}: {output.error}")
    line = {"index": index, "prompt": output.prompt_token_ids, "answer": output.token_ids}
    file.write(json.dumps(line, separators=(",", ":")) + "\n")
    file.flush()


def _open(path: Path, settings: AnswerSettings) -> list[Answer]:
    """What is in the file, which begins with its settings when this returns; half a line goes."""
    if not is_file(path):
        write_text(path, _header(settings))
        return []
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if not whole:
        write_text(path, _header(settings))
        return []
    answers = list(_read(path, settings))
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
    return answers


def _header(settings: AnswerSettings) -> str:
    return json.dumps({"format": FORMAT, **asdict(settings)}) + "\n"


def _read(path: Path, settings: AnswerSettings) -> Iterator[Answer]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RequestError(f"{shown_path(path)}: {error.strerror or error}") from None
    first, *lines = content.split(b"\n")[:-1] or [b""]  # the last is empty, or half a line
    _check_header(first, path, settings)
    seen = set()
    for number, line in enumerate(lines, 2):
        where = f"{shown_path(path)}:{number}"
        fields = JsonFields.of(parse_json(line, where, RequestError), where, RequestError)
        index = fields.integer("index", 0)
        if index in seen:
            raise RequestError(f"{where}: index: expected each once, got {index} again")
        seen.add(index)
        prompt, answer = (
            list(fields.integers(name, 0, MOST_TOKENS)) for name in ("prompt", "answer")
        )
        if not prompt or not answer:
            raise RequestError(f"{where}: expected tokens of a prompt and an answer, got none")
        yield Answer(index, prompt, answer)


def _check_header(line: bytes, path: Path, settings: AnswerSettings) -> None:
    where = f"{shown_path(path)}:1"
    got: Any = parse_json(line, where, RequestError)
    if not isinstance(got, dict) or got.get("format") != FORMAT:
        raise RequestError(f"{where}: expected a file of answers, {FORMAT!r}")
    for name, expected in asdict(settings).items():
        if got.get(name) != expected:
            raise RequestError(
                f"{shown_path(path)}: {name}: expected {expected!r}, as this run has, got "
                f"{got.get(name)!r}: of another run"
            )
