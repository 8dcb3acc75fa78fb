"""Chunks of prompts with other libraries' attention kernels give the same as with eecore's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eecore import Engine, Full, SamplingParams, ops
from eecore.models import Chunks, load_model
from eecore.models.prompt_attention import (
    FLASH_ATTN,
    PromptAttention,
    Scores,
    prompt_attention_of,
)
from tiny_models import write_model

CUDA = torch.device("cuda")
PAGE_SIZE = 16
SHAPES = {
    "prompts from their begin": Chunks((64, 70), (64, 70)),
    "chunks after others": Chunks((64, 80, 65), (96, 331, 65)),
}


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    most: int,
    most_keys: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    """flash_attn_varlen_func by its arguments, with the mask written out."""
    assert causal
    assert starts.dtype == key_starts.dtype == torch.int32
    outs, longest = [], [0, 0]
    for i in range(len(starts) - 1):
        queries, keys = q[starts[i] : starts[i + 1]], k[key_starts[i] : key_starts[i + 1]]
        values = v[key_starts[i] : key_starts[i + 1]]
        longest = [max(longest[0], len(queries)), max(longest[1], len(keys))]
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        offset = len(keys) - len(queries)
        ahead = torch.arange(len(keys)) - (torch.arange(len(queries)) + offset)[:, None]
        hidden = ahead > 0
        if window_size[0] >= 0:
            assert window_size[1] == 0
            hidden |= ahead < -window_size[0]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, values))
    assert longest == [most, most_keys]
    return torch.cat(outs)


PEERS = {"torch": PromptAttention(), FLASH_ATTN: PromptAttention(varlen)}


@pytest.mark.parametrize("scores", [Scores(0.2), Scores(0.2, 40), Scores(0.2, 0, 3.0)], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PEERS)
def test_the_same_as_paged_attention(name: str, shape: str, scores: Scores) -> None:
    peer, chunks = PEERS[name], SHAPES[shape]
    assert peer.takes(scores) is (name == FLASH_ATTN or scores == Scores(0.2))
    assert peer.name == name
    if not peer.takes(scores):
        return
    generator = torch.Generator().manual_seed(0)
    num_pages = [-(-length // PAGE_SIZE) for length in chunks.keys]
    pages = torch.randperm(sum(num_pages), generator=generator).int()
    table = torch.full((len(num_pages), max(num_pages)), 2**30, dtype=torch.int32)
    for row, mine in zip(table, pages.split(num_pages), strict=True):
        row[: len(mine)] = mine
    k, v = (torch.randn(len(pages), PAGE_SIZE, 2, 32, generator=generator) for _ in "kv")
    q = torch.randn(sum(chunks.queries), 4, 32, generator=generator)
    starts = torch.tensor([0, *chunks.queries]).cumsum(0).int()
    expected = ops.paged_attention(
        *(q, k, v, table, torch.tensor(chunks.keys).int(), starts),
        scale=scores.scale,
        sliding_window=scores.sliding_window,
        soft_cap=scores.soft_cap,
    )
    torch.testing.assert_close(peer(q, k, v, table, chunks, scores), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PEERS)
def test_a_prompt_goes_through_it_and_short_ones_do_not(name: str, tmp_path: Path) -> None:
    config, model, _ = load_model(write_model(tmp_path, max_position_embeddings=512), "cpu")
    model.calls_single_ops = True
    seen: list[Chunks] = []

    class Seen(PromptAttention):
        def __call__(self, *given: Any) -> Tensor:
            seen.append(given[4])
            return super().__call__(*given)

    def tokens(length: int) -> list[int]:
        engine = Engine(model, None)
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        engine.add_request(list(range(3, 3 + length)), exit=Full(), sampling=sampling)
        (output,) = [step.output for step in engine.run() if step.output is not None]
        return output.token_ids

    lengths = (20, 150)
    expected = [tokens(length) for length in lengths]
    model.prompt_attention = Seen(varlen if name == FLASH_ATTN else None)
    assert [tokens(length) for length in lengths] == expected
    assert seen == [Chunks((150,), (150,))] * config.num_layers


@pytest.fixture
def _without() -> Iterator[None]:
    before = sys.modules.pop(FLASH_ATTN, None)
    yield
    sys.modules.pop(FLASH_ATTN, None)
    if before is not None:
        sys.modules[FLASH_ATTN] = before


@pytest.mark.usefixtures("_without")
def test_the_best_that_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert prompt_attention_of(torch.device("cpu"), torch.bfloat16) is None
    assert prompt_attention_of(CUDA, torch.float32) is None
    module = SimpleNamespace(flash_attn_varlen_func=varlen)
    monkeypatch.setitem(sys.modules, FLASH_ATTN, module)
    found = prompt_attention_of(CUDA, torch.bfloat16)
    assert found is not None
    assert found.name == FLASH_ATTN
    monkeypatch.setitem(sys.modules, FLASH_ATTN, None)  # as if there were none
    found = prompt_attention_of(CUDA, torch.float16)
    assert found is not None
    assert found.name == "torch"
    # One of another torch: its library lacks a symbol.
    monkeypatch.delitem(sys.modules, FLASH_ATTN)
    broken = tmp_path / FLASH_ATTN / "__init__.py"
    broken.parent.mkdir()
    broken.write_text('raise ImportError("undefined symbol: _ZN3c104cuda9SetDeviceEab")\n')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(
        UserWarning, match=r"flash_attn: expected one that torch .* undefined symbol"
    ):
        found = prompt_attention_of(CUDA, torch.bfloat16)
    assert found is not None
    assert found.name == "torch"
