"""The work directory of a draft head's training: questions, answers, and states over the
answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from eecore.cli.failures import UsageError
from eecore.cli.options import option
from eecore.files.readable import is_file, kind_of, shown_path

if TYPE_CHECKING:
    from eecore.generation import Model
    from eecore.lab.answers.asking import Round
    from eecore.lab.answers.writing import AnswerSettings
    from eecore.lab.commands.progress import ProgressLine
    from eecore.lab.training.head_states import StatesSettings

QUESTIONS_FILE, ANSWERS_FILE = "questions.jsonl", "answers.jsonl"
STATES = "states"
SHORTEST_ANSWER = 3


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The questions to the model, and the amount of text that it writes."""

    PANEL: ClassVar[str] = "Answers"
    prompts: Path | None = option(
        None,
        "Questions, one a line; .jsonl: strings, or objects with a prompt.",
        show_default="questions of everyday life, code and rewriting that ship with eecore",
    )
    texts: list[Path] | None = option(
        None,
        "Files or directories of texts (.txt, .md, .rst) and Python code, which the model "
        "is asked to summarise, to rewrite, to explain; repeatable.",
    )
    own_questions: bool = option(
        False, "Questions that the model thinks of, and others about its answers."
    )
    tokens: int = option(
        500_000,
        "Tokens of answers to learn from; the last answers are cut off there.",
        min=1,
        max=1 << 34,
    )
    answer_tokens: int = option(256, "Tokens of an answer, at most.", min=3)
    work: Path | None = option(None, "Where answers and states are kept.", show_default="OUT/work")
    also: list[Path] | None = option(
        None, "The work directory of another run, to learn from as well; repeatable."
    )


def check_directories(out: Path, work: Path, kind: str, resume: bool, also: list[Path]) -> None:
    """Check the directories: a new head, a new work directory or one to resume, and other runs'
    directories.

    Raises:
        UsageError: a directory is wrong.
    """
    _check_others(also, work)
    for flag, path in (("--out", out), ("--work", work)):
        got = kind_of(path)
        if got not in ("nothing", "a directory"):
            raise UsageError(f"{flag}: {shown_path(path)}: expected a directory, got {got}")
    _check_out(out, kind, resume)
    if resume:
        if not _is_begun(work):
            got = kind_of(work) if kind_of(work) == "nothing" else "no answers there"
            raise UsageError(f"--resume: {shown_path(work)}: expected a run, got {got}")
        return
    if kind_of(work) == "a directory" and any(work.iterdir()):
        hint = " (a run can be resumed there)" if _is_begun(work) else ""
        raise UsageError(f"--work: expected a new or empty directory, got {shown_path(work)}{hint}")


def _check_out(out: Path, kind: str, resume: bool) -> None:
    """Refuse a directory with a head, or with a model, whose files a block head would replace."""
    from eecore.lab.training import block_pack
    from eecore.models.readers.head_file import WEIGHTS_NAME

    own, other = block_pack.FACTS_NAME, WEIGHTS_NAME
    if kind == "recurrent":
        own, other = other, own
    if is_file(out / other) or (is_file(out / own) and not resume):
        raise UsageError(f"--out: expected no head there yet, got one in {shown_path(out)}")
    replaced = (block_pack.CONFIG_NAME, block_pack.WEIGHTS_NAME)
    is_other = kind == "block" and not is_file(out / own)
    if is_other and any(is_file(out / name) for name in replaced):
        raise UsageError(f"--out: expected no model there, got one in {shown_path(out)}")


def _is_begun(work: Path) -> bool:
    return any(is_file(work / name) for name in (QUESTIONS_FILE, ANSWERS_FILE))


def _check_others(also: list[Path], work: Path) -> None:
    seen = {work.resolve()}
    for path in also:
        if path.resolve() in seen:
            raise UsageError(f"--also: expected runs once each, got {shown_path(path)} again")
        seen.add(path.resolve())
        if not is_file(path / STATES / "states.json"):
            got = kind_of(path) if kind_of(path) == "nothing" else "no states there"
            raise UsageError(
                f"--also: {shown_path(path)}: expected the work directory of a run, got {got}"
            )


