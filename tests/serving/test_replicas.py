"""The replica of a request, and the number of replicas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eecore.serving.replicas import (
    BLOCK,
    MAX_BLOCKS,
    SLACK,
    Load,
    Routes,
    beginning_of,
    replicas_wanted,
)

SYSTEM = "You are a home that somebody talks to. " * 8


def completion(prompt: Any) -> bytes:
    return json.dumps({"prompt": prompt, "max_tokens": 3}).encode()


def chat(*said: str, **more: Any) -> bytes:
    messages = [{"role": "user", "content": each} for each in said]
    return json.dumps({**more, "messages": messages}).encode()


def in_common(one: bytes, other: bytes) -> int:
    pairs = zip(beginning_of(one), beginning_of(other), strict=False)
    return sum(a == b for a, b in pairs)


def test_texts_that_begin_alike_share_the_blocks_in_which_they_do() -> None:
    whole = len(SYSTEM) // BLOCK
    assert len(beginning_of(completion(SYSTEM))) == whole
    assert in_common(completion(SYSTEM + "lock"), completion(SYSTEM + "open " * 40)) == whole
    assert in_common(completion("a" + SYSTEM), completion("b" + SYSTEM)) == 0
    tokens = list(range(200))
    assert in_common(completion(tokens), completion([*tokens, 7])) > 5


def test_conversations_that_go_on_begin_as_they_did() -> None:
    first, second = chat(SYSTEM), chat(SYSTEM, "and now the lights")
    assert in_common(first, second) >= len(beginning_of(first)) - 1
    tools = [{"type": "function", "function": {"name": "lock"}}]
    assert in_common(first, chat(SYSTEM, tools=tools)) == 0  # they stand in front


def test_responses_begin_with_their_tools_and_instructions() -> None:
    def response(**fields: Any) -> bytes:
        return json.dumps({"instructions": SYSTEM, "input": "lock", **fields}).encode()

    whole = len(SYSTEM) // BLOCK
    assert in_common(response(), response(input=[{"role": "user", "content": "a"}])) >= whole
    assert in_common(response(), response(tools=[{"name": "lock"}])) == 0


def test_what_is_no_request_begins_with_nothing() -> None:
    for body in (b"", b"\xff", b"[1]", b"3", completion("short"), b'{"prompt": "\\ud800"}'):
        assert beginning_of(body) == []


@pytest.mark.parametrize("depth", [*range(100, 3000, 50), 100_000])
def test_however_deep_it_is(depth: int) -> None:
    """A router does not depend on the depth at which a JSON parser gives up."""
    body = b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}"
    assert len(beginning_of(body)) <= MAX_BLOCKS
    assert beginning_of(b"[" * depth) == []


def test_a_request_goes_where_its_beginning_was() -> None:
    routes = Routes()
    loads = {"a": 0.0, "b": 0.0, "c": 0.0}
    long, short = beginning_of(completion(SYSTEM)), beginning_of(completion(SYSTEM[: 2 * BLOCK]))
    routes.add(short, "b")
    routes.add(long, "c")
    assert routes.ranked(long, loads)[:2] == ["c", "b"]  # the longest match first
    assert [routes.known(long, name) for name in "abc"] == [0, 2, len(long)]


def test_unless_it_is_much_busier_there() -> None:
    routes = Routes()
    beginning = beginning_of(completion(SYSTEM))
    routes.add(beginning, "a")
    assert routes.ranked(beginning, {"a": SLACK + 1.0, "b": 1.0})[0] == "a"
    assert routes.ranked(beginning, {"a": SLACK + 2.0, "b": 1.0}) == ["b", "a"]


def test_others_go_to_the_least_busy_one_and_of_equals_to_the_emptiest() -> None:
    routes = Routes()
    routes.add(beginning_of(completion(SYSTEM)), "a")
    assert routes.ranked([], {"a": 2.0, "b": 1.0, "c": 3.0}) == ["b", "a", "c"]
    assert routes.ranked([], {"a": 0.0, "b": 0.0}) == ["b", "a"]
    assert routes.ranked([], {}) == []


def test_a_replica_that_has_gone_is_forgotten() -> None:
    routes = Routes()
    beginning = beginning_of(completion(SYSTEM))
    routes.add(beginning, "a")
    routes.add(beginning[:2], "b")
    routes.keep({"b", "c"})
    assert routes.known(beginning, "a") == 0
    assert routes.known(beginning, "b") == 2
    assert routes.ranked([], {"b": 0.0, "c": 0.0}) == ["c", "b"]


def test_what_was_not_asked_for_for_long_is_forgotten() -> None:
    routes = Routes(max_known=4)
    old, other = beginning_of(completion(SYSTEM))[:3], beginning_of(completion("z" * 500))[:3]
    routes.add(old, "a")
    routes.add(other, "b")
    assert routes.known(other, "b") == 3
    assert routes.known(old, "a") == 0  # its first blocks went, and with them the chain
    routes.add(beginning_of(completion("y" * 500))[:4], "a")
    assert routes.ranked([], {"a": 0.0, "b": 0.0}) == ["b", "a"]  # b has none left


def test_as_many_replicas_as_requests_and_caches_need() -> None:
    assert replicas_wanted([Load(8, 0.1), Load(8, 0.1)], 0, 16) == 1
    assert replicas_wanted([Load(16, 0.1), Load(16, 0.1)], 16, 16) == 3
    assert replicas_wanted([Load(1, 0.9), Load(1, 0.9)], 0, 16) == 2  # few, but long
    assert replicas_wanted([Load(0, 0), Load(0, 0)], 0, 16) == 0
