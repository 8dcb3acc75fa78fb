"""The number of kernels of a decoder layer on a GPU: each costs a boundary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import emulated
from eecore.models import AttentionBatch, KVCache, load_model
from eecore.models.linear import MAX_SKINNY_ROWS
from tiny_models import write_model

PAGE_SIZE = 16
# Norms are made by the products that read them, keys and values appended by the one that makes
# them, and results of splits merged by the last block.
DECODING = [
    "skinny_append_kernel",
    "paged_attention_kernel",
    "skinny_linear_kernel",
    "skinny_gated_linear_kernel",
    "skinny_linear_kernel",
]
NORM = "rms_norm_kernel"
APART = ["skinny_linear_kernel", "append_kv_kernel"]
OF_MORE_ROWS = [NORM, *APART, *DECODING[1:3], NORM, *DECODING[3:]]


def batch_of(lengths: list[int], num_pages: int) -> AttentionBatch:
    """A batch with the last token of each sequence."""
    pages = torch.arange(len(lengths) * num_pages, dtype=torch.int32).view(len(lengths), num_pages)
    positions = torch.tensor(lengths) - 1
    rows = torch.arange(len(lengths))
    slots = pages[rows, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    return AttentionBatch(
        positions=positions,
        slot_mapping=slots,
        page_table=pages,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        query_start_loc=torch.arange(len(lengths) + 1, dtype=torch.int32),
    )


@torch.inference_mode()
def kernels_of_two_layers(
    directory: Path, num_tokens: int, dtype: torch.dtype, length: int
) -> list[str]:
    """The kernels of a step of two layers, with contexts of a length and room for long ones."""
    _, model, _ = load_model(directory, "cpu", dtype)
    model.calls_single_ops = True
    model.linear.max_rows = MAX_SKINNY_ROWS
    num_pages = 80
    kv = KVCache.allocate(
        model.config, num_tokens * num_pages, PAGE_SIZE, device=model.device, dtype=dtype
    )
    kv.k.zero_()
    kv.v.zero_()
    hidden = torch.randn(num_tokens, model.config.hidden_size).to(dtype)
    batch = batch_of([length] * num_tokens, num_pages)
    launched = emulated.kernels_of(lambda: model.layers(0, 2, hidden, kv, batch))
    assert not kv.arrivals.any()
    return launched


@pytest.mark.parametrize("num_tokens", [1, 8, 9, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_is_as_few_kernels_as_it_can_be(
    num_tokens: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated.route(monkeypatch)
    directory = write_model(tmp_path, intermediate_size=128, max_position_embeddings=2048)
    few = num_tokens <= (8 if dtype == torch.float32 else 32)
    for length in (30, 1270) if num_tokens == 1 else (30,):  # launchers see the room alone
        launched = kernels_of_two_layers(directory, num_tokens, dtype, length)
        assert launched == 2 * (DECODING if few else OF_MORE_ROWS)
