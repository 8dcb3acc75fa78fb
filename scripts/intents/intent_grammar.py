"""Home Assistant's English sentence templates, and random utterances with their parses.

A few templates are the project's own (:data:`OURS`): particles after their objects ("turn the light
off"), which Home Assistant's templates lack.

A parse is the intent and its slots:

    [HassLightSet [area kitchen] [brightness 20] [domain light]]

First the spoken slots, in the order of the words, so that the parse follows the utterance from left
to right; then the slots that the template fixes, in alphabetical order. Slots that only the context
of a request could fill (such as the speaker's room) are left out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hassil import Intents
from hassil.expression import (
    Alternative,
    Expression,
    Group,
    ListReference,
    Permutation,
    RuleReference,
    Sentence,
    TextChunk,
)
from hassil.intents import RangeSlotList, TextSlotList
from hassil.numbers import get_rbnf_engine
from home_assistant_intents import get_intents

from intent_names import Names

WORDS = 0.25  # share of numbers that are spelled out
POLITE = 0.15  # share of polite utterances
WRITTEN = 0.15  # share of utterances that are written as a sentence
# Intent: blocks of templates, as Home Assistant writes them.
TO_BRIGHTNESS = "(down|up) to {brightness}[([ ]%)| percent]"
OURS: dict[str, list[dict[str, Any]]] = {
    "HassLightSet": [
        {
            "sentences": [
                f"(turn|dim|bring|set) [<the>] {{area}} <light> {TO_BRIGHTNESS}",
                f"(turn|dim|bring|set) [<the>] <light> <in> [<the>] {{area}} {TO_BRIGHTNESS}",
            ],
            "slots": {"domain": "light"},
        },
        {
            "sentences": [f"(turn|dim|bring|set) [<the>] {{name}} {TO_BRIGHTNESS}"],
            "requires_context": {"domain": ["light"]},
        },
    ],
    "HassTurnOn": [
        {"sentences": ["(turn|switch) [<the>] {area} <light> on"], "slots": {"domain": "light"}},
        {
            "sentences": ["(turn|switch) [<the>] {name} on"],
            "requires_context": {"domain": ["light", "switch", "fan", "media_player"]},
        },
    ],
    "HassTurnOff": [
        {"sentences": ["(turn|switch) [<the>] {area} <light> off"], "slots": {"domain": "light"}},
        {
            "sentences": ["(turn|switch) [<the>] {name} off"],
            "requires_context": {"domain": ["light", "switch", "fan", "media_player"]},
        },
    ],
}
POLITE_BEFORE = ("please", "can you", "could you", "would you")
POLITE_AFTER = ("please", "for me")


@dataclass(frozen=True)
class Template:
    """One sentence template of an intent.

    Attributes:
        intent: the intent's name.
        index: its index among all templates.
        expression: hassil's parse of the template.
        fixed: slots that each of its utterances has.
        domains: kinds of devices for its ``{name}``.
    """

    intent: str
    index: int
    expression: Expression
    fixed: dict[str, Any]
    domains: tuple[str, ...]


@dataclass
class Walk:
    """A walk through a template: the words and slots so far."""

    rng: random.Random
    names: Names
    domain: str
    slots: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    named: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Utterance:
    """An utterance, its parse, and its names as (list, name)."""

    text: str
    parse: str
    intent: str
    named: tuple[tuple[str, str], ...]


class Grammar:
    """All templates of a language."""

    def __init__(self, language: str = "en") -> None:
        data = get_intents(language)
        if data is None:
            raise ValueError(f"language: expected one of Home Assistant's, got {language!r}")
        for intent, blocks in OURS.items():
            data["intents"][intent]["data"] += blocks
        self._intents = Intents.from_dict(data)
        self._language = language
        self.templates = tuple(self._templates())

    def _templates(self) -> Iterator[Template]:
        index = 0
        for name, intent in sorted(self._intents.intents.items()):
            for block in intent.data:
                domains = block.requires_context.get("domain", ())
                domains = (domains,) if isinstance(domains, str) else tuple(domains)
                for sentence in block.sentences:
                    yield Template(name, index, sentence.expression, dict(block.slots), domains)
                    index += 1

    def sample(self, template: Template, rng: random.Random, names: Names) -> Utterance:
        """A random utterance of a template."""
        domain = rng.choice(template.domains) if template.domains else ""
        walk = Walk(rng, names, domain)
        self._say(template.expression, walk)
        text = " ".join("".join(walk.said).split())
        if rng.random() < POLITE:
            before = rng.random() < 0.6
            text = (
                f"{rng.choice(POLITE_BEFORE)} {text}"
                if before
                else f"{text} {rng.choice(POLITE_AFTER)}"
            )
        if rng.random() < WRITTEN:
            text = f"{text[:1].upper()}{text[1:]}."
        fixed = {name: template.fixed[name] for name in sorted(template.fixed.keys() - walk.slots)}
        slots = {**walk.slots, **fixed}
        inner = "".join(f" [{name} {value}]" for name, value in slots.items())
        return Utterance(text, f"[{template.intent}{inner}]", template.intent, tuple(walk.named))

    def _say(self, expression: Expression, walk: Walk) -> None:
        if isinstance(expression, TextChunk):
            walk.said.append(expression.original_text)
        elif isinstance(expression, Alternative):
            self._say(walk.rng.choice(expression.items), walk)
        elif isinstance(expression, Permutation):
            for item in walk.rng.sample(expression.items, len(expression.items)):
                walk.said.append(" ")
                self._say(item, walk)
                walk.said.append(" ")
        elif isinstance(expression, Group):
            for item in expression.items:
                self._say(item, walk)
        elif isinstance(expression, RuleReference):
            rule: Sentence = self._intents.expansion_rules[expression.rule_name]
            self._say(rule.expression, walk)
        elif isinstance(expression, ListReference):
            self._fill(expression, walk)
        else:
            raise TypeError(f"expected an expression of hassil, got {type(expression).__name__}")

    def _fill(self, reference: ListReference, walk: Walk) -> None:
        """Say a value of a list and put it into its slot; the last value counts."""
        walk.slots.pop(reference.slot_name, None)
        values = self._intents.slot_lists.get(reference.list_name)
        if isinstance(values, TextSlotList):
            value = walk.rng.choice(values.values)
            self._say(value.text_in, walk)
            walk.slots[reference.slot_name] = str(value.value_out)
        elif isinstance(values, RangeSlotList):
            number = walk.rng.choice(_numbers(values))
            in_words = walk.rng.random() < WORDS
            walk.said.append(_in_words(number, self._language) if in_words else f"{number:g}")
            walk.slots[reference.slot_name] = f"{number * (values.multiplier or 1):g}"
        else:  # a wildcard, or names of a household: areas, floors, devices
            kind = reference.list_name
            kind = f"name.{walk.domain}" if kind == "name" else kind
            said = walk.rng.choice(walk.names[kind])
            walk.said.append(said)
            walk.named.append((kind, said))
            walk.slots[reference.slot_name] = said


@cache
def _numbers_of(start: int, stop: int, step: int, halves: bool) -> tuple[float, ...]:
    whole = tuple(range(start, stop + 1, step))
    return (*whole, *(n + 0.5 for n in whole[:-1])) if halves else whole


def _numbers(values: RangeSlotList) -> tuple[float, ...]:
    return _numbers_of(values.start, values.stop, values.step, values.fraction_type is not None)


@cache
def _in_words(number: float, language: str) -> str:
    spoken = get_rbnf_engine(language).format_number(number)
    return str(spoken.text_by_ruleset.get("spellout-cardinal", spoken.text))
