"""embed_tokens: rows by token, given or made before, and multiplied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import emulated
from cases import DTYPES, HIDDEN_SIZES
from eecore import ops
from eecore.models.int8 import quantise_rows
from random_calls import Arguments, Checked, Maker, compare

VOCAB_SIZE, NUM_PREVIOUS = 50, 4


def embed_tokens(
    token_ids: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    table: Tensor | None = None,
    previous: Tensor | None = None,
    sources: Tensor | None = None,
    multiplier: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The reference by indexing; see eecore.ops.embed_tokens."""
    if previous is not None and sources is not None:
        given = sources < 0
        looked_up = previous[sources.clamp(min=0).long()] if len(previous) else token_ids
        token_ids = torch.where(given, token_ids, looked_up.clamp(min=0))
    if table is not None:
        rows = ops.unpack_weight(weight, table[token_ids]).to(dtype)
    elif scale is None:
        rows = weight[token_ids]
    else:
        rows = (weight[token_ids] * scale[token_ids, None]).to(dtype)
    return rows if multiplier == 1 else rows * multiplier


def table(hidden_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Rows with others between them, at addresses that allow no wide accesses."""
    wide = torch.randn(VOCAB_SIZE, hidden_size + 3, generator=torch.Generator().manual_seed(1))
    return wide.to(device, dtype)[:, 1 : 1 + hidden_size]


def tokens(count: int, device: torch.device) -> dict[str, Any]:
    """Tokens, some of them made before; unread entries are no tokens."""
    generator = torch.Generator().manual_seed(count)
    draw = {"generator": generator}
    sources = torch.randint(-1, NUM_PREVIOUS, (count,), **draw)
    token_ids = torch.randint(0, VOCAB_SIZE, (count,), **draw)
    previous = torch.randint(0, VOCAB_SIZE, (NUM_PREVIOUS,), **draw)
    previous[0] = -1  # no token, which is embedded as 0
    return {
        "token_ids": torch.where(sources < 0, token_ids, -99).to(device),
        "previous": previous.to(device),
        "sources": sources.int().to(device),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
def test_matches_the_reference(hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
    if not emulated.supports(device, dtype):
        pytest.skip("float16 is for CUDA")
    weight, given = table(hidden_size, dtype, device), tokens(7, device)
    expected = embed_tokens(weight=weight, **given)
    assert torch.equal(ops.embed_tokens(weight=weight, **given), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["floats", "int8", "Q8_0"])
def test_multiplied_rows(form: str, dtype: torch.dtype, device: torch.device) -> None:
    """Rows are rounded to the dtype before the multiplication, and after it; -1 leaves a row."""
    if not emulated.supports(device, dtype):
        pytest.skip("float16 is for CUDA")
    weight, given = table(96, torch.float32, device), tokens(7, device)
    coded: Arguments = {"weight": weight.to(dtype)}
    if form == "int8":
        coded = dict(zip(("weight", "scale"), quantise_rows(weight), strict=True))
    if form == "Q8_0":
        packed = ops.pack_weight(ops.quantise_weight(weight.cpu().contiguous(), form), form)
        coded = {"weight": packed.weight.to(device), "table": packed.table}
    out = torch.full((7, 96), 3.0, dtype=dtype, device=device)
    given["token_ids"][4] = given["sources"][4] = -1
    expected = embed_tokens(**coded, **given, multiplier=11.3125, dtype=dtype)
    expected[4] = out[4]
    assert torch.equal(ops.embed_tokens(**coded, **given, multiplier=11.3125, out=out), expected)


def fuzzed_call(m: Maker) -> Checked:
    tokens, vocab, size, dtype = m.size(20), m.size(60, 1), m.columns(70), m.dtype()
    matrix = m.weight(dtype, vocab, size)
    follows = m.chance()
    previous = m.size(5, 1)
    given = {
        "token_ids": m.placed(m.whole(vocab, tokens)),
        "weight": matrix.weight,
        "scale": matrix.scale,
        "previous": m.placed(m.whole(vocab + 1, previous) - 1) if follows else None,
        "sources": m.placed((m.whole(previous + 1, tokens) - 1).int()) if follows else None,
        "out": m.states(tokens, size, dtype),
        "table": matrix.table,
        "multiplier": m.one_of(1.0, 7.5),
    }
    names = ("token_ids", "weight", "scale", "previous", "sources", "table", "multiplier")

    def oracle(before: Arguments) -> dict[str, Tensor]:
        given = {n: before[n] for n in names}
        return {"out": embed_tokens(**given, dtype=dtype).view(tokens, size)}

    return given, compare(oracle)
