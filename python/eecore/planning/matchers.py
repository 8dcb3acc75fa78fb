"""Matchers of llguidance in processes of their own, seen from the engine."""

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

__all__ = ["Bounds", "GuideFork", "GuideProcess", "Matcher"]

# Processes of guides at once; the one that was asked least recently ends for another.
MAX_PROCESSES = 32
# What a guide may cost: a few tens of milliseconds for a mask, where nothing is ambiguous.
LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 500_000,
    "max_items_in_row": 10_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
}


class Bounds(NamedTuple):
    """What the process of a guide may take before the kernel ends it."""

    compile_seconds: float = 2.0
    """CPU time until the first mask is there."""
    call_seconds: float = 1.0
    """CPU time of a call."""
    mask_seconds: float = 0.02
    """CPU time of a mask on average."""
    memory: int = 256 << 20
    """Bytes beside the tokenizer."""


BOUNDS = Bounds()


class GuideFork:
    """Processes that follow the guides of one model; the first guide starts what forks them.

    Args:
        tokenizer: of the model, as a tokenizer.json.
        vocab_size: of its logits.
        eos_token_ids: that end its texts.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._fork = Fork("eecore.planning.guide_process", tokenizer, vocab_size, eos_token_ids)
        self._processes: WeakSet[GuideProcess] = WeakSet()

    def process(self, guide: Guide) -> GuideProcess:
        """A process with a guide that can be followed.

        Raises:
            GuideError: it cannot be compiled within bounds, or nothing can follow it.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise GuideError("guide: expected llguidance to be there: pip install 'eecore[guided]'")
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
        guide: what it follows.
        end: a socket to the process.
    """

    def __init__(self, guide: Guide, end: socket.socket) -> None:
        super().__init__(end)
        self._guide = guide
        self.numbers = itertools.count(1)
        """Numbers for copies of its matcher."""
        self.forgotten: list[int] = []
        """Matchers that are not needed any more."""
        self.failure: GuideError | None = None
        """Why the guide cannot be followed, once it is known."""

    def compile(self) -> None:
        """Compile the guide.

        Raises:
            GuideError: it cannot be compiled within bounds, or nothing can follow it.
        """
        question = self._guide.kind, self._guide.text, LIMITS, tuple(BOUNDS)
        (error,) = self._answer(question, "compiled")
        if error:
            self._fail(error)

    def call(self, number: int, calls: list[tuple[Any, ...]]) -> list[Any]:
        """What calls of a matcher return.

        Args:
            number: of the matcher.
            calls: names of methods, each with its arguments.

        Raises:
            GuideError: the matcher cannot go on, or takes too much.
        """
        forgotten, self.forgotten = self.forgotten, []
        error, answers = self._answer((number, calls, forgotten), "followed")
        if error:
            raise GuideError(f"guide: expected to follow it, got: {error}")
        return list(answers)

    def _answer(self, question: Message, done: str) -> Message:
        """The answer of the process; ``done``: what it does with the guide."""
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
        process: of the guide.
        number: of the matcher there; the first has seen nothing, and stays.
    """

    _number = 0  # until it is made

    def __init__(self, process: GuideProcess, number: int = 0) -> None:
        self._process, self._number = process, number

    @property
    def is_closed(self) -> bool:
        """Whether its process has ended."""
        return self._process.is_closed

    def calls(self, *calls: tuple[Any, ...]) -> list[Any]:
        """What calls of methods of LLMatcher return that are made one after the other.

        Raises:
            GuideError: the matcher cannot go on, or takes too much.
        """
        return self._process.call(self._number, list(calls))

    def deep_copy(self) -> Matcher:
        """Another matcher that is where this one is."""
        copy = Matcher(self._process, next(self._process.numbers))
        self.calls(("deep_copy", copy._number))
        return copy

    def __del__(self) -> None:
        if self._number:
            self._process.forgotten.append(self._number)
