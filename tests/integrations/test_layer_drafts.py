"""Drafts by the first layers for another engine's texts equal those of eecore's own engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import eecore
from eecore import ModelError
from eecore.integrations.layer_drafts import CHUNK, PAGE_SIZE, LayerDrafter
from eecore.models import LlamaModel, load_first_layers
from tiny_models import random_prompts, write_model

EXIT_LAYER, NUM_DRAFTS = 2, 5
ENDLESS = {"eos_token_id": None}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("drafts")
    return write_model(where, max_position_embeddings=2048, **ENDLESS)


@pytest.fixture(scope="module")
def whole(directory: Path) -> eecore.Model:
    return eecore.load(directory, device="cpu", kv_cache_tokens=8192)


@pytest.fixture(scope="module")
def first(directory: Path) -> LlamaModel:
    return load_first_layers(directory, EXIT_LAYER)


def drafter(model: LlamaModel, **settings: Any) -> LayerDrafter:
    usual = {"max_length": 2000, "max_texts": 8, "kv_cache_tokens": 8192}
    return LayerDrafter(model, EXIT_LAYER, **{**usual, **settings})


def text(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def texts(*lengths: int, seed: int = 3) -> list[np.ndarray]:
    return [text(*prompt) for prompt in random_prompts(*lengths, seed=seed)]


def continued(
    whole: eecore.Model, given: list[np.ndarray], count: int = NUM_DRAFTS
) -> list[list[int]]:
    """The tokens that eecore's engine generates after each text with the same layers."""
    outputs = eecore.generate(
        whole,
        [each.tolist() for each in given],
        exit=eecore.FixedExit(EXIT_LAYER),
        max_tokens=count,
        ignore_eos=True,
    )
    return [output.token_ids for output in outputs]


def test_drafts_are_those_of_the_first_layers(whole: eecore.Model, first: LlamaModel) -> None:
    given = texts(3, 40, 1, 2 * CHUNK + 7)
    assert drafter(first).draft(given, NUM_DRAFTS) == continued(whole, given)


def test_rejected_drafts_leave_no_state(whole: eecore.Model, first: LlamaModel) -> None:
    """Rounds in which none, some or all of the drafts, and another token, are accepted."""
    mine, given = drafter(first), texts(9, 30, 2)
    for round_number in range(12):
        drafts = mine.draft(given, NUM_DRAFTS)
        assert drafts == continued(whole, given)
        accepted = [(round_number + 2 * i) % (NUM_DRAFTS + 1) for i in range(len(given))]
        given = [
            text(*each, *drafted[:count], 100 + round_number)
            for each, drafted, count in zip(given, drafts, accepted, strict=True)
        ]


def test_texts_come_go_and_change_places(whole: eecore.Model, first: LlamaModel) -> None:
    mine, (a, b, c, d) = drafter(first), texts(20, 5, 33, 20)
    expected = {
        id(each): found
        for each, found in zip((a, b, c, d), continued(whole, [a, b, c, d]), strict=True)
    }
    for batch in ([a, b, None, c], [c, a, None], [None, d, b], [b, b, c, d], [a], [d, c, b, a]):
        found = mine.draft(batch, NUM_DRAFTS)
        assert found == [[] if each is None else expected[id(each)] for each in batch]


def test_only_what_is_new_goes_through_the_layers(
    first: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text may go on, move to another row, or come back after it was away."""
    mine, (a, b) = drafter(first), texts(300, 200)
    sizes: list[int] = []
    layers = LlamaModel.layers

    def counted(self: LlamaModel, begin: int, end: int, hidden: torch.Tensor, *rest: Any) -> Any:
        sizes.append(len(hidden))
        return layers(self, begin, end, hidden, *rest)

    monkeypatch.setattr(LlamaModel, "layers", counted)
    drafts = mine.draft([a, b], 3)
    assert sizes == [299, 199, 2, 2, 2]
    a, b = text(*a, *drafts[0], 7), text(*b, drafts[1][0], 7)
    sizes.clear()
    mine.draft([b, a], 3)
    # For a: its last draft and the token after it; for b: that token alone.
    assert sizes == [3, 2, 2]
    mine.draft([b], 3)
    sizes.clear()
    mine.draft([text(*a, 8)], 1)
    assert sizes == [1]


def test_texts_without_room_get_no_drafts(whole: eecore.Model, first: LlamaModel) -> None:
    mine, (a, b, c) = drafter(first, kv_cache_tokens=4 * PAGE_SIZE), texts(40, 30, 20)
    expected = continued(whole, [a, b, c])
    assert mine.draft([a, b], NUM_DRAFTS) == [expected[0], []]
    # What ended gives up its room.
    assert mine.draft([None, b], NUM_DRAFTS) == [[], expected[1]]
    assert mine.draft([c], NUM_DRAFTS) == [expected[2]]
    assert mine.draft([texts(100)[0]], NUM_DRAFTS) == [[]]


def test_a_draft_ends_with_the_text(directory: Path, whole: eecore.Model) -> None:
    (given,) = texts(12)
    (expected,) = continued(whole, [given])
    ends = next(i for i in range(NUM_DRAFTS) if expected[i] not in expected[:i] and i)
    where = write_model(
        directory.parent / "ends", max_position_embeddings=2048, eos_token_id=expected[ends]
    )
    mine = drafter(load_first_layers(where, EXIT_LAYER))
    assert mine.draft([given], NUM_DRAFTS) == [expected[: ends + 1]]


def test_a_draft_ends_below_the_threshold(whole: eecore.Model, first: LlamaModel) -> None:
    given = texts(12, 3)
    expected = continued(whole, given)
    assert drafter(first, threshold=0.0).draft(given, NUM_DRAFTS) == expected
    assert drafter(first, threshold=1.0).draft(given, NUM_DRAFTS) == [
        tokens[:1] for tokens in expected
    ]


def test_a_draft_ends_at_the_longest_length(whole: eecore.Model, first: LlamaModel) -> None:
    given = texts(12, 14, 15, 16)
    expected = continued(whole, given)
    mine = drafter(first, max_length=16)
    assert mine.draft(given, NUM_DRAFTS) == [expected[0][:4], expected[1][:2], expected[2][:1], []]


# The layers


@pytest.mark.parametrize("layers", [0, 4, 9])
def test_layers_that_the_model_has_not(directory: Path, layers: int) -> None:
    with pytest.raises(
        ModelError, match=f"num_layers: expected 1 to 3 of the 4 layers, got {layers}"
    ):
        load_first_layers(directory, layers)
