"""Questions that a chat model asks itself, and questions about its answers.

A model that has learnt conversations continues one in which the user is about to speak, and so
writes a question (Magpie, Xu et al. 2024). Some of the questions are given a beginning from a list,
so that code is asked for, too. The answers then become texts to summarise and code to change.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eecore.config import SamplingParams
from eecore.errors import RequestError
from eecore.files.readable import shown_path
from eecore.generation import Model
from eecore.lab.answers.questions import CODE_CHANGES, TEXT_CHANGES, about, templates
from eecore.lab.answers.writing import (
    Answer,
    AnswerSettings,
    Ask,
    LinesFile,
    chat_ids,
    read_answers,
    seed_of,
    tokenizer_of,
)
from eecore.output import Output

if TYPE_CHECKING:
    from eecore.models import Tokenizer

MARK = "\uf8ff"
"""Marks a question's place in the chat template: no template has a character for private use."""
ABOUT = 40 << 20
"""Added to the index of an answer that is asked about; even and odd indices stay so."""
OPENED = 0.4
"""Share of the questions that are given a beginning."""
OWN_SHARE = 0.65
"""Share of the text that answers the model's own questions."""
TOKENS_A_QUESTION = 160
"""Tokens of an answer, first guess: a little above the mean, questions without an answer
included.
"""
MIN_QUESTIONS = 64
"""The fewest questions that are written at once."""
MAX_WITHOUT_RESULT = 3
"""Rounds in a row, each with twice as many questions, that may bring no answer."""
MIN_WORDS = 3
"""Words of a question, at least."""
MAX_TOKENS = 160
"""Tokens of a question, at most."""
MIN_CHARACTERS = 200
"""Characters of a text to summarise or to rewrite, at least."""
MAX_CHARACTERS = 1600
"""Characters that are quoted of it, at most."""
CODE_BLOCK = re.compile(r"```\w*\n(.+?)```", re.DOTALL)
CODE_SHARE = 0.7
"""Share of the answers with code whose code is asked about."""


@dataclass(frozen=True)
class QuestionSettings:
    """The settings of a file of questions.

    Attributes:
        model: the model's digest.
        weights: the format that its weights are stored in.
        temperature: the sampling temperature.
        seed: for sampling, and for the beginnings of questions.
    """

    model: str
    weights: str
    temperature: float = 0.9
    seed: int = 0


@dataclass(frozen=True)
class Round:
    """A round of questions, and the tokens of answers that there should be after it."""

    questions: Callable[[], Iterable[tuple[int, str]]]
    num_tokens: int


