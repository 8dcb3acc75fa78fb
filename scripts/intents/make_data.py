"""Utterances to a smart home with their parses, from Home Assistant's English templates.

    python scripts/intents/make_data.py data/intents

Writes JSON lines of {"input", "target", "intent"}, the target being the input's parse (see
intent_grammar.py), and counts.json:

    train, valid, test        the same templates and names, different utterances
    test_names                the templates of train, with held-out names
    test_templates            held-out templates

The same seed writes the same files. No utterance is in two of them, and none has two parses:
ambiguous utterances are dropped. Needs: pip install '.[intents]'.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from intent_grammar import Grammar, Template, Utterance
from intent_names import Names, seen_and_held_out

SPLITS = ("train", "valid", "test", "test_names", "test_templates")
FEWEST_TEMPLATES = 4  # of an intent with held-out templates
HELD_OUT_TEMPLATES = 0.1  # share of these intents' templates
TRIES = 8  # for a new utterance, after which a template counts as exhausted


@dataclass(frozen=True)
class Sizes:
    """The number of utterances of all files, and of each file but train at most."""

    total: int
    each: int


def make_data(seed: int, sizes: Sizes) -> dict[str, list[Utterance]]:
    """The utterances of each split."""
    grammar = Grammar()
    seen, held_out = seen_and_held_out(seed)
    trained, untrained = held_out_templates(grammar.templates, seed)
    wanted = sizes.total - 2 * sizes.each
    spare = round(1.3 * sizes.each)  # some of them are also in another split
    pools = {
        "train": expand(grammar, trained, seen, wanted, seed),
        "test_templates": expand(grammar, untrained, seen, spare, seed + 1),
        "test_names": [
            utterance
            for utterance in expand(grammar, trained, held_out, 2 * spare, seed + 2)
            if any(name in held_out[kind] and kind != "floor" for kind, name in utterance.named)
        ],
    }
    parses = defaultdict(set)
    for utterance in (u for pool in pools.values() for u in pool):
        parses[spoken(utterance)].add(utterance.parse)
    taken: set[str] = set()
    splits: dict[str, list[Utterance]] = {}
    for name, pool in pools.items():
        kept = []
        for utterance in pool:
            text = spoken(utterance)
            if len(parses[text]) == 1 and text not in taken:
                taken.add(text)
                kept.append(utterance)
        random.Random(f"{seed} {name}").shuffle(kept)
        splits[name] = kept if name == "train" else kept[: sizes.each]
    known = splits["train"]
    splits["valid"], splits["test"] = known[: sizes.each], known[sizes.each : 2 * sizes.each]
    splits["train"] = known[2 * sizes.each :]
    return splits


def spoken(utterance: Utterance) -> str:
    """The words of an utterance, without its spelling: two spellings may sound the same."""
    return utterance.text.lower().removesuffix(".")


def held_out_templates(
    templates: Iterable[Template], seed: int
) -> tuple[list[Template], list[Template]]:
    """(templates to train on, templates to test on); every intent has templates to train on."""
    by_intent = defaultdict(list)
    for template in templates:
        by_intent[template.intent].append(template)
    trained, untrained = [], []
    for intent, own in by_intent.items():
        random.Random(f"{seed} {intent}").shuffle(own)
        few = len(own) < FEWEST_TEMPLATES
        count = 0 if few else max(1, round(HELD_OUT_TEMPLATES * len(own)))
        untrained += own[:count]
        trained += own[count:]
    return trained, untrained


def expand(
    grammar: Grammar, templates: list[Template], names: Names, count: int, seed: int
) -> list[Utterance]:
    """About ``count`` different utterances.

    The share of an intent grows with the square root of its templates; the share of exhausted
    templates goes to the remaining templates.
    """
    sizes = Counter(template.intent for template in templates)
    share = {intent: 1 / math.sqrt(size) for intent, size in sizes.items()}
    found: dict[str, Utterance] = {}
    streams = {
        template.index: fresh(grammar, template, names, found, seed) for template in templates
    }
    open_templates = random.Random(seed).sample(templates, len(templates))
    while open_templates and len(found) < count:
        total = sum(share[template.intent] for template in open_templates)
        missing = count - len(found)
        exhausted = set()
        for template in open_templates:
            quota = max(1, math.ceil(missing * share[template.intent] / total))
            for _ in range(quota):
                if len(found) >= count or next(streams[template.index], None) is None:
                    exhausted.add(template.index)
                    break
        open_templates = [t for t in open_templates if t.index not in exhausted]
    return list(found.values())


def fresh(
    grammar: Grammar, template: Template, names: Names, found: dict[str, Utterance], seed: int
) -> Iterator[Utterance]:
    """New utterances of a template, which are added to ``found``."""
    rng = random.Random(f"{seed} {template.index}")
    failures = 0
    while failures < TRIES:
        utterance = grammar.sample(template, rng, names)
        key = f"{utterance.text}\n{utterance.parse}"
        if key in found:
            failures += 1
            continue
        failures = 0
        found[key] = utterance
        yield utterance


def write(splits: dict[str, list[Utterance]], folder: Path) -> dict[str, dict[str, int]]:
    """Write every split and counts.json, which is returned: utterances by split and intent."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for name in SPLITS:
        with (folder / f"{name}.jsonl").open("w") as file:
            for utterance in splits[name]:
                record = {
                    "input": utterance.text,
                    "target": utterance.parse,
                    "intent": utterance.intent,
                }
                file.write(json.dumps(record) + "\n")
        by_intent = Counter(utterance.intent for utterance in splits[name])
        counts[name] = {"all": len(splits[name]), **dict(sorted(by_intent.items()))}
    (folder / "counts.json").write_text(json.dumps(counts, indent=2) + "\n")
    return counts


def main(
    folder: Annotated[Path, typer.Argument(help="Where to write.")],
    pairs: Annotated[int, typer.Option(min=1000, help="About how many to make.")] = 110_000,
    tests: Annotated[int, typer.Option(min=10, help="The most for a test split.")] = 3000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Expand the templates."""
    counts = write(make_data(seed, Sizes(pairs, tests)), folder)
    for name, by_intent in counts.items():
        print(f"{name}: {by_intent['all']} pairs, {len(by_intent) - 1} intents")


if __name__ == "__main__":
    typer.run(main)
