"""Stand-ins for guides that cost too much: the code of a worker and a matcher, with a cost.

A grammar whose first line is ``// spin``, ``// allocate`` or ``// die`` costs that in the worker
that compiles it; with ``// spin after !`` its matcher spins once the text has this character. Each
cost ends by itself, so that a missing limit fails a test.

No test has a guide that costs llguidance as much. In llguidance 1.9.1 there were grammars of two
lines whose masks took more than 8 s with weaker limits, and one of thousands of rules overflowed
the stack.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from eecore.bounded_process import Workers
from eecore.guide import Guide
from eecore.planning import grammars

SECONDS, MEMORY = 3.0, 1 << 30
LATE_SECONDS = 0.3


def _spin(seconds: float = SECONDS) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


COSTS: dict[str, Callable[[], Any]] = {
    "spin": _spin,
    "allocate": lambda: len(bytes(MEMORY)),
    "die": os.abort,
}


def prepared(*start: Any) -> Callable[[str, str], Any]:
    """What a worker runs, as in the module that this one stands in for."""
    answer_to = grammars.prepared(*start)

    def answer(kind: str, text: str) -> Any:
        if found := re.match(rf"// ({'|'.join(COSTS)})\n", text):
            COSTS[found[1]]()
        return answer_to(kind, text)

    return answer


class _Late:
    """A matcher that spins once the text has a character."""

    def __init__(self, matcher: Any, tokenizer: Any, character: str) -> None:
        self._given = tokenizer, character
        self._matcher = matcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def deep_copy(self) -> _Late:
        return _Late(self._matcher.deep_copy(), *self._given)

    def consume_tokens(self, tokens: list[int]) -> bool:
        tokenizer, character = self._given
        if character in tokenizer.decode_str(tokens):
            _spin(LATE_SECONDS)
        return bool(self._matcher.consume_tokens(tokens))

    def consume_token(self, token: int) -> bool:
        return self.consume_tokens([token])


class _Costly(grammars.Grammars):
    def compiled(self, guide: Guide) -> Any:
        matcher, found = super().compiled(guide), re.match("// spin after (.)\n", guide.text)
        return _Late(matcher, self._tokenizer, found[1]) if found else matcher


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have guides of models that are loaded from here on compiled with stand-ins, in 0.1 s."""
    monkeypatch.setattr("eecore.planning.guided.Grammars", _Costly)
    monkeypatch.setattr(grammars, "Workers", lambda _, *start: Workers(__name__, *start))
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 0.1)
    monkeypatch.setattr("eecore.planning.guided.CALL_SECONDS", 0.2)
