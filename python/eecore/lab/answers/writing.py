"""A file of a model's own answers, which survives an interrupted run.

The file's first line has the model and the settings; each other line has an answer, and is written
as soon as that is finished. Half a line, which a kill leaves, is dropped. An answer that was
unfinished is written again by the next run: it depends only on its question and its seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from eecore.config import SamplingParams
from eecore.engine.engine import Engine
from eecore.errors import RequestError
from eecore.files.json_fields import JsonFields, parse_json
from eecore.files.readable import is_file, kind_of, shown_path
from eecore.files.whole import write_text
from eecore.generation import Model

FORMAT = "eecore answers 1"
SEEDS = 1 << 31
MAX_TOKEN_ID = 1 << 24
"""The largest token id in a file."""


@dataclass(frozen=True)
class AnswerSettings:
    """The settings of a file of answers; a file with others is refused.

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

    Questions are asked as ``eecore generate`` asks them, at full depth, each once, those with an
    even index greedily.

    Args:
        model: with a tokenizer and a chat template; its engine runs nothing else meanwhile.
        questions: each with its index, in an order that is always the same.
        path: the file; a file with other settings is refused.
        num_tokens: the tokens wanted, the existing ones included; there are fewer where the
            questions run out.
        rows: answers that are written at once, at most.
        progress: called with the number of tokens, at the beginning and after each answer.
        should_stop: called after each step; True stops, and running answers are lost.

    Returns:
        True: finished; False: stopped by ``should_stop``.

    Raises:
        RequestError: a question cannot be asked, or the file has other settings.
    """
    done = {answer.index: len(answer.answer) for answer in _begin(path, settings)}
    tokens, asked = sum(done.values()), iter(questions)
    engine = model.engine()
    running: dict[str, tuple[int, int]] = {}  # by request: the question, and the most tokens
    if progress is not None:
        progress(tokens)
    with path.open("a", encoding="utf-8") as file:
        while True:
            while len(running) < rows:
                left = num_tokens - tokens - sum(most for _, most in running.values())
                new = (each for each in asked if each[0] not in done)
                if left <= 0 or (question := next(new, None)) is None:
                    break
                most = min(settings.max_tokens, left)
                running[_ask(engine, model, *question, settings, most)] = question[0], most
            if not running:
                return True
            for step in engine.step():
                if (output := step.output) is None:
                    continue
                index, _ = running.pop(step.request_id)
                if output.error is not None:
                    raise RequestError(f"question {index + 1}: {output.error}")
                found = Answer(index, output.prompt_token_ids, output.token_ids)
                file.write(json.dumps(asdict(found), separators=(",", ":")) + "\n")
                file.flush()
                tokens += len(output.token_ids)
                if progress is not None:
                    progress(tokens)
            if should_stop is not None and should_stop():
                return False


def read_answers(path: Path, settings: AnswerSettings) -> list[Answer]:
    """The answers of a file, in the order of their questions.

    Raises:
        RequestError: the file is malformed, or has other settings.
    """
    if kind_of(path) == "nothing":
        return []
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RequestError(f"{shown_path(path)}: {error.strerror or error}") from None
    first, *lines = content.split(b"\n")[:-1] or [b""]  # the last part is empty, or half a line
    _check_header(path, first, settings)
    answers: dict[int, Answer] = {}
    for number, line in enumerate(lines, 2):
        where = f"{shown_path(path)}:{number}"
        fields = JsonFields.of(parse_json(line, where, RequestError), where, RequestError)
        index = fields.integer("index", 0)
        if index in answers:
            raise RequestError(f"{where}: index: expected each once, got {index} again")
        prompt, answer = (
            list(fields.integers(name, 0, MAX_TOKEN_ID)) for name in ("prompt", "answer")
        )
        if not prompt or not answer:
            raise RequestError(f"{where}: expected tokens of a prompt and an answer, got none")
        answers[index] = Answer(index, prompt, answer)
    return [answers[index] for index in sorted(answers)]


def _ask(
    engine: Engine, model: Model, index: int, question: str, settings: AnswerSettings, most: int
) -> str:
    """Begin an answer; the request's name."""
    sampling = SamplingParams(
        max_tokens=most,
        temperature=settings.temperature if index % 2 else 0.0,
        seed=(settings.seed * 1_000_003 + index) % SEEDS,
    )
    if model.tokenizer is None:
        raise RequestError("model: expected one with a tokenizer, got one without")
    try:
        prompt = model.tokenizer.encode_chat([{"role": "user", "content": question}])
        return engine.add_request(prompt, exit="full", sampling=sampling)
    except RequestError as error:
        raise RequestError(f"question {index + 1}: {error}") from None


def _begin(path: Path, settings: AnswerSettings) -> list[Answer]:
    """The answers of a file; a new or empty file gets its first line, half a line is cut off."""
    content = path.read_bytes() if is_file(path) else b""
    whole = content.rfind(b"\n") + 1
    if not whole:
        write_text(path, json.dumps({"format": FORMAT, **asdict(settings)}) + "\n")
        return []
    answers = read_answers(path, settings)
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
    return answers


def _check_header(path: Path, line: bytes, settings: AnswerSettings) -> None:
    got = parse_json(line, f"{shown_path(path)}:1", RequestError)
    if not isinstance(got, dict) or got.get("format") != FORMAT:
        raise RequestError(f"{shown_path(path)}:1: expected a file of answers, {FORMAT!r}")
    for name, expected in asdict(settings).items():
        if got.get(name) != expected:
            raise RequestError(
                f"{shown_path(path)}: {name}: expected {expected!r}, as this run has, got "
                f"{got.get(name)!r}: of another run"
            )
