"""Mutations of valid inputs: bytes, and values of JSON."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

MAGIC = [
    bytes(8),
    b"\xff" * 8,
    (2**63 - 1).to_bytes(8, "little"),
    (2**31 - 1).to_bytes(4, "little"),
    (2**31).to_bytes(4, "little"),
    (2**32 - 1).to_bytes(4, "little"),
    b"\x80",
    b"\x00",
    b"NaN",
    b"1e999",
    b"-1",
    b"{",
    b"[" * 50,
    b"9" * 50,
    "😀".encode(),
    b"\xed\xa0\x80",
]

WILD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**30,
    10**400, 0.0, -0.0, 0.5, -1.5, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"), "",
    "0", "1", "float32", "nonsense", "a" * 1000, "\x00", "\ud800", "../../x", "/", [], [0], [[]],
    [None], [1, "a", None], [1e9] * 3, list(range(40)), {}, {"a": 1}, {"type": "x"}, {"": {}},
]  # fmt: skip


def mutated_bytes(random: Random, data: bytes, most: int = 4) -> bytes:
    """``data`` with one to ``most`` changes: bits, bytes, pieces, unusual numbers."""
    got = bytearray(data)
    for _ in range(random.randint(1, most)):
        at = random.randrange(len(got) + 1)
        change = random.randrange(8)
        if change == 0 and got:
            got[at % len(got)] ^= 1 << random.randrange(8)
        elif change == 1 and got:
            got[at % len(got)] = random.randrange(256)
        elif change == 2:
            got[at:at] = bytes(random.randrange(256) for _ in range(random.randint(1, 16)))
        elif change == 3:
            del got[at : at + random.choice([1, 2, 4, 8, 64, 1000])]
        elif change == 4:
            del got[at:]
        elif change == 5:
            start = random.randrange(len(got) + 1)
            got[at:at] = got[start : start + random.choice([1, 4, 8, 32, 256])]
        else:
            magic = random.choice(MAGIC)
            got[at : at + (len(magic) if change == 6 else 0)] = magic
    return bytes(got)


def wild(random: Random) -> Any:
    """An unexpected value."""
    return copy.deepcopy(random.choice(WILD))


def mutated_json(random: Random, value: Any, most: int = 2) -> Any:
    """A copy of a JSON value with one to ``most`` fields changed, dropped, added or moved."""
    value = copy.deepcopy(value)
    for _ in range(random.randint(1, most)):
        places = list(_places(value))
        if not places:
            return wild(random)
        owner, key = random.choice(places)
        change = random.randrange(8)
        if change < 4:
            owner[key] = wild(random)
        elif change == 4:
            del owner[key]
        elif change == 5:
            other, from_ = random.choice(places)
            if from_ in other if isinstance(other, dict) else from_ < len(other):
                owner[key] = copy.deepcopy(other[from_])
        elif change == 6:
            owner[key] = _nudged(random, owner[key])
        elif isinstance(owner, dict):
            owner[random.choice(["x", "type", "", key * 2])] = wild(random)
        else:
            owner.insert(key, wild(random))
    return value


def _places(value: Any) -> Any:
    """The owner and key of every value inside."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs if isinstance(value, (dict, list)) else ():
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


def _nudged(random: Random, value: Any) -> Any:
    """A value close to the given one."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        real = float(value) if abs(value) < 2**900 else 0.5
        return random.choice([value + 1, value - 1, value * 2, -value, value * 10**6, real])
    if isinstance(value, float):
        return random.choice([-value, value * 1e6, value * 1e-6, 0.0, str(value)])
    if isinstance(value, str):
        return random.choice([value.upper(), value + "x", value[:-1], value * 2, [value]])
    return random.choice([[value], {"x": value}, None])
