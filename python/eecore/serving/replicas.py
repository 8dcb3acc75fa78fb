"""The choice of a replica for a request, and the number of replicas that there should be.

Requests that begin alike go to the replica that has computed that beginning, since its prefix cache
has it, unless it is much busier than the others. This module does not depend on what runs the
replicas.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BLOCK = 64
"""Characters that are compared at once, about a page of the KV cache."""
MAX_BLOCKS = 64
MAX_KNOWN = 1 << 16
"""Blocks that are remembered."""
SLACK = 8
"""Requests that the replica with the beginning may have more than the least busy one."""
FULL_KV = 0.9
"""Share of the KV cache in use from which on a replica has no room for another request."""
DIGEST = 8  # bytes


def beginning_of(body: bytes) -> list[bytes]:
    """The beginning of a request as a chain of hashes: of the first block, the first two, ...

    Args:
        body: JSON of a completion, a chat or a response; anything else has no beginning.

    Returns:
        At most :data:`MAX_BLOCKS` hashes; none for a text shorter than a block.
    """
    try:
        said = json.loads(body)
        text = _text(said) if isinstance(said, dict) else ""
    except (ValueError, RecursionError):
        return []
    chain: list[bytes] = []
    state = hashlib.blake2b(digest_size=DIGEST)
    for end in range(BLOCK, min(len(text), BLOCK * MAX_BLOCKS) + 1, BLOCK):
        state.update(text[end - BLOCK : end].encode("utf-8", "surrogatepass"))
        chain.append(state.digest())
    return chain


def _text(said: dict[str, Any]) -> str:
    """The text of a request, from its beginning on."""
    prompt = said.get("prompt")
    if isinstance(prompt, str):
        return prompt[: BLOCK * MAX_BLOCKS]
    # Templates write tools before messages.
    names = ("tools", "instructions", "messages", "input")
    return json.dumps([*map(said.get, names), prompt])


class Routes:
    """Remembers which replicas have computed which beginnings, and forgets the least recently used.

    Args:
        max_known: blocks that are remembered.
        slack: requests that a replica with the beginning may have more than the least busy one.
    """

    def __init__(self, max_known: int = MAX_KNOWN, slack: float = SLACK) -> None:
        self._max_known, self._slack = max_known, slack
        self._homes: OrderedDict[bytes, set[str]] = OrderedDict()
        self._sizes: Counter[str] = Counter()
        """Blocks that each replica has."""

    def ranked(self, beginning: Sequence[bytes], loads: Mapping[str, float]) -> list[str]:
        """All replicas, best first. Replicas that are not much busier than the least busy one come
        first, by how much of the beginning they have, then by load, then by how few blocks they
        have in all.

        Args:
            beginning: from :func:`beginning_of`.
            loads: the number of requests of each replica.
        """
        least = min(loads.values(), default=0.0)

        def place(replica: str) -> tuple[bool, int, float, int]:
            load = loads[replica]
            is_busy = load > least + self._slack
            known = 0 if is_busy else self.known(beginning, replica)
            return is_busy, -known, load, self._sizes[replica]

        return sorted(loads, key=place)

    def known(self, beginning: Sequence[bytes], replica: str) -> int:
        """The number of blocks of a beginning that a replica has."""
        for count, block in enumerate(beginning):
            if replica not in self._homes.get(block, ()):
                return count
        return len(beginning)

    def add(self, beginning: Iterable[bytes], replica: str) -> None:
        """Note that a replica computes a beginning."""
        for block in beginning:
            homes = self._homes.setdefault(block, set())
            self._homes.move_to_end(block)
            if replica not in homes:
                homes.add(replica)
                self._sizes[replica] += 1
        while len(self._homes) > self._max_known:
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
    """The load of a replica.

    Args:
        requests: the number that run or wait.
        kv_share: share of the KV cache in use, 0 to 1.
    """

    requests: float
    kv_share: float


def replicas_wanted(loads: Iterable[Load], queued: float, target: float) -> float:
    """The number of replicas that would be busy, but not too busy.

    Args:
        loads: the loads of the running replicas.
        queued: requests that no replica has yet.
        target: requests that a replica should have.
    """
    busy = [max(load.requests / target, load.kv_share / FULL_KV) for load in loads]
    return sum(busy) + queued / target
