"""The engine's side of llguidance's matchers, which run in processes of their own."""

from __future__ import annotations

import importlib.util
import itertools
import socket
from typing import Any, NamedTuple, NoReturn
from weakref import WeakSet

from eecore.bounded_process import BoundedProcess, Fork, NotPrepared
from eecore.channel import Message
from eecore.errors import GuideError
from eecore.guide import Guide

# Processes of guides at once; beyond that the least recently used one is ended.
MAX_PROCESSES = 32
# Limits of llguidance: with an unambiguous grammar a mask takes a few tens of milliseconds.
LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 500_000,
    "max_items_in_row": 10_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
}


class Bounds(NamedTuple):
    """Limits of a guide's process; the kernel ends one that exceeds them."""

    compile_seconds: float = 2.0
    """CPU time until the first mask."""
    call_seconds: float = 1.0
    """CPU time of a call."""
    mask_seconds: float = 0.02
    """CPU time of a mask on average."""
    memory: int = 256 << 20
    """Bytes in addition to the tokenizer."""


BOUNDS = Bounds()


class GuideFork:
    """Forks a process for each guide of one model; the forking process starts with the first guide.

    Args:
        tokenizer: the model's tokenizer, as a tokenizer.json.
        vocab_size: number of the model's logits.
        eos_token_ids: tokens that end a text.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._fork = Fork("eecore.planning.guide_process", tokenizer, vocab_size, eos_token_ids)
        self._processes: WeakSet[GuideProcess] = WeakSet()

    def process(self, guide: Guide) -> GuideProcess:
        """A process with a compiled guide.

        Raises:
            GuideError: the guide cannot be compiled within bounds, or no text matches it.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise GuideError(
                "guide: expected llguidance to be there: pip install '.[guided]' in a clone"
            )
        try:
            process = GuideProcess(guide, self._fork.connected())
        except NotPrepared as error:
            raise GuideError(
                f"guide: expected a tokenizer that llguidance reads, got: {error}"
            ) from None
        self._processes.add(process)
        alive = [each for each in self._processes if not each.is_closed]
        for oldest in sorted(alive, key=lambda each: each.asked_at)[:-MAX_PROCESSES]:
            oldest.close()
        process.compile()
        return process


class GuideProcess(BoundedProcess):
    """A process that follows one guide, for any number of requests.

    Args:
        end: a socket to the process.
    """

    def __init__(self, guide: Guide, end: socket.socket) -> None:
        super().__init__(end)
        self._guide = guide
        self.numbers = itertools.count(1)
        """Numbers of copies of the matcher."""
        self.forgotten: list[int] = []
        """Numbers of matchers that are no longer needed."""
        self.failure: GuideError | None = None
        """Why the guide cannot be followed, once that is known."""

    def compile(self) -> None:
        """Compile the guide.

        Raises:
            GuideError: it cannot be compiled within bounds, or no text matches it.
        """
        question = self._guide.kind, self._guide.text, LIMITS, tuple(BOUNDS)
        (error,) = self._answer(question, "compiled")
        if error:
            self._fail(error)

    def call(self, number: int, calls: list[tuple[Any, ...]]) -> list[Any]:
        """Call methods of a matcher, and return their results.

        Args:
            calls: names of methods, each with its arguments.

        Raises:
            GuideError: the matcher cannot go on, or exceeds its bounds.
        """
        forgotten, self.forgotten = self.forgotten, []
        error, answers = self._answer((number, calls, forgotten), "followed")
        if error:
            raise GuideError(f"guide: expected to follow it, got: {error}")
        return list(answers)

    def _answer(self, question: Message, done: str) -> Message:
        """Ask the process, and return its answer; ``done``: the verb for an error."""
        if self.failure is not None:
            raise self.failure
        answer = self.ask(question)
        if answer is None:
            self._fail(f"can be {done} within bounds, got one too complex")
        return answer

    def _fail(self, why: str) -> NoReturn:
        """End the process, since the guide cannot be followed."""
        error = GuideError(f"guide: expected a {self._guide.kind} that {why}")
        if not self.is_closed:
            self.failure = error
            self.close()
        raise error


class Matcher:
    """A matcher of llguidance in the process of its guide.

    Args:
        number: the matcher's number there; matcher 0 has read no token, and is kept.
    """

    _number = 0  # __del__ reads it even if __init__ failed

    def __init__(self, process: GuideProcess, number: int = 0) -> None:
        self._process, self._number = process, number

    @property
    def is_closed(self) -> bool:
        """Whether the process of the guide has ended."""
        return self._process.is_closed

    def calls(self, *calls: tuple[Any, ...]) -> list[Any]:
        """Call methods of LLMatcher, one after the other, and return their results.

        Raises:
            GuideError: the matcher cannot go on, or exceeds its bounds.
        """
        return self._process.call(self._number, list(calls))

    def deep_copy(self) -> Matcher:
        """A copy of this matcher, which has read the same tokens."""
        copy = Matcher(self._process, next(self._process.numbers))
        self.calls(("deep_copy", copy._number))
        return copy

    def __del__(self) -> None:
        if self._number:
            self._process.forgotten.append(self._number)
