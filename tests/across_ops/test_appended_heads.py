"""skinny_linear that also appends heads equals skinny_linear and then append_kv, to the bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import emulated
from cases import DTYPES
from eecore import ops
from eecore.models.int8 import quantise_rows
from eecore.ops import AppendKv

MAX_POSITION, PAGE_SIZE = 40, 8


@dataclass(frozen=True)
class HeadsCase:
    """Sizes of a projection to heads of q, k and v."""

    num_tokens: int = 3
    in_features: int = 64
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 64
    normed: bool = True
    bias: bool = False
    head_norms: bool = False

    def is_one_kernel(self, dtype: torch.dtype) -> bool:
        """Whether CUDA runs one kernel, the kernel that norms rows ahead aside."""
        whole = self.head_dim % 16 == 0 and self.rotary_dim % 16 == 0
        most = 8 if dtype == torch.float32 else 32
        return self.num_tokens <= most and whole and not self.head_norms


CASES = (
    HeadsCase(0),
    HeadsCase(1),
    HeadsCase(8, 576, 9, 3, bias=True),  # SmolLM2, with the biases of Qwen2
    HeadsCase(2, 100, 1, 1, 16, 16, normed=False),
    HeadsCase(5, 131, 6, 2, 128, 32),  # heads that are rotated in part
    HeadsCase(7, 72, 3, 3, 96, 0, bias=True),  # T5: not at all
    HeadsCase(8, 192, 0, 2, 80, 48),  # no queries
    HeadsCase(4, 64, 2, 0, 32, 32),  # no keys
    HeadsCase(8, 2080, 2, 1, 256, 256),  # longer rows than blocks make
    HeadsCase(9, 64, 5, 1),
    HeadsCase(32, 576, 9, 3, bias=True),
    HeadsCase(33, 96, 2, 2),
    HeadsCase(3, 64, 2, 1, 72, 72),
    HeadsCase(3, 64, 2, 1, 64, 24),
    HeadsCase(4, 64, 4, 2, 128, 128, head_norms=True),  # Qwen3
)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def product_call(case: HeadsCase, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Arguments of ops.skinny_linear without ``append``."""
    generator = torch.Generator().manual_seed(case.num_tokens)

    def made(*shape: int) -> Tensor:
        return normal(generator, *shape).to(device=device, dtype=dtype)

    size = (case.num_q_heads + 2 * case.num_kv_heads) * case.head_dim
    return {
        "x": 3 * made(case.num_tokens, case.in_features),
        "weight": made(size, case.in_features) / case.in_features**0.5,
        "norm_weight": 1 + made(case.in_features) / 8 if case.normed else None,
        "bias": made(size) if case.bias else None,
        "eps": 1e-5,
    }


