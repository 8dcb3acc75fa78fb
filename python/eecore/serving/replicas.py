"""Which replica of a server a request goes to, and how many replicas there should be.

Requests that begin alike go where that beginning has been computed, since the prefix cache of that
replica has it, unless the replica is much busier than the others. Nothing here knows what runs the
replicas.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Load", "Routes", "beginning_of", "replicas_wanted"]

BLOCK = 64
"""Characters that are compared at once, about a page of the KV cache."""
MOST_BLOCKS = 64
MOST_KNOWN = 1 << 16
"""Blocks that are remembered."""
SLACK = 8
"""Requests that the replica with the beginning may have more than the least busy one."""
FULL_KV = 0.9
"""Share of the KV cache in use, at which a replica has no room for another request."""
DIGEST = 8  # bytes


def beginning_of(body: bytes) -> list[bytes]:
    """What a request begins with, as a chain of hashes: of the first block, the first two, ...

    Args:
        body: JSON of a completion, a chat or a response. What is none begins with nothing.

    Returns:
        At most :data:`MOST_BLOCKS`; none for a text shorter than a block.
    """
    try:
        said = json.loads(body)
        text = _text(said) if isinstance(said, dict) else ""
    except (ValueError, RecursionError):
        return []
    chain: list[bytes] = []
    state = hashlib.blake2b(digest_size=DIGEST)
    for end in range(BLOCK, min(len(text), BLOCK * MOST_BLOCKS) + 1, BLOCK):
        state.update(text[end - BLOCK : end].encode("utf-8", "surrogatepass"))
        chain.append(state.digest())
    return chain


def _text(said: dict[str, Any]) -> str:
    """Of a request, from its beginning on."""
    prompt = said.get("prompt")
    if isinstance(prompt, str):
        return prompt[: BLOCK * MOST_BLOCKS]
    # Templates write tools in front of messages.
    names = ("tools", "instructions", "messages", "input")
    return json.dumps([*map(said.get, names), prompt])


class Routes:
    """Remembers which replicas have computed which beginnings; the least recently used ones go.

    Args:
        most_known: blocks that are remembered.
        slack: requests that a replica with the beginning may have more than the least busy one.
    """

    def __init__(self, most_known: int = MOST_KNOWN, slack: float = SLACK) -> None:
        self._most_known, self._slack = most_known, slack
        self._homes: OrderedDict[bytes, set[str]] = OrderedDict()
        self._sizes: Counter[str] = Counter()
        """Blocks that each replica has."""

    def ranked(self, beginning: Sequence[bytes], loads: Mapping[str, float]) -> list[str]:
        """All replicas, best first: those that are not much busier than the others by how much of
        the beginning they have, then by load; of equals the one that has the least.

        Args:
            beginning: from :func:`beginning_of`.
            loads: requests that each replica has.
        """
        least = min(loads.values(), default=0.0)

        def place(replica: str) -> tuple[bool, int, float, int]:
            load = loads[replica]
            is_busy = load > least + self._slack
            known = 0 if is_busy else self.known(beginning, replica)
            return is_busy, -known, load, self._sizes[replica]

        return sorted(loads, key=place)

    def known(self, beginning: Sequence[bytes], replica: str) -> int:
        """Blocks of a beginning that a replica has."""
        for count, block in enumerate(beginning):
            if replica not in self._homes.get(block, ()):
                return count
        return len(beginning)

    def add(self, beginning: Iterable[bytes], replica: str) -> None:
        """A replica computes a beginning."""
        for block in beginning:
            homes = self._homes.setdefault(block, set())
            self._homes.move_to_end(block)
            if replica not in homes:
                homes.add(replica)
                self._sizes[replica] += 1
        while len(self._homes) > self._most_known:
            _, homes = self._homes.popitem(last=False)
            self._sizes.subtract(homes)

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all replicas but these."""
        if all(replica in replicas for replica in self._sizes):
            return
        for block, homes in list(self._homes.items()):
            homes.intersection_update(replicas)
            if not homes:
                del self._homes[block]
        for replica in [name for name in self._sizes if name not in replicas]:
            del self._sizes[replica]


@dataclass(frozen=True)
class Load:
    """What a replica has to do.

    Args:
        requests: that run or wait.
        kv_share: of the KV cache that they have, 0 to 1.
    """

    requests: float
    kv_share: float


def replicas_wanted(loads: Iterable[Load], queued: float, target: float) -> float:
    """How many replicas would be busy, but not too busy.

    Args:
        loads: of those that run.
        queued: requests that no replica has yet.
        target: requests that a replica should have.
    """
    busy = [max(load.requests / target, load.kv_share / FULL_KV) for load in loads]
    return sum(busy) + queued / target
