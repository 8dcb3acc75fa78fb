"""share_kv: keys and values of skipped loops, copied from another loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import emulated
import reference
from cases import BATCH_SIZES, DTYPES
from eecore import ops
from random_calls import Arguments, Checked, Maker, compare

LAYERS, LOOP = 6, 2


def random_call(
    num_tokens: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    *,
    from_last: bool = False,
) -> dict[str, Any]:
    """Arguments of a call: rows that exit after any layer; some have no slot."""
    generator = torch.Generator().manual_seed(num_tokens)
    slots = torch.randperm(4 * num_tokens + 4, generator=generator)[:num_tokens]
    slots[torch.rand(num_tokens, generator=generator) < 0.2] = -1
    exits = torch.randint(0, LAYERS + 1, (num_tokens,), generator=generator, dtype=torch.int32)
    shape = LAYERS, num_tokens + 1, 4, 3, 24
    k_cache, v_cache = (torch.randn(shape, generator=generator).to(dtype) for _ in "kv")
    call = {"exit_layer": exits, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slots}
    moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in call.items()}
    return {**moved, "loop_layers": LOOP, "from_last": from_last}


def shared(share: Any, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    k_cache, v_cache = call["k_cache"].clone(), call["v_cache"].clone()
    share(**{**call, "k_cache": k_cache, "v_cache": v_cache})
    return k_cache, v_cache


@pytest.mark.parametrize("from_last", [False, True])
@pytest.mark.parametrize("num_tokens", BATCH_SIZES)
def test_matches_the_reference(num_tokens: int, from_last: bool, device: torch.device) -> None:
    call = random_call(num_tokens, device=device, from_last=from_last)
    expected = shared(reference.share_kv, call)
    assert all(map(torch.equal, shared(ops.share_kv, call), expected))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
def test_any_cache_is_copied_bit_for_bit(dtype: torch.dtype, device: torch.device) -> None:
    if dtype != torch.float8_e4m3fn and not emulated.supports(device, dtype):
        pytest.skip("float16 is for CUDA")
    call = random_call(5, dtype, device)
    expected = shared(reference.share_kv, call)
    for got, wanted in zip(shared(ops.share_kv, call), expected, strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


def test_copies_of_the_last_loop_that_ran_and_of_the_last(device: torch.device) -> None:
    cache = torch.arange(LAYERS, device=device).float()[:, None, None, None, None]
    call = {
        "exit_layer": torch.tensor([LOOP], dtype=torch.int32, device=device),
        "k_cache": cache.expand(-1, 1, 1, 1, 8).clone(),
        "v_cache": cache.expand(-1, 1, 1, 1, 8).clone(),
        "slot_mapping": torch.tensor([0], device=device),
        "loop_layers": LOOP,
    }
    for from_last, wanted in ((False, [0, 1, 0, 1, 0, 1]), (True, [0, 1, 4, 5, 4, 5])):
        for got in shared(ops.share_kv, {**call, "from_last": from_last}):
            assert got[:, 0, 0, 0].tolist() == [[float(each)] * 8 for each in wanted]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loop_layers": 4}, "loop_layers: expected a divisor of num_layers=6, got 4"),
        ({"loop_layers": 0}, "loop_layers: expected a divisor of num_layers=6, got 0"),
        (
            {"exit_layer": torch.tensor([7, 0], dtype=torch.int32)},
            r"exit_layer: expected values in \[0, 7\), got 7 at row 0",
        ),
        (
            {"slot_mapping": torch.tensor([0, 12])},
            r"slot_mapping: expected values in \[-1, 12\), got 12 at row 1",
        ),
        ({"slot_mapping": torch.tensor([0])}, r"slot_mapping: expected int64 \[num_tokens=2\]"),
        ({"v_cache": torch.zeros(6, 3, 4, 3, 23)}, r"v_cache: expected .*head_dim=24\], got"),
        (
            {"v_cache": torch.zeros(6, 3, 4, 3, 24).to(torch.float8_e4m3fn)},
            "v_cache: expected the dtype of k_cache, float32, got float8_e4m3fn",
        ),
        (
            {n: torch.zeros(6, 3, 4, 3, 5).to(torch.float8_e4m3fn) for n in ("k_cache", "v_cache")},
            "k_cache: expected heads of an even number of bytes, got 5",
        ),
    ],
)
def test_bad_input_is_named_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    call = {**random_call(2), **change}
    kept = {name: call[name].clone() for name in ("k_cache", "v_cache")}
    with pytest.raises(RuntimeError, match=f"share_kv: {message}"):
        ops.share_kv(**call)
    assert all(torch.equal(call[n].view(torch.uint8), kept[n].view(torch.uint8)) for n in kept)


def test_opcheck(device: torch.device) -> None:
    call = random_call(3, device=device)
    torch.library.opcheck(torch.ops.eecore.share_kv.default, (), call)


def fuzzed_call(m: Maker) -> Checked:
    loop, heads, width = m.size(3, 1), m.size(3), m.size(20, 1)
    layers = loop * m.size(3, 1)
    kept = m.one_of(torch.float32, torch.bfloat16, torch.float8_e4m3fn)
    width += width % 2
    k_cache, v_cache = m.caches(layers, m.size(5, 1), m.size(9, 1), heads, width, dtype=kept)
    tokens = min(m.size(20), k_cache.shape[1] * k_cache.shape[2])
    given = {
        "exit_layer": m.placed(m.whole(layers + 1, tokens).int()),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slot_mapping": m.slots(tokens, k_cache),
        "loop_layers": loop,
        "from_last": m.chance(),
    }

    def oracle(before: Arguments) -> dict[str, Tensor]:
        reference.share_kv(**before)
        return {name: before[name] for name in ("k_cache", "v_cache")}

    return given, compare(oracle)
