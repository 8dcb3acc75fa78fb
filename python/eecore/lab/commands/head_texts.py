"""What a draft head learns from, in a work directory: questions, answers, and states over these."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from eecore.console.failures import UsageError
from eecore.readable import is_file, kind_of, shown_path

if TYPE_CHECKING:
    from eecore.generation import Model
    from eecore.lab.answers import AnswerSettings, Round
    from eecore.lab.commands.train import ProgressLine
    from eecore.lab.training import StatesSettings

__all__ = ["STATES", "Asked", "check_directories", "what_is_asked", "write_and_read"]

QUESTIONS_FILE, ANSWERS_FILE = "questions.jsonl", "answers.jsonl"
STATES = "states"
SHORTEST_ANSWER = 3


def check_directories(out: Path, work: Path, resume: bool, also: list[Path]) -> None:
    """A new head, in a new work directory or in that of a run to resume, and those of others.

    Raises:
        UsageError: they are not.
    """
    _check_others(also, work)
    for flag, path in (("--out", out), ("--work", work)):
        kind = kind_of(path)
        if kind not in ("nothing", "a directory"):
            raise UsageError(f"{flag}: {shown_path(path)}: expected a directory, got {kind}")
    if resume:
        if not _is_begun(work):
            got = kind_of(work) if kind_of(work) == "nothing" else "no answers there"
            raise UsageError(f"--resume: {shown_path(work)}: expected a run, got {got}")
        return
    from eecore.models.readers.head_file import WEIGHTS_NAME

    if is_file(out / WEIGHTS_NAME):
        raise UsageError(f"--out: expected no head there yet, got one in {shown_path(out)}")
    if kind_of(work) == "a directory" and any(work.iterdir()):
        hint = " (a run can be resumed there)" if _is_begun(work) else ""
        raise UsageError(f"--work: expected a new or empty directory, got {shown_path(work)}{hint}")


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
    """Where questions are from."""

    name: str
    """What a file of answers calls it."""
    questions: Callable[[], Iterable[str]] | None
    """In the order in which they are asked; None where the model thinks of them."""
    about_texts: bool = False
    """Of a user's own texts: those that are too long for the model are left out."""


def what_is_asked(prompts: Path | None, texts: Sequence[Path], own: bool, seed: int) -> Asked:
    """A user's questions, others about a user's texts, the model's own, or those that ship.

    Raises:
        UsageError: more than one of these.
        RequestError: a file of them cannot be read, or there is nothing in it.
    """
    from eecore.lab.answers import (
        builtin_questions,
        digest_of,
        questions_about,
        read_passages,
        read_questions,
    )

    flags = {"--prompts": prompts is not None, "--texts": bool(texts), "--own-questions": own}
    chosen = [flag for flag, is_given in flags.items() if is_given]
    if len(chosen) > 1:
        raise UsageError(f"{chosen[0]}: expected it or {chosen[1]}, got both")
    if own:
        return Asked("own", None)
    if prompts is not None:
        questions = read_questions(prompts)
        return Asked(_digest_of(questions), lambda: questions)
    if texts:
        passages = read_passages(texts)
        name = f"about {digest_of(passages)}"
        return Asked(name, lambda: questions_about(passages, seed), about_texts=True)
    return Asked("built in", lambda: builtin_questions(seed))


def _digest_of(questions: list[str]) -> str:
    return hashlib.sha256(json.dumps(questions).encode()).hexdigest()


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
    """The model's answers to what it is asked, and its states over them.

    Returns:
        Whether it came to its end; False when told to stop.
    """
    from eecore.lab.answers import read_answers, write_answers
    from eecore.lab.training import WrittenText, collect_states
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
            progress=lambda r: line.count("writing", r.tokens, tokens, "tokens of answers"),
            should_stop=stop,
        ):
            return False
    answers = read_answers(file, settings)
    written = sum(len(answer.answer) for answer in answers)
    if written < tokens:
        line.keep(f"wrote {written} of {tokens} tokens: there were no more questions")
    texts = [
        WrittenText(answer.index, answer.prompt, answer.answer)
        for answer in answers
        if len(answer.answer) >= SHORTEST_ANSWER
    ]
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
    """What the model is asked, round by round, each answered before the next; None: stopped."""
    from eecore.lab.answers import Round, chat_ids, own_rounds

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
        progress=lambda r: line.count("asking", r.questions, r.wanted, "questions"),
        should_stop=stop,
    )
