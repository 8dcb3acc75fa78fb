"""Home Assistant's English templates, expanded: what somebody says, and what it means.

    python scripts/intents/make_data.py data/intents

Writes JSON lines of {"input", "target", "intent"}, the target being the input's parse (see
intent_grammar.py), and counts.json:

    train, valid, test        templates and names that are all trained on, utterances that differ
    test_names                templates that are trained on, with names that are not
    test_templates            templates that are not trained on

The same seed writes the same files. No utterance is in two of them, and none has two parses: those
that the templates leave ambiguous are dropped. Needs: pip install 'eecore[intents]'.
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
# Of an intent with at least so many templates, this share of them is held out.
FEWEST_TEMPLATES, HELD_OUT_TEMPLATES = 4, 0.1
# Times that a template is tried for a new utterance before it counts as exhausted.
TRIES = 8


@dataclass(frozen=True)
class Sizes:
    """How many utterances each file gets at most; train has what is left."""

    total: int
    each: int


def make_data(seed: int, sizes: Sizes) -> dict[str, list[Utterance]]:
    """The utterances of each split."""
    grammar = Grammar()
    seen, held_out = seen_and_held_out(seed)
    trained, untrained = held_out_templates(grammar.templates, seed)
    wanted = sizes.total - 2 * sizes.each
    spare = round(1.3 * sizes.each)  # some of them are said in another split too
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
    """The words alone: utterances that are written differently may sound the same."""
    return utterance.text.lower().removesuffix(".")


def held_out_templates(
    templates: Iterable[Template], seed: int
) -> tuple[list[Template], list[Template]]:
    """Templates to train on, and those to test on; every intent has some of the first."""
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

    Intents with many templates get more of them, by the square root; templates that have no more to
    say leave their share to the others.
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
    """Utterances that are not in ``found`` yet, which are put there."""
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
    tests: Annotated[int, typer.Option(min=10, help="At most so many a test split.")] = 3000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Expand the templates."""
    counts = write(make_data(seed, Sizes(pairs, tests)), folder)
    for name, by_intent in counts.items():
        print(f"{name}: {by_intent['all']} pairs, {len(by_intent) - 1} intents")


if __name__ == "__main__":
    typer.run(main)
