"""The trained thinker: it thinks in steps, finds its slips, goes on too long and answers."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from transformers import AutoModelForCausalLM

import eecore
from bench.harness.places import THINKER, unpacked
from bench.quality import think
from bench.quality.chains import Chain, Step, chains, stands_after
from bench.quality.think_model import answers, is_right, prompts, thought_figures
from devices import load

DIRECTORY = unpacked(THINKER)
SLIP = Chain(21, (Step("+", 5), Step("+", 8), Step("-", 3)))
"""A question whose first attempt forgets to carry."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def thinker() -> eecore.Model:
    return load(DIRECTORY, dtype="float32", kv_cache_tokens=8192)


def test_a_slip_is_corrected_and_the_thought_goes_on(thinker: eecore.Model) -> None:
    (output,) = answers(thinker, [SLIP], 1, exit="full")
    assert output.finish_reason == "stop"
    assert is_right(output, SLIP)
    thought = output.thought
    assert thought is not None
    assert "b:26+8=24\n" in thought
    assert "b:26+8=34, not 24." in thought
    stands = stands_after(thought, SLIP.answer)
    assert stands is not None
    assert len(stands) < 0.6 * len(thought)


def test_most_answers_are_right_and_transformers_says_the_same(thinker: eecore.Model) -> None:
    asked = list(islice(chains(0, "test"), 8))
    outputs = answers(thinker, asked, 8, exit="full")
    assert thinker.tokenizer is not None
    figures = thought_figures(thinker.tokenizer, asked, outputs)
    assert figures["right"] >= 7 / 8
    assert 100 < figures["thought_tokens"] < 300
    assert figures["stands_after"] < 0.7
    theirs = AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32)
    for prompt, output in zip(prompts(thinker.tokenizer, asked[:2]), outputs, strict=False):
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + output.token_ids])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == output.token_ids


def test_full_and_early_thoughts_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--count 4 --batches 1 4 --rounds 1 --dry-run".split()
    think.main(["--model", str(DIRECTORY), *words])
    table, _, about = capsys.readouterr().out.strip().partition("\n\n")
    _, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    assert [row[1] for row in rows] == ["1"] * 8 + ["4"] * 8
    full, budget, probed, calibrated = (float(row[4]) for row in rows[:4])
    assert full == probed > max(budget, calibrated)
    assert [row[2:5] for row in rows[:8]] == [row[2:5] for row in rows[8:]]
    assert "4 questions" in about


def test_the_card_says_where_the_data_come_from() -> None:
    card = (THINKER / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "from no outside source" in card
    assert "exact match" in card
