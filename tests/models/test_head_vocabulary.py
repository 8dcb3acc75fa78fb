"""The rows of a draft head's own tokens, and the spare rows that tokens of texts share."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from eecore import ops
from eecore.models.head_vocabulary import (
    FORMAT,
    SPARE_FORMAT,
    HeadVocabulary,
    matrix_rows,
)
from eecore.ops import Matrix

VOCAB_SIZE, HIDDEN_SIZE = 300, 64


def lm_head(form: str) -> Matrix:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator)
    if form == "int8":
        scale = weight.abs().amax(1) / 127
        return Matrix((weight / scale[:, None]).round().to(torch.int8), scale=scale)
    if form == "Q8_0":
        return ops.pack_weight(ops.quantise_weight(weight, form), form)
    return Matrix(weight.to(getattr(torch, form)))


def own_tokens(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randperm(VOCAB_SIZE, generator=generator)[:count].sort().values


def check(vocabulary: HeadVocabulary, head: Matrix, own: Tensor, num_spare: int) -> None:
    """Every row has to be its token's, and no token may have two."""
    tokens, table = vocabulary.tokens, vocabulary.rows.table
    assert table is not None
    assert torch.equal(tokens[: len(own)], own)
    assert len(tokens) == len(table) == len(own) + min(num_spare, VOCAB_SIZE - len(own))
    assert len(torch.unique(tokens)) == len(tokens)
    x = torch.randn(3, HIDDEN_SIZE, generator=torch.Generator().manual_seed(3))
    y = ops.skinny_linear(x, vocabulary.rows.weight, weight_table=table)
    found = ops.unpack_weight(vocabulary.rows.weight, table)
    for part, form in (
        (slice(len(own)), FORMAT),
        (slice(len(own), None), SPARE_FORMAT),
    ):
        if not len(tokens[part]):
            continue
        rows = matrix_rows(head, tokens[part]).float().contiguous()
        expected = ops.pack_weight(ops.quantise_weight(rows, form), form)
        assert expected.table is not None
        assert torch.equal(found[part], ops.unpack_weight(expected.weight, expected.table))
        its = ops.skinny_linear(x, expected.weight, weight_table=expected.table)
        assert torch.equal(y[:, part], its)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "Q8_0"])
@pytest.mark.parametrize(
    ("num_own", "num_spare"), [(64, 32), (37, 20), (2, 5), (290, 100), (VOCAB_SIZE, 8), (50, 0)]
)
def test_rows_are_those_of_their_tokens(num_own: int, num_spare: int, form: str) -> None:
    head, own = lm_head(form), own_tokens(num_own)
    vocabulary = HeadVocabulary(head, own, num_spare)
    check(vocabulary, head, own, num_spare)
    generator = torch.Generator().manual_seed(4)
    for count in (1, 3, 7, 40, 2, 300, 1, 11):
        text = torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()
        others = list(dict.fromkeys(token for token in text if token not in own))
        vocabulary.take(text)
        check(vocabulary, head, own, num_spare)
        known = set(vocabulary.tokens.tolist())
        if len(others) <= num_spare:
            assert known.issuperset(others)


def test_those_that_came_first_make_room() -> None:
    head, own = lm_head("float32"), own_tokens(40)
    vocabulary = HeadVocabulary(head, own, 10)
    others = [token for token in range(VOCAB_SIZE) if token not in own][10:]
    vocabulary.take(others[:6])
    vocabulary.take(others[:2])  # has rows already
    vocabulary.take(others[6:12])
    assert set(vocabulary.tokens[40:].tolist()) == set(others[2:12])
    vocabulary.take(others[12:40])  # more than there are rows
    assert set(vocabulary.tokens[40:].tolist()) == set(others[30:40])
    check(vocabulary, head, own, 10)


def test_what_has_a_row_changes_nothing() -> None:
    head, own = lm_head("float32"), own_tokens(40)
    vocabulary = HeadVocabulary(head, own, 10)
    before = vocabulary.tokens.clone(), vocabulary.rows.weight.clone()
    vocabulary.take([])
    vocabulary.take(vocabulary.tokens.tolist())
    assert torch.equal(vocabulary.tokens, before[0])
    assert torch.equal(vocabulary.rows.weight, before[1])


@pytest.mark.parametrize("form", ["float32", "Q8_0"])
def test_engines_of_several_threads(form: str) -> None:
    head, own = lm_head(form), own_tokens(40)
    vocabulary = HeadVocabulary(head, own, 48)

    vocabulary._put(own.tolist())  # another thread may have put them already

    def take(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(60):
            vocabulary.take(torch.randint(VOCAB_SIZE, (9,), generator=generator).tolist())

    threads = [threading.Thread(target=take, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(vocabulary, head, own, 48)
