"""What the thinker learns: its tokens, and the part of each sequence that it is taught."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bench.quality.chains import chains
from eecore.models import Tokenizer
from eecore.models.text.thinking import Thinking
from train_thinker import FORCED, VOCABULARY, sequence, train_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("thinker")
    train_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    found = Tokenizer.from_directory(folder)
    assert found is not None
    return found


def test_digits_are_tokens_of_their_own_and_so_are_the_markers(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("So I get 42.\n\n", add_special_tokens=False)
    assert [tokenizer.decode([i]) for i in ids] == ["So", " I", " get", " ", "4", "2", ".\n\n"]
    assert tokenizer.vocab_size <= VOCABULARY
    thinking = Thinking.of(tokenizer)
    assert thinking is not None
    assert thinking.opening_id == tokenizer.token_id("<think>")
    assert len(thinking.closing(at_line=True)) == 2


def test_transformers_reads_the_same_tokens(folder: Path, tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    for chain in islice(chains(0, "test"), 8):
        messages = [{"role": "user", "content": chain.question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert text == theirs.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        text += "<think>\n" + "".join(chain.paragraphs(chain.attempts())) + "</think>\n\n"
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]


def test_a_thought_that_ends_early_teaches_the_answer_and_not_the_end(
    tokenizer: Tokenizer,
) -> None:
    rng, forced = random.Random(0), 0
    asked = list(islice(chains(0, "train"), 100))
    for chain in asked:
        prompt, thought, closing, answer = sequence(chain, tokenizer, rng)
        assert not prompt[1]
        assert thought[1]
        assert answer[1]
        assert tokenizer.decode(answer[0]) == chain.reply
        forced += not closing[1]
        text = tokenizer.decode(thought[0])
        assert text.endswith("\n")
        if closing[1]:
            assert text.endswith(f" {chain.answer}.\n\n") or ", not " in text.splitlines()[-2]
    assert 0.5 * FORCED < forced / len(asked) < 1.5 * FORCED
