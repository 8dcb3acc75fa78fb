"""Translates GBNF, the grammars of llama.cpp, into Lark grammars of llguidance for the same texts.

llama.cpp reads a text character by character and keeps every possible parse. llguidance first cuts
the text into lexemes, each as long as possible, which loses parses: ``[0-9]+ "0"`` in two lexemes
never ends. So a grammar without recursive rules becomes one lexeme, a regular expression; in a
recursive grammar each lexeme is a single character, so that no lexeme is the beginning of another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

# The largest number of repetitions that a rule may name.
MAX_REPETITIONS = 100_000
# The deepest nesting of brackets.
MAX_DEPTH = 100
ROOT = "root"
NAME = re.compile(r"[A-Za-z0-9_-]+")
NUMBER = re.compile(r"[0-9]{1,9}")
SPACES = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
# A hyphen that is not the last character of a set.
RANGE = re.compile(r"-[^\]]", re.DOTALL)
ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]"}
CHARACTER = re.compile(
    r'[^\\]|\\(?:[trn\\"\[\]]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})', re.DOTALL
)
ESCAPES_SHOWN = 'an escape: \\x41, \\u0041, \\U00000041, \\t, \\r, \\n, \\\\, \\", \\[, \\]'
REPETITIONS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
COMMENTS = re.compile(r"(?:\s+|#[^\r\n]*|//[^\r\n]*)*")


@dataclass(frozen=True)
class Characters:
    """One character out of a set, or out of its complement if ``inverted``."""

    inverted: bool
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Rule:
    """A reference to a rule."""

    name: str


@dataclass(frozen=True)
class Sequence:
    """Several parts, one after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alternatives:
    """One of several alternatives."""

    ways: tuple[Node, ...]


@dataclass(frozen=True)
class Repeated:
    """A part, repeated ``least`` to ``most`` times; None: without a limit."""

    part: Node
    least: int
    most: int | None


Node = Characters | Rule | Sequence | Alternatives | Repeated
EMPTY = Sequence(())
ANY = Characters(True, ())


def is_gbnf(text: str) -> bool:
    """Whether a grammar begins with a rule of GBNF: no rule of Lark has ``::=``."""
    start = COMMENTS.match(text)
    assert start is not None
    name = NAME.match(text, start.end())
    return name is not None and text[name.end() :].lstrip().startswith("::=")


def lark_of(text: str) -> str:
    """A Lark grammar for llguidance that matches the same texts as a grammar in GBNF.

    Raises:
        ValueError: the text is not GBNF.
    """
    rules = _Reader(text).rules()
    if ROOT not in rules:
        raise ValueError(f"GBNF: expected a rule named {ROOT}, got {', '.join(rules)[:200]}")
    needed = _needed(rules)
    rules = _that_end({name: rules[name] for name in needed})
    if ROOT not in rules:
        raise ValueError(
            f"GBNF: expected a rule {ROOT} that matches some text, got one without end"
        )
    rules = {name: _without_tail_calls(name, node) for name, node in rules.items()}
    needed = _needed(rules)
    order = _from_the_leaves(rules, needed)
    is_regular = order is not None
    written = _Writer(needed, is_regular)
    lines = [f"start: {written.names[ROOT]}"]
    lines += [f"{written.names[name]}: {written.of(rules[name])}" for name in order or needed]
    return "\n".join(lines) + "\n"