def append_to(case: HeadsCase, dtype: torch.dtype, device: torch.device) -> AppendKv:
    """Arguments of an append: caches of NaN, and one row of several without a slot."""
    generator = torch.Generator().manual_seed(7)
    num_pages = case.num_tokens // PAGE_SIZE + 2
    shape = (num_pages, PAGE_SIZE, case.num_kv_heads, case.head_dim)
    slots = torch.randperm(num_pages * PAGE_SIZE, generator=generator)[: case.num_tokens]
    slots[1:2] = -1
    positions = torch.randint(MAX_POSITION, (case.num_tokens,), generator=generator)
    angles = torch.rand(MAX_POSITION, case.rotary_dim // 2, generator=generator) * 100
    norms = [1 + normal(generator, case.head_dim) / 8 for _ in "qk"] if case.head_norms else []
    rotates = case.rotary_dim > 0
    return AppendKv(
        *(torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in "kv"),
        slots.to(device),
        positions.to(device) if rotates else None,
        torch.cat([angles.cos(), angles.sin()], -1).to(device) if rotates else None,
        *(norm.to(device=device, dtype=dtype) for norm in norms),
    )


def one_after_the_other(call: dict[str, Any], append: AppendKv) -> Tensor:
    """The product after both ops have run."""
    out = ops.skinny_linear(**call)
    num_kv_heads, head_dim = append.k_cache.shape[2:]
    heads = out.view(len(out), out.shape[1] // head_dim, head_dim)
    num_q_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = heads.split_with_sizes((num_q_heads, num_kv_heads, num_kv_heads), 1)
    ops.append_kv(q, k, v, **append._asdict(), eps=call["eps"])
    return out


def assert_same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def check(case: HeadsCase, call: dict[str, Any], append: AppendKv) -> None:
    caches = [cache.clone() for cache in append[:2]]
    want = one_after_the_other(call, append._replace(k_cache=caches[0], v_cache=caches[1]))
    assert_same(ops.skinny_linear(**call, append=append), want)
    for got, cache in zip(append[:2], caches, strict=True):
        assert_same(got, cache)
    if case.num_tokens > 2 and case.num_kv_heads > 0:
        assert append.k_cache.isfinite().any()


@pytest.mark.parametrize("weights", ["floats", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_as_one_after_the_other(
    case: HeadsCase, dtype: torch.dtype, weights: str, device: torch.device
) -> None:
    call = product_call(case, dtype, device)
    if weights == "int8":
        call["weight"], call["weight_scale"] = quantise_rows(call["weight"])
    check(case, call, append_to(case, dtype, device))


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    case = HeadsCase(20, 192, bias=True)
    call = product_call(case, torch.bfloat16, device)
    together = append_to(case, torch.bfloat16, device)
    out = ops.skinny_linear(**call, append=together)
    alone = append_to(case, torch.bfloat16, device)
    assert alone.positions is not None
    for row in range(case.num_tokens):
        rows = slice(row, row + 1)
        one = alone._replace(slot_mapping=alone.slot_mapping[rows], positions=alone.positions[rows])
        assert_same(ops.skinny_linear(**{**call, "x": call["x"][rows]}, append=one), out[rows])
    for got, cache in zip(alone[:2], together[:2], strict=True):
        assert_same(got, cache)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [CASES[2], HeadsCase(9, 64, 5, 1)], ids=str)
def test_caches_in_float8(case: HeadsCase, dtype: torch.dtype, device: torch.device) -> None:
    call, append = product_call(case, dtype, device), append_to(case, dtype, device)
    scales = torch.rand(2, case.num_kv_heads, device=device) + 0.5
    narrow = [append._replace(key_scales=scales[0], value_scales=scales[1]) for _ in range(2)]
    for i, each in enumerate(narrow):
        caches = [cache.to(torch.float8_e4m3fn) for cache in each[:2]]
        narrow[i] = each._replace(k_cache=caches[0], v_cache=caches[1])
    want = one_after_the_other(call, narrow[0])
    assert_same(ops.skinny_linear(**call, append=narrow[1]), want)
    for got, cache in zip(narrow[1][:2], narrow[0][:2], strict=True):
        assert_same(got.view(torch.uint8), cache.view(torch.uint8))
        assert (got.view(torch.uint8) != 0x7F).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_kernels(case: HeadsCase, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel where the product's blocks append; else append_kv's runs after the product's."""
    emulated.route(monkeypatch)
    cpu = torch.device("cpu")
    call, append = product_call(case, dtype, cpu), append_to(case, dtype, cpu)
    launched = emulated.kernels_of(lambda: ops.skinny_linear(**call, append=append))
    apart = ["skinny_linear_kernel", "append_kv_kernel"]
    of_rows = [name for name in launched if name != "rms_norm_kernel"]
    assert of_rows == (["skinny_append_kernel"] if case.is_one_kernel(dtype) else apart)


@pytest.mark.parametrize("num_kv_heads", [1, 5])
def test_heads_that_are_not_those_of_the_cache_are_refused(num_kv_heads: int) -> None:
    case, cpu = HeadsCase(3, head_dim=32, num_q_heads=3), torch.device("cpu")
    call = product_call(case, torch.float32, cpu)
    of_cache = replace(case, num_kv_heads=num_kv_heads, head_dim=64)
    with pytest.raises(RuntimeError, match=r"weight: expected out_features of some heads of head_"):
        ops.skinny_linear(**call, append=append_to(of_cache, torch.float32, cpu))
