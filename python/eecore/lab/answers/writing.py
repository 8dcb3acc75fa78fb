"""A model's answers to questions, in token ids, into a file that survives whatever ends the run.

What was under way is written again by the next run: every answer depends on its question and its
seed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eecore.config import SamplingParams
from eecore.errors import RequestError
from eecore.generation import Model
from eecore.lab.answers.lines import Ask, LinesFile, NumberedLine, seed_of
from eecore.output import Output

__all__ = [
    "Answer",
    "AnswerSettings",
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
        rows: as for :meth:`LinesFile.write`, whose result this has.
        progress: called with the tokens that there are, at the beginning and after each answer.
        should_stop: likewise.

    Raises:
        RequestError: a question cannot be asked, or the file is of other settings.
    """
    lines = _file(path, settings)
    done = {answer.index: len(answer.answer) for answer in map(_answer, lines.begin())}
    tokens = sum(done.values())

    def add(count: int) -> None:
        nonlocal tokens
        tokens += count
        if progress is not None:
            progress(tokens)

    def fields_of(_index: int, output: Output) -> dict[str, Any]:
        add(len(output.token_ids))
        return {"prompt": output.prompt_token_ids, "answer": output.token_ids}

    add(0)
    return lines.write(
        model,
        (_asked(model, *each, settings) for each in questions if each[0] not in done),
        fields_of,
        rows=rows,
        wants_more=lambda: tokens < num_tokens,
        should_stop=should_stop,
    )


def read_answers(path: Path, settings: AnswerSettings) -> list[Answer]:
    """The answers of a file, in the order of their questions.

    Raises:
        RequestError: it is not such a file, or of other settings.
    """
    answers = map(_answer, _file(path, settings).lines())
    return sorted(answers, key=lambda answer: answer.index)


def _asked(model: Model, index: int, question: str, settings: AnswerSettings) -> Ask:
    name = f"question {index + 1}"
    sampling = SamplingParams(
        max_tokens=settings.max_tokens,
        temperature=settings.temperature if index % 2 else 0.0,
        seed=seed_of(settings.seed, index),
    )
    try:
        return Ask(index, name, chat_ids(model, question), sampling)
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


def _file(path: Path, settings: AnswerSettings) -> LinesFile:
    return LinesFile(path, "answers", settings)


def _answer(line: NumberedLine) -> Answer:
    prompt, answer = (
        list(line.fields.integers(name, 0, MOST_TOKENS)) for name in ("prompt", "answer")
    )
    if not prompt or not answer:
        raise RequestError(f"{line.where}: expected tokens of a prompt and an answer, got none")
    return Answer(line.index, prompt, answer)