class _Reader:
    """Reads the rules of a text from left to right."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def rules(self) -> dict[str, Node]:
        """All rules by name; the second one where two have the same name, as in llama.cpp."""
        found: dict[str, Node] = {}
        self._expect(LINES)
        while self._at < len(self._text):
            name = self._expect(NAME, "the name of a rule")
            self._expect(SPACES)
            self._need("::=")
            self._expect(LINES)
            found[name] = self._alternatives(0)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                self._fail("the end of a line")
            self._expect(LINES)
        return found

    def _fail(self, expected: str) -> NoReturn:
        line = self._text.count("\n", 0, self._at) + 1
        got = self._text[self._at : self._at + 20] or "the end"
        raise ValueError(f"GBNF, line {line}: expected {expected}, got {got!r}")

    def _expect(self, pattern: re.Pattern[str], expected: str = "") -> str:
        """Read what matches a pattern at the current place."""
        found = pattern.match(self._text, self._at)
        if found is None:
            self._fail(expected)
        self._at = found.end()
        return found[0]

    def _takes(self, token: str) -> bool:
        is_there = self._text.startswith(token, self._at)
        self._at += len(token) * is_there
        return is_there

    def _need(self, token: str) -> None:
        if not self._takes(token):
            self._fail(token)

    def _alternatives(self, depth: int) -> Node:
        """The alternatives up to the end of a rule, or of brackets at nesting ``depth``."""
        ways = [self._sequence(depth)]
        while True:
            before = self._at
            self._expect(LINES)
            if not self._takes("|"):
                self._at = before  # another rule may follow
                return ways[0] if len(ways) == 1 else Alternatives(tuple(ways))
            self._expect(LINES)
            ways.append(self._sequence(depth))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        spaces = LINES if depth else SPACES
        while True:
            self._expect(spaces)
            part = self._part(depth)
            if part is None:
                return parts[0] if len(parts) == 1 else Sequence(tuple(parts))
            self._expect(spaces)
            parts.append(self._repeated(part))

    def _part(self, depth: int) -> Node | None:
        """A literal, a set, brackets or a rule; None at the end of a sequence."""
        if self._takes('"'):
            text: list[Node] = []
            while not self._takes('"'):
                code = self._character()
                text.append(Characters(False, ((code, code),)))
            return Sequence(tuple(text))
        if self._takes("["):
            return self._set()
        if self._takes("("):
            if depth == MAX_DEPTH:
                raise ValueError(f"GBNF: expected at most {MAX_DEPTH} brackets in one another")
            inner = self._alternatives(depth + 1)
            self._expect(LINES)
            self._need(")")
            return inner
        if self._takes("."):
            return ANY
        if self._text.startswith(("<", "!"), self._at):
            self._fail("characters (tokens by name or number are not supported)")
        return Rule(self._expect(NAME)) if NAME.match(self._text, self._at) else None

    def _character(self) -> int:
        """The code point of the next character of a literal or a set."""
        at = self._at
        if at >= len(self._text):
            self._fail("a character")
        found = self._expect(CHARACTER, ESCAPES_SHOWN)
        if found[0] != "\\":
            return ord(found)
        if len(found) == 2:
            return ord(ESCAPES[found[1]])
        code = int(found[2:], 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            self._at = at
            self._fail("a character of Unicode")
        return code

    def _set(self) -> Node:
        inverted = self._takes("^")
        ranges: list[tuple[int, int]] = []
        while not self._takes("]"):
            first = last = self._character()
            if RANGE.match(self._text, self._at):
                self._at += 1
                last = self._character()
                if last < first:
                    self._fail(f"a range of characters that ends after {chr(first)!r}")
            ranges.append((first, last))
        if not ranges and not inverted:
            self._fail("a set with a character in it")
        return Characters(inverted, tuple(ranges))

    def _repeated(self, part: Node) -> Node:
        """A part with all the repetitions that follow it."""
        while True:
            times = REPETITIONS.get(self._text[self._at : self._at + 1])
            if times is not None:
                self._at += 1
            elif self._takes("{"):
                times = self._times()
            else:
                return part
            part = Repeated(part, *times)

    def _times(self) -> tuple[int, int | None]:
        """The least and largest number of repetitions, from braces; None: without a limit."""
        least = most = self._number()
        if self._takes(","):
            self._expect(LINES)
            if self._takes("}"):
                return least, None
            most = self._number()
        self._need("}")
        if most < least:
            raise ValueError(f"GBNF: expected {{least,most}}, got {{{least},{most}}}")
        return least, most

    def _number(self) -> int:
        self._expect(LINES)
        found = NUMBER.match(self._text, self._at)
        if found is None or int(found[0]) > MAX_REPETITIONS:
            self._fail(f"a number of at most {MAX_REPETITIONS}")
        self._expect(NUMBER)
        self._expect(LINES)
        return int(found[0])


def _without_tail_calls(name: str, node: Node) -> Node:
    """A rule without tail recursion: ``x ::= a x | b`` becomes the repetition ``x ::= a* b``. A
    parser that keeps a row for each character has more work with each call.
    """
    ways = node.ways if isinstance(node, Alternatives) else (node,)
    again: list[Node] = []
    others: list[Node] = []
    for way in ways:
        parts = way.parts if isinstance(way, Sequence) else (way,)
        if parts and parts[-1] == Rule(name):
            again.append(Sequence(parts[:-1]))
        else:
            others.append(way)
    again = [way for way in again if way != EMPTY]
    if len(others) == len(ways):
        return node
    last = Alternatives(tuple(others))
    return Sequence((Repeated(Alternatives(tuple(again)), 0, None), last)) if again else last


def _called(node: Node) -> Iterator[str]:
    """The names of the rules that a node refers to."""
    waiting = [node]
    while waiting:
        here = waiting.pop()
        if isinstance(here, Rule):
            yield here.name
        elif isinstance(here, Sequence):
            waiting += here.parts
        elif isinstance(here, Alternatives):
            waiting += here.ways
        elif isinstance(here, Repeated):
            waiting.append(here.part)


def _needed(rules: dict[str, Node]) -> list[str]:
    """The names of the rules that are reachable from the root."""
    found = {ROOT: None}
    waiting = [ROOT]
    while waiting:
        for name in _called(rules[waiting.pop()]):
            if name not in rules:
                raise ValueError(f"GBNF: expected a rule named {name}, got none")
            if name not in found:
                found[name] = None
                waiting.append(name)
    return list(found)


def _that_end(rules: dict[str, Node]) -> dict[str, Node]:
    """The rules without alternatives that never end, which match no text."""
    ended: dict[str, Node] = {}
    while True:
        found = {name: kept for name, node in rules.items() if (kept := _kept(node, ended))}
        if found.keys() == ended.keys():
            return found
        ended = found


def _kept(node: Node, ended: dict[str, Node]) -> Node | None:
    """A node without the alternatives that name rules outside ``ended``; None: nothing is left."""
    if isinstance(node, Rule):
        return node if node.name in ended else None
    if isinstance(node, Sequence):
        parts = [_kept(part, ended) for part in node.parts]
        return None if None in parts else Sequence(tuple(part for part in parts if part))
    if isinstance(node, Alternatives):
        ways = [kept for way in node.ways if (kept := _kept(way, ended))]
        return Alternatives(tuple(ways)) if ways else None
    if isinstance(node, Repeated):
        part = _kept(node.part, ended)
        if part is None:
            return EMPTY if node.least == 0 else None
        return Repeated(part, node.least, node.most)
    return node


def _from_the_leaves(rules: dict[str, Node], needed: list[str]) -> list[str] | None:
    """The names of the rules, each after the rules that it names; None: some are recursive."""
    missing = {name: set(_called(rules[name])) for name in needed}
    callers: dict[str, list[str]] = {name: [] for name in needed}
    for name, called in missing.items():
        for each in called:
            callers[each].append(name)
    order = [name for name, called in missing.items() if not called]
    for name in order:
        for caller in callers[name]:
            missing[caller].discard(name)
            if not missing[caller]:
                order.append(caller)
    return order if len(order) == len(needed) else None


class _Writer:
    """Writes rules in Lark: as parts of one lexeme, or with one lexeme per character."""

    def __init__(self, names: list[str], is_regular: bool) -> None:
        letter = "R" if is_regular else "r"
        self.names = {name: f"{letter}{number}" for number, name in enumerate(names)}
        self._is_regular = is_regular

    def of(self, node: Node) -> str:
        """The right side of a rule."""
        if isinstance(node, Characters):
            return _pattern(node)
        if isinstance(node, Rule):
            return self.names[node.name]
        if isinstance(node, Sequence):
            return " ".join(self._inner(part) for part in node.parts) or '""'
        if isinstance(node, Alternatives):
            return " | ".join(self._inner(way) for way in node.ways)
        if node.most == 0:
            return '""'
        times = f"{{{node.least},{'' if node.most is None else node.most}}}"
        return self._inner(node.part) + {"{0,}": "*", "{1,}": "+", "{0,1}": "?"}.get(times, times)

    def _inner(self, node: Node) -> str:
        text = self.of(node)
        return text if isinstance(node, Characters | Rule) else f"({text})"


def _pattern(characters: Characters) -> str:
    """A set in the regular expressions of Rust."""
    if characters == ANY:
        return "/(?s:.)/"
    ranges = "".join(f"\\x{{{a:X}}}-\\x{{{b:X}}}" for a, b in characters.ranges)
    return f"/[{'^' if characters.inverted else ''}{ranges}]/"
