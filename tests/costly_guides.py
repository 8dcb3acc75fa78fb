"""Stand-ins for guides that cost too much: the code of a guide's process, with a cost of its own.

A grammar whose first line is ``// spin``, ``// allocate`` or ``// die`` costs that when it is
compiled; with ``// spin after !`` the cost comes once the text has this character. Each cost ends
by itself, so that a missing limit fails a test.

No test has a guide that costs llguidance as much. In llguidance 1.9.1 there were grammars of two
lines whose masks took more than 8 s, and one of thousands of rules overflowed the stack.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any

from eecore.bounded_process import Fork
from eecore.channel import Channel
from eecore.planning import guide_process

SECONDS, MEMORY = 3.0, 1 << 30


def _spin() -> None:
    until = time.process_time() + SECONDS
    while time.process_time() < until:
        pass


COSTS: dict[str, Callable[[], Any]] = {
    "spin": _spin,
    "allocate": lambda: len(bytes(MEMORY)),
    "die": os.abort,
}


class _Costly(guide_process._Follower):
    _cost, _after = "", None

    def _compile(self, kind: str, text: str, limits: dict[str, Any]) -> str:
        if found := re.match(rf"// ({'|'.join(COSTS)})(?: after (.))?\n", text):
            self._cost, self._after = found.groups()
            if self._after is None:
                COSTS[self._cost]()
        return super()._compile(kind, text, limits)

    def _call(self, number: int, name: str, *values: Any) -> Any:
        read = name == "consume_tokens" and self._tokenizer.decode_str(values[0])
        if read and self._after and self._after in read:
            COSTS[self._cost]()
        return super()._call(number, name, *values)


def prepared(*start: Any) -> Callable[[Channel], None]:
    """What a guide's process runs, as in the module that this one stands in for."""
    vars(guide_process)["_Follower"] = _Costly
    return guide_process.prepared(*start)


def fork(_: str, *start: Any) -> Fork:
    """In place of ``Fork`` in :mod:`eecore.planning.matchers`."""
    return Fork(__name__, *start)
