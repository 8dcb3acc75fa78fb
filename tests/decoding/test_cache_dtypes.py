"""The dtype of a KV cache: its default, what it holds, and the path of CUDA in float8.

``test_alone`` decodes with caches in bfloat16 and float8 in every mode.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import eecore
import emulated
from devices import as_on_cuda, cpu_only, heads_in_floats, load
from eecore import ConfidentExit, ExitError, Full, HeadDrafts
from eecore.errors import ModelError, RequestError
from eecore.exits import Exit
from eecore.models import KVCache, cache_dtype
from head_packs import write_pack
from tiny_models import random_prompts
from tiny_t5 import write_t5

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[7, 8, 9] * 5, *random_prompts(1, 23, 9, 40, seed=4), [3, 4, 5, 6, 3, 4]]


def tokens_of(
    model: eecore.Model, exit: Exit, prompts: list[list[int]] = PROMPTS, max_tokens: int = 24
) -> list[list[int]]:
    asked: dict[str, Any] = {"exit": exit, "max_tokens": max_tokens, "ignore_eos": True}
    return [output.token_ids for output in eecore.generate(model, prompts, **asked)]


@cpu_only
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float32", "weights": "int8"}, torch.bfloat16),
        ({"dtype": "float32", "weights": "int4"}, torch.bfloat16),
        ({"dtype": "float32", "weights": "int8", "kv_cache_dtype": "float32"}, torch.float32),
        ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, torch.float8_e4m3fn),
    ],
)
def test_what_a_cache_holds(
    tiny_directory: Path, options: dict[str, Any], expected: torch.dtype
) -> None:
    model = load(tiny_directory, kv_cache_tokens=64, **options)
    assert cache_dtype(model.network, model.engine_config.kv_cache_dtype) == expected
    assert model.shared_engine().engine.kv.k.dtype == expected


def test_on_cuda_a_cache_has_the_states_dtype(tiny_directory: Path) -> None:
    model = as_on_cuda(load(tiny_directory, dtype="float32", weights="int4", kv_cache_tokens=64))
    assert cache_dtype(model.network, "auto") == torch.float32
    with pytest.raises(ModelError, match="expected auto, fp8 or the dtype of states, float32"):
        cache_dtype(model.network, "bfloat16")


@cpu_only
@pytest.mark.parametrize(("dtype", "same"), [("bfloat16", 8), ("fp8", 4)])
def test_outputs_are_close_to_those_of_floats(
    agreeing_directory: Path, dtype: str, same: int
) -> None:
    """Rounding changes some tokens, but mostly not the first ones."""
    expected, got = (
        tokens_of(
            load(agreeing_directory, dtype="float32", kv_cache_tokens=2048, kv_cache_dtype=each),
            Full(),
        )
        for each in ("float32", dtype)
    )
    assert sum(a[:same] == b[:same] for a, b in zip(expected, got, strict=True)) > len(PROMPTS) - 3


def test_the_path_of_cuda(
    agreeing_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = eecore.load(agreeing_directory, device="cpu")
    pack = write_pack(tmp_path, plain, taps=(2,), vocabulary_size=300)
    emulated.route(monkeypatch)
    heads_in_floats(monkeypatch)
    settings: dict[str, Any] = {"kv_cache_tokens": 512, "kv_cache_dtype": "fp8", "exits": pack}
    model = as_on_cuda(eecore.load(agreeing_directory, device="cpu", **settings))
    prompts = PROMPTS[:3]  # more rows than the skinny products take
    expected = tokens_of(model, Full(), prompts, max_tokens=5)
    assert tokens_of(model, HeadDrafts(3, 0.0), prompts, max_tokens=5) == expected


def test_a_byte_of_cache_holds_more_tokens(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny_directory, dtype="float32", kv_cache_tokens=100)
    sizes = [
        KVCache.bytes_per_token(model.config, dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
    ]
    assert sizes[0] == 2 * sizes[1] == 4 * sizes[2]
    monkeypatch.setattr("eecore.generation.free_memory", lambda: 1 << 24)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 24, 1 << 25))
    plain, narrow = (
        load(tiny_directory, dtype="float32", kv_cache_dtype=dtype).engine_config.kv_cache_tokens
        for dtype in ("float32", "fp8")
    )
    assert narrow // 4 == plain


def test_dtypes_that_cannot_be(tiny_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"kv_cache_dtype: expected auto, .* or fp8, got 'int8'"):
        load(tiny_directory, kv_cache_dtype="int8")
    with pytest.raises(ModelError, match="expected auto, fp8 or the dtype of states, bfloat16, on"):
        load(tiny_directory, dtype="bfloat16", kv_cache_dtype="float32")
    with pytest.raises(ModelError, match="kv_cache_dtype: expected auto for T5"):
        load(write_t5(tmp_path), kv_cache_dtype="fp8")


def test_a_guarantee_is_for_the_cache_that_it_was_made_with(tiny_directory: Path) -> None:
    policy = ConfidentExit(0.5)
    object.__setattr__(policy, "calibration", object())
    narrow = load(tiny_directory, kv_cache_tokens=256, kv_cache_dtype="fp8")
    with pytest.raises(ExitError, match=r"calibration: expected a KV cache in .* got fp8"):
        eecore.generate(narrow, PROMPTS[0], exit=policy, max_tokens=2)
