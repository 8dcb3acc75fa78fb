"""Questions that a chat model asks itself, and others about what it answered.

A model that has learnt conversations goes on with a conversation in which the user is about to
speak, and so says what it may be asked (Magpie, Xu et al. 2024). Some of the questions begin as one
of a list does, so that code comes up, too. What it answered is a text to summarise, and code to
change, in turn.
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
from eecore.readable import shown_path

if TYPE_CHECKING:
    from eecore.models import Tokenizer

__all__ = [
    "QuestionSettings",
    "Round",
    "follow_ups",
    "own_rounds",
    "read_own_questions",
    "write_questions",
]

MARK = "\uf8ff"
"""In a question's place in the chat template: no template has a character for private use."""
ABOUT = 40 << 20
"""Added to the index of an answer that is asked about: another pair of indices of the same sort."""
OPENED = 0.4
"""Of the questions; the others begin as the model likes."""
OWN_SHARE = 0.65
"""Of the text, what answers questions of the model's own."""
TOKENS_A_QUESTION = 160
"""Of its answer; a few more than there are on the whole, questions without any counted."""
LEAST_QUESTIONS = 64
"""That are thought of at once."""
MAX_WITHOUT_RESULT = 3
"""Times that more questions, each time twice as many, brought no answer."""
LEAST_WORDS, MOST_TOKENS = 3, 160
LEAST_CHARACTERS, MOST_CHARACTERS = 200, 1600
"""Of a text to summarise or to rewrite."""
CODE_BLOCK = re.compile(r"```\w*\n(.+?)```", re.DOTALL)
CODE_SHARE = 0.7
"""Of answers with code in them, those whose code is asked about."""


@dataclass(frozen=True)
class QuestionSettings:
    """Whose questions, and how they are written.

    Attributes:
        model: the model's digest.
        weights: what its weights are stored in.
        temperature: of sampling.
        seed: of sampling, and of how questions begin.
    """

    model: str
    weights: str
    temperature: float = 0.9
    seed: int = 0


@dataclass(frozen=True)
class Round:
    """Questions, when their turn has come, and how many tokens of answers there are behind them."""

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
    """Go on with a file of questions, or begin it, until it has so many lines.

    A question that does not end, or says next to nothing, leaves a line without one.

    Args:
        model: with a tokenizer and a chat template that begins every turn in the same way.
        path: the file; one of other settings is refused.
        count: lines that are wanted.
        settings: of the file.
        rows: as for :meth:`LinesFile.write`, whose result this has.
        progress: called with the lines that there are, and those that are wanted.
        should_stop: likewise.

    Raises:
        RequestError: the template has no place for a question, or the file is of other settings.
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
                max_tokens=MOST_TOKENS, temperature=settings.temperature, seed=seed
            )
            ids = tokenizer.encode(before + _opening(seed), add_special_tokens=False)
            yield Ask(index, f"own question {index + 1}", ids, sampling)

    def fields_of(index: int, output: Output) -> dict[str, Any]:
        said = tokenizer.decode_after(output.prompt_token_ids, output.token_ids)
        question = (_opening(seed_of(settings.seed, index)) + said).split(after)[0].strip()
        is_one = output.finish_reason == "stop" and len(question.split()) >= LEAST_WORDS
        done.add(index)
        told()
        return {"question": question if is_one else ""}

    told()
    return lines.write(model, asks(), fields_of, rows=rows, should_stop=should_stop)


def read_own_questions(path: Path, settings: QuestionSettings) -> list[tuple[int, str]]:
    """The questions of a file with their indices, each question once.

    Raises:
        RequestError: it is not such a file, or of other settings.
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
    """Questions about answers: to summarise or to rewrite a text, or to change code.

    Their indices are the answers' and :data:`ABOUT`. Answers to such questions are left out, and
    those that are too short.

    Args:
        tokenizer: the model's.
        answers: the model's.
        seed: of what is asked.
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
        elif len(text) >= LEAST_CHARACTERS:
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
    """Questions of the model's own, then others about what it answered, and so on.

    Each round is to be answered before the next one is asked for: there are more until there is as
    much text as is wanted, or more and more questions bring none. How many that takes depends on
    the model: one of everyday talk ends nearly each, one of code a third.

    Args:
        model: with a tokenizer and a chat template.
        path: of the file of questions, which is begun or gone on with.
        answers: of the file that the answers to all of them will be in.
        num_tokens: of answers that are wanted.
        settings: of the answers.
        progress: called after each question.
        should_stop: asked after each step; when it says True None comes, and no more.

    Raises:
        RequestError: see :func:`write_questions`; the model ends none of many questions.
    """
    of = QuestionSettings(settings.model, settings.weights, seed=settings.seed)
    most = model.network.config.max_position - settings.max_tokens

    def about_answers() -> Iterator[tuple[int, str]]:
        written = read_answers(answers, settings)
        return _fitting(model, follow_ups(tokenizer_of(model), written, settings.seed), most)

    # What an earlier run wrote or was at.
    asked = 1 + max((line.index for line in _file(path, of).lines()), default=-1)
    tokens_a_question = float(TOKENS_A_QUESTION)
    count = have = without_result = 0
    while True:
        own = math.ceil(OWN_SHARE * (num_tokens - have))
        more = max(
            LEAST_QUESTIONS, math.ceil(own / tokens_a_question), count if without_result else 0
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
    """Those that the model can read, and answer behind them."""
    return ((i, question) for i, question in questions if len(chat_ids(model, question)) <= most)


def _cut(text: str, *ends: str) -> str:
    """At most so many characters, up to a line's or a sentence's end."""
    if len(text) <= MOST_CHARACTERS:
        return text
    cut = max(text.rfind(end, 0, MOST_CHARACTERS) for end in ends)
    return text[: cut + 1].rstrip() if cut > 0 else text[:MOST_CHARACTERS]


def _opening(seed: int) -> str:
    chance = random.Random(seed)
    return chance.choice(templates("openings")) if chance.random() < OPENED else ""


def _turn(tokenizer: Tokenizer) -> tuple[str, str]:
    """What the chat template writes before a user's question, and behind it."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARK}])
    before, mark, behind = text.partition(MARK)
    end = behind.strip().split("\n")[0]
    if not mark or not before or not end:
        raise RequestError(
            f"{tokenizer.name}: chat_template: expected text around a question, got {text!r}"
        )
    return before, end


def _file(path: Path, settings: QuestionSettings) -> LinesFile:
    return LinesFile(path, "questions", settings)
