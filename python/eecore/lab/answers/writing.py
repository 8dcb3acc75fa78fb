"""A model's answers to questions, in token ids, into a file that survives whatever ends the run.

What was under way is written again by the next run: every answer depends on its question and its
seed alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from eecore.config import SamplingParams
from eecore.errors import RequestError
from eecore.generation import Model
from eecore.lab.answers.lines import LinesFile, NumberedLine, put_down
from eecore.lab.answers.many import Ask, seed_of, write_all
from eecore.output import Output

__all__ = [
    "Answer",
    "AnswerSettings",
    "AnswersReport",
    "chat_ids",
    "read_answers",
    "write_answers",
]

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
    questions: Iterable[tuple[int, str]],
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
        questions: each with its index, in an order that is always the same.
        path: the file; one of other settings is refused.
        num_tokens: how many are wanted at least, with those that are there; fewer where there are
            no more questions.
        settings: of the file.
        rows: answers that are written at once.
        progress: called at the beginning and after each answer.
        should_stop: asked after each step; when it says True what is finished is in the file.

    Returns:
        Whether it came to its end; False when it was told to stop.

    Raises:
        RequestError: a question cannot be asked, or the file is of other settings.
    """
    lines = _file(path, settings)
    done = {answer.index: len(answer.answer) for answer in map(_answer, lines.begin())}
    report = _Reporter(len(done), sum(done.values()), num_tokens, progress)
    asked = (
        _asked(model, index, question, settings)
        for index, question in questions
        if index not in done
    )
    with path.open("a", encoding="utf-8") as file:

        def finished(index: int, output: Output) -> None:
            put_down(file, index, prompt=output.prompt_token_ids, answer=output.token_ids)
            report.add(len(output.token_ids))

        return write_all(
            model.engine(),
            asked,
            finished,
            rows=rows,
            wants_more=lambda: report.tokens < num_tokens,
            should_stop=should_stop,
        )


def read_answers(path: Path, settings: AnswerSettings) -> list[Answer]:
    """The answers of a file, in the order of their questions.

    Raises:
        RequestError: it is not such a file, or of other settings.
    """
    answers = map(_answer, _file(path, settings).lines())
    return sorted(answers, key=lambda answer: answer.index)


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
        self._tell()

    def add(self, num_tokens: int) -> None:
        self.answers += 1
        self.tokens += num_tokens
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            seconds = max(time.monotonic() - self._started, 1e-9)
            speed = (self.tokens - self._before) / seconds
            self._progress(AnswersReport(self.answers, self.tokens, self.num_tokens, speed))


def _asked(model: Model, index: int, question: str, settings: AnswerSettings) -> Ask:
    name = f"question {index + 1}"
    try:
        return Ask(index, name, chat_ids(model, question), _sampling(settings, index))
    except RequestError as error:
        raise RequestError(f"{name}: {error}") from None


def chat_ids(model: Model, question: str) -> list[int]:
    """A question as the model is asked it.

    Raises:
        RequestError: there is no tokenizer, or the chat template refuses it.
    """
    if model.tokenizer is None:
        raise RequestError("model: expected one with a tokenizer, got one without")
    return model.tokenizer.encode_chat([{"role": "user", "content": question}])


def _sampling(settings: AnswerSettings, index: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=settings.max_tokens,
        temperature=settings.temperature if index % 2 else 0.0,
        seed=seed_of(settings.seed, index),
    )


def _file(path: Path, settings: AnswerSettings) -> LinesFile:
    return LinesFile(path, "answers", settings)


def _answer(line: NumberedLine) -> Answer:
    prompt, answer = (
        list(line.fields.integers(name, 0, MOST_TOKENS)) for name in ("prompt", "answer")
    )
    if not prompt or not answer:
        raise RequestError(f"{line.where}: expected tokens of a prompt and an answer, got none")
    return Answer(line.index, prompt, answer)
