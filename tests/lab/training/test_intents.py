"""The intent task: the promises of its data, and the steps to a scored model."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

import eecore
import score_intents
import train_intents
from eecore.errors import TrainingError
from eecore.lab.training import LastLayerLoss, TrainingConfig
from eecore.models import Tokenizer
from intent_grammar import Grammar
from intent_names import seen_and_held_out
from make_data import SPLITS, Sizes, make_data, spoken, write
from small_model import END, Task, recipe, train_tokenizer
from tiny_models import write_model

SIZES = Sizes(3000, 100)


@pytest.fixture(scope="module")
def splits() -> dict[str, Any]:
    return make_data(0, SIZES)


def test_an_utterance_is_in_one_split_and_has_one_parse(splits: dict[str, Any]) -> None:
    texts = [spoken(utterance) for split in SPLITS for utterance in splits[split]]
    assert len(texts) == len(set(texts))
    assert [len(splits[split]) for split in SPLITS[1:]] == [100] * 4
    assert len(splits["train"]) > 2500
    intents = {utterance.intent for utterance in splits["train"]}
    assert len(intents) > 38  # of 42: some have a handful of utterances


def test_names_that_are_held_out_are_never_trained_on(splits: dict[str, Any]) -> None:
    seen, held_out = seen_and_held_out(0)
    for kind, names in held_out.values.items():
        assert names
        if kind != "floor":
            assert not set(names) & set(seen[kind]), kind
    for split in ("train", "valid", "test", "test_templates"):
        for utterance in splits[split]:
            assert all(name in seen[kind] for kind, name in utterance.named)
    for utterance in splits["test_names"]:
        assert all(name in held_out[kind] for kind, name in utterance.named)
        assert any(kind != "floor" for kind, _ in utterance.named)


def test_parses_say_what_was_said() -> None:
    grammar = Grammar()
    seen, _ = seen_and_held_out(0)
    rng = random.Random(1)
    several = 0
    for template in grammar.templates:
        utterance = grammar.sample(template, rng, seen)
        assert utterance.text
        assert utterance.parse.startswith(f"[{template.intent}")
        assert utterance.parse.count("[") == utterance.parse.count("]")
        values = re.findall(r"\[(\w+) ([^\[\]]+)\]", utterance.parse)
        fixed = [(slot, value) for slot, value in values if slot in template.fixed]
        assert fixed == values[len(values) - len(fixed) :] == sorted(fixed)
        said = [name for _, name in utterance.named]
        assert [value for _, value in values if value in said] == said
        places = [utterance.text.lower().index(name) for name in said]
        assert places == sorted(places)
        several += len(said) > 1
    assert several > 20


def test_slots_stand_in_the_order_of_the_words() -> None:
    grammar = Grammar()
    seen, _ = seen_and_held_out(0)
    rng = random.Random(1)
    shorten = [t for t in grammar.templates if t.intent == "HassDecreaseTimer"]
    said = {
        utterance.text: utterance.parse
        for utterance in (grammar.sample(rng.choice(shorten), rng, seen) for _ in range(2000))
        if re.fullmatch(r".*timer for \d+.hours? by \d+.minutes?", utterance.text)
    }
    assert said
    for text, parse in said.items():
        hours, minutes = re.findall(r"\d+", text)
        assert parse == f"[HassDecreaseTimer [start_hours {hours}] [minutes {minutes}]]"


def test_from_data_to_exact_match(
    splits: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    write(splits, data)
    train_tokenizer(data, Task("<|parse|>", 256, 400))
    tokenizer = Tokenizer.from_directory(data)
    assert tokenizer is not None
    assert tokenizer.vocab_size == 400
    assert tokenizer.token_id(END) == 0
    text = "set the Café to 20 %"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text)[-1] == tokenizer.token_id("<|parse|>")  # a prompt is over
    alone, within = (tokenizer.encode(text, add_special_tokens=False) for text in ("20", "to 20%"))
    assert alone in [within[i : i + len(alone)] for i in range(len(within))]  # wherever it stands

    monkeypatch.setattr(train_intents, "INTENTS", Task("<|parse|>", 256, 400))
    options: dict[str, Any] = {
        "batch_size": 4,
        "learning_rate": 1e-3,
        "layers": 2,
        "seed": 0,
        "resume": False,
        "threads": 1,
    }
    train_intents.main(data, out, steps=3, plain=False, evaluated=2, **options)
    scores = json.loads((out / "exact_match.json").read_text())
    assert {split: sorted(by_exit) for split, by_exit in scores.items()} == {
        split: ["1", "2"] for split in SPLITS[1:]
    }
    assert "test_names, exact match by exit layer  2: 0.000" in capsys.readouterr().out
    # It is finished.
    with pytest.raises(TrainingError, match=r"run\.json: expected a file, got nothing"):
        train_intents.main(
            data, out, steps=3, plain=True, evaluated=2, **{**options, "resume": True}
        )


def test_exact_match_counts_whole_parses(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", num_hidden_layers=2)
    written = eecore.generate(eecore.load(model), "ab", max_tokens=score_intents.LONGEST_PARSE)
    right = {"input": "ab", "target": written[0].text}
    almost = {"input": "ab", "target": f"{written[0].text} "}
    for split in SPLITS[1:]:
        lines = [json.dumps(record) for record in (right, almost, right, right)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    score_intents.main(model, tmp_path, count=3)
    scores = json.loads((model / "exact_match.json").read_text())
    assert scores["test"]["2"] == pytest.approx(2 / 3)
    assert set(scores) == set(SPLITS[1:])


def test_the_baseline_differs_in_exits_and_dropout_alone() -> None:
    layerskip, plain = (recipe(flag, False, 8, 1e-3, 0, 500) for flag in (False, True))
    assert (plain.loss, plain.layer_dropout) == (LastLayerLoss(), None)
    parts = {"loss": layerskip.loss, "layer_dropout": layerskip.layer_dropout}
    assert TrainingConfig(**{**vars(plain), **parts}) == layerskip
