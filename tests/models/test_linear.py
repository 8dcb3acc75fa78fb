"""The products that multiply a number of rows; heads reach the cache by each of them."""

from __future__ import annotations

import pytest
import torch

from eecore.models.linear import (
    MAX_SKINNY_ROWS,
    MAX_SKINNY_ROWS_ON_ADA,
    Linear,
)
from eecore.ops import AppendKv, Matrix

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("capability", "rows"),
    [((8, 0), MAX_SKINNY_ROWS), ((8, 9), MAX_SKINNY_ROWS_ON_ADA), ((9, 0), MAX_SKINNY_ROWS)],
)
def test_how_many_rows_a_gpu_takes(
    capability: tuple[int, int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    linear = Linear(torch.device("cuda", 0), 1e-6)
    assert linear.max_rows == rows
    assert linear.is_skinny(torch.empty(rows, 1))
    assert not linear.is_skinny(torch.empty(rows + 1, 1))


def test_a_cpu_takes_any_number_of_rows() -> None:
    assert Linear(CPU, 1e-6).max_rows is None


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_torch_puts_the_same_into_the_cache(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x, norm, head_norm = normal(num_tokens, 40), normal(40), normal(8)
    qkv = Matrix(normal(7 * 8, 40) / 6, normal(7 * 8))
    angles = normal(9, 3)
    found = []
    for max_rows in (None, 3):
        linear = Linear(CPU, 1e-6)
        linear.max_rows = max_rows
        append = AppendKv(
            *torch.zeros(2, 4, 2, 2, 8),
            torch.tensor([5, -1, 0, 7, 2])[:num_tokens],
            torch.tensor([0, 3, 8, 1, 2])[:num_tokens],
            torch.cat((angles.cos(), angles.sin()), 1),
            head_norm,
            head_norm,
        )
        q = linear.into_cache(x, qkv, norm, append)
        assert q.shape == (num_tokens, 3, 8)
        found.append((q, append.k_cache, append.v_cache))
    for skinny, torchs in zip(*found, strict=True):
        torch.testing.assert_close(skinny, torchs, rtol=1e-4, atol=1e-4)
    assert bool(found[0][1].any()) is (num_tokens > 0)
