"""The work directory of a draft head's training: answers, and states over the answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from eecore.cli.failures import UsageError
from eecore.cli.options import option
from eecore.files.readable import is_file, kind_of, shown_path

if TYPE_CHECKING:
    from eecore.generation import Model
    from eecore.lab.answers.writing import AnswerSettings
    from eecore.lab.commands.progress import ProgressLine
    from eecore.lab.training.head_states import StatesSettings

ANSWERS_FILE = "answers.jsonl"
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
    tokens: int = option(
        500_000,
        "Tokens of answers to learn from; the last answers are cut off there.",
        min=1,
        max=1 << 34,
    )
    answer_tokens: int = option(256, "Tokens of an answer, at most.", min=3)
    work: Path | None = option(None, "Where answers and states are kept.", show_default="OUT/work")


def check_directories(out: Path, work: Path, resume: bool) -> None:
    """Check for a new head, and for a new work directory or one to resume.

    Raises:
        UsageError: a directory is wrong.
    """
    from eecore.models.readers.head_file import WEIGHTS_NAME

    for flag, path in (("--out", out), ("--work", work)):
        got = kind_of(path)
        if got not in ("nothing", "a directory"):
            raise UsageError(f"{flag}: {shown_path(path)}: expected a directory, got {got}")
    if is_file(out / WEIGHTS_NAME) and not resume:
        raise UsageError(f"--out: expected no head there yet, got one in {shown_path(out)}")
    is_begun = is_file(work / ANSWERS_FILE)
    if resume:
        if not is_begun:
            got = kind_of(work) if kind_of(work) == "nothing" else "no answers there"
            raise UsageError(f"--resume: {shown_path(work)}: expected a run, got {got}")
    elif kind_of(work) == "a directory" and any(work.iterdir()):
        hint = " (a run can be resumed there)" if is_begun else ""
        raise UsageError(f"--work: expected a new or empty directory, got {shown_path(work)}{hint}")


class Asked(NamedTuple):
    """The source of questions."""

    name: str
    """The source's name in a file of answers."""
    questions: Callable[[], Iterable[str]]
    """The questions in their order."""


def what_is_asked(answers: Answers, seed: int) -> Asked:
    """The source of questions: a user's file, or built-in templates.

    Raises:
        RequestError: a file cannot be read, or is empty.
    """
    from eecore.lab.answers.questions import builtin_questions, read_questions

    if answers.prompts is not None:
        questions = read_questions(answers.prompts)
        digest = hashlib.sha256(json.dumps(questions).encode()).hexdigest()
        return Asked(digest, lambda: questions)
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

    assert isinstance(model.network, LlamaModel)
    file = work / ANSWERS_FILE
    if not write_answers(
        model,
        enumerate(asked.questions()),
        file,
        tokens,
        settings,
        progress=lambda count: line.count("writing", count, tokens, "tokens of answers"),
        should_stop=stop,
    ):
        return False
    answers = read_answers(file, settings)
    written = sum(len(answer.answer) for answer in answers)
    if written < tokens:
        line.keep(f"wrote {written} of {tokens} tokens: there were no more questions")
    directory = work / STATES
    directory.mkdir(exist_ok=True)
    return collect_states(
        model.network,
        [answer for answer in answers if len(answer.answer) >= SHORTEST_ANSWER],
        directory,
        states,
        progress=lambda count, wanted: line.count("reading", count, wanted, "states"),
        should_stop=stop,
    )