def write_questions(
    model: Model,
    path: Path,
    count: int,
    settings: QuestionSettings,
    *,
    rows: int = 64,
    progress: Callable[[int, int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> bool:
    """Write questions into a file until it has ``count`` lines; a file that exists is continued.

    A question that does not end, or has too few words, leaves a line without one.

    Args:
        model: with a tokenizer and a chat template that begins every turn in the same way.
        path: the file; a file with other settings is refused.
        rows: questions that are written at once. The result is that of :meth:`LinesFile.write`.
        progress: called with the number of lines, and the number wanted.
        should_stop: called after each step; True stops.

    Raises:
        RequestError: the template has no place for a question, or the file has other settings.
    """
    tokenizer = tokenizer_of(model)
    before, after = _turn(tokenizer)
    lines = _file(path, settings)
    done = {line.index for line in lines.begin()}

    def told() -> None:
        if progress is not None:
            progress(len(done), count)

    def asks() -> Iterator[Ask]:
        for index in sorted(set(range(count)) - done):
            seed = seed_of(settings.seed, index)
            sampling = SamplingParams(
                max_tokens=MAX_TOKENS, temperature=settings.temperature, seed=seed
            )
            ids = tokenizer.encode(before + _opening(seed), add_special_tokens=False)
            yield Ask(index, f"own question {index + 1}", ids, sampling)

    def fields_of(index: int, output: Output) -> dict[str, Any]:
        said = tokenizer.decode_after(output.prompt_token_ids, output.token_ids)
        question = (_opening(seed_of(settings.seed, index)) + said).split(after)[0].strip()
        is_one = output.finish_reason == "stop" and len(question.split()) >= MIN_WORDS
        done.add(index)
        told()
        return {"question": question if is_one else ""}

    told()
    return lines.write(model, asks(), fields_of, rows=rows, should_stop=should_stop)


def read_own_questions(path: Path, settings: QuestionSettings) -> list[tuple[int, str]]:
    """The questions of a file with their indices, each question once.

    Raises:
        RequestError: the file is malformed, or has other settings.
    """
    found: dict[str, int] = {}
    for line in sorted(_file(path, settings).lines(), key=lambda line: line.index):
        question = line.fields.text("question")
        if question:
            found.setdefault(question, line.index)
    return [(index, question) for question, index in found.items()]


def follow_ups(
    tokenizer: Tokenizer, answers: Iterable[Answer], seed: int
) -> Iterator[tuple[int, str]]:
    """Questions about answers: to summarise or rewrite a text, or to change code.

    A question's index is the answer's plus :data:`ABOUT`. Answers to such questions and short
    answers are left out.
    """
    for answer in answers:
        index = ABOUT + answer.index
        if index >= 2 * ABOUT:
            continue
        text = tokenizer.decode(answer.answer)
        chance = random.Random(seed_of(seed, index))
        code = CODE_BLOCK.search(text)
        if code is not None and chance.random() < CODE_SHARE:
            lines = _cut(code[1].rstrip(), "\n")
            if lines.count("\n") >= 2:
                yield index, about(chance, CODE_CHANGES, lines)
        elif len(text) >= MIN_CHARACTERS:
            yield index, about(chance, TEXT_CHANGES, _cut(text.strip(), "\n", ". "))


def own_rounds(
    model: Model,
    path: Path,
    answers: Path,
    num_tokens: int,
    settings: AnswerSettings,
    *,
    progress: Callable[[int, int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Iterator[Round | None]:
    """Rounds of the model's own questions and of questions about its answers, by turns.

    The caller answers each round before it asks for the next. Rounds go on until there are as many
    tokens as wanted, or until more and more questions bring no answer. The number depends on the
    model: a model for everyday talk ends nearly every answer, one for code a third.

    Args:
        model: with a tokenizer and a chat template.
        path: the file of questions, new or to be continued.
        answers: the file that the caller writes all answers to.
        num_tokens: tokens of answers that are wanted.
        progress: called after each question.
        should_stop: called after each step; True makes the next round None, the last one.

    Raises:
        RequestError: see :func:`write_questions`; or the model ended none of many questions.
    """
    of = QuestionSettings(settings.model, settings.weights, seed=settings.seed)
    most = model.network.config.max_position - settings.max_tokens

    def about_answers() -> Iterator[tuple[int, str]]:
        written = read_answers(answers, settings)
        return _fitting(model, follow_ups(tokenizer_of(model), written, settings.seed), most)

    # The number that an earlier run has written, or was about to write.
    asked = 1 + max((line.index for line in _file(path, of).lines()), default=-1)
    tokens_a_question = float(TOKENS_A_QUESTION)
    count = have = without_result = 0
    while True:
        own = math.ceil(OWN_SHARE * (num_tokens - have))
        more = max(
            MIN_QUESTIONS, math.ceil(own / tokens_a_question), count if without_result else 0
        )
        count = max(asked, count + more)
        if not write_questions(model, path, count, of, progress=progress, should_stop=should_stop):
            yield None
            return
        questions = read_own_questions(path, of)
        if not questions:
            raise RequestError(
                f"{shown_path(path)}: expected questions, got none that the model ended in {count} "
                "tries: it may not have learnt conversations"
            )
        yield Round(partial(_fitting, model, questions, most), have + own)
        yield Round(about_answers, num_tokens)
        before, have = have, sum(len(each.answer) for each in read_answers(answers, settings))
        without_result = without_result + 1 if have == before else 0
        if have >= num_tokens or without_result == MAX_WITHOUT_RESULT:
            return
        tokens_a_question = OWN_SHARE * have / count


def _fitting(
    model: Model, questions: Iterable[tuple[int, str]], most: int
) -> Iterator[tuple[int, str]]:
    """The questions that fit into the model's context together with an answer."""
    return ((i, question) for i, question in questions if len(chat_ids(model, question)) <= most)


def _cut(text: str, *ends: str) -> str:
    """The text up to an end of a line or sentence within :data:`MAX_CHARACTERS`."""
    if len(text) <= MAX_CHARACTERS:
        return text
    cut = max(text.rfind(end, 0, MAX_CHARACTERS) for end in ends)
    return text[: cut + 1].rstrip() if cut > 0 else text[:MAX_CHARACTERS]


def _opening(seed: int) -> str:
    chance = random.Random(seed)
    return chance.choice(templates("openings")) if chance.random() < OPENED else ""


def _turn(tokenizer: Tokenizer) -> tuple[str, str]:
    """The chat template's text before and after a user's question."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARK}])
    before, mark, after = text.partition(MARK)
    end = after.strip().split("\n")[0]
    if not mark or not before or not end:
        raise RequestError(
            f"{tokenizer.name}: chat_template: expected text around a question, got {text!r}"
        )
    return before, end


def _file(path: Path, settings: QuestionSettings) -> LinesFile:
    return LinesFile(path, "questions", settings)