class Asked(NamedTuple):
    """The source of questions."""

    name: str
    """The source's name in a file of answers."""
    questions: Callable[[], Iterable[str]] | None
    """The questions in their order; None where the model thinks of them."""
    about_texts: bool = False
    """Whether questions are about a user's own texts; those too long for the model are left out."""


def what_is_asked(answers: Answers, seed: int) -> Asked:
    """The source of questions: a user's file, a user's texts, the model itself, or built-in
    templates.

    Raises:
        UsageError: more than one was chosen.
        RequestError: a file cannot be read, or is empty.
    """
    from eecore.lab.answers.questions import (
        builtin_questions,
        digest_of,
        questions_about,
        read_passages,
        read_questions,
    )

    given = {
        "--prompts": answers.prompts,
        "--texts": answers.texts,
        "--own-questions": answers.own_questions,
    }
    chosen = [flag for flag, value in given.items() if value]
    if len(chosen) > 1:
        raise UsageError(f"{chosen[0]}: expected it or {chosen[1]}, got both")
    if answers.own_questions:
        return Asked("own", None)
    if answers.prompts is not None:
        questions = read_questions(answers.prompts)
        digest = hashlib.sha256(json.dumps(questions).encode()).hexdigest()
        return Asked(digest, lambda: questions)
    if answers.texts:
        passages = read_passages(answers.texts)
        name = f"about {digest_of(passages)}"
        return Asked(name, lambda: questions_about(passages, seed), about_texts=True)
    return Asked("built in", lambda: builtin_questions(seed))


def write_and_read(
    model: Model,
    asked: Asked,
    tokens: int,
    work: Path,
    settings: AnswerSettings,
    states: StatesSettings,
    stop: Callable[[], bool],
    line: ProgressLine,
) -> bool:
    """Write the model's answers, and its states over them.

    Returns:
        True: finished; False: stopped.
    """
    from eecore.lab.answers.writing import read_answers, write_answers
    from eecore.lab.training.head_states import collect_states
    from eecore.models import LlamaModel

    file = work / ANSWERS_FILE
    network = model.network
    assert isinstance(network, LlamaModel)
    for each in _rounds(model, asked, tokens, work, settings, stop, line):
        if each is None or not write_answers(
            model,
            each.questions(),
            file,
            each.num_tokens,
            settings,
            progress=lambda count: line.count("writing", count, tokens, "tokens of answers"),
            should_stop=stop,
        ):
            return False
    answers = read_answers(file, settings)
    written = sum(len(answer.answer) for answer in answers)
    if written < tokens:
        line.keep(f"wrote {written} of {tokens} tokens: there were no more questions")
    texts = [answer for answer in answers if len(answer.answer) >= SHORTEST_ANSWER]
    directory = work / STATES
    directory.mkdir(exist_ok=True)
    return collect_states(
        network,
        texts,
        directory,
        states,
        progress=lambda count, wanted: line.count("reading", count, wanted, "states"),
        should_stop=stop,
    )


def _rounds(
    model: Model,
    asked: Asked,
    tokens: int,
    work: Path,
    settings: AnswerSettings,
    stop: Callable[[], bool],
    line: ProgressLine,
) -> Iterator[Round | None]:
    """Rounds of questions, each answered before the next; None: stopped."""
    from eecore.lab.answers.asking import Round, own_rounds
    from eecore.lab.answers.writing import chat_ids

    if (questions := asked.questions) is not None:
        room = model.config.max_position - settings.max_tokens

        def numbered() -> Iterator[tuple[int, str]]:
            for index, question in enumerate(questions()):
                if not asked.about_texts or len(chat_ids(model, question)) <= room:
                    yield index, question

        yield Round(numbered, tokens)
        return
    yield from own_rounds(
        model,
        work / QUESTIONS_FILE,
        work / ANSWERS_FILE,
        tokens,
        settings,
        progress=lambda done, wanted: line.count("asking", done, wanted, "questions"),
        should_stop=stop,
    )
