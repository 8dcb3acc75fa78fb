"""A KV cache in bfloat16 for a model in float32: when it is the default; modes agree with Full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import eecore
from devices import as_on_cuda, cpu_only, load
from eecore import (
    Auto,
    ConfidentExit,
    DraftAndVerify,
    Full,
    HeadDrafts,
    ModelError,
    PromptLookup,
    SelfSpeculative,
)
from eecore.cli.app import run
from eecore.exits import Exit
from eecore.models import cache_dtype
from head_packs import write_pack
from tiny_models import random_prompts, write_model
from tiny_t5 import write_t5

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[7, 8, 9] * 5, *random_prompts(1, 23, 9, 40, seed=4), [3, 4, 5, 6, 3, 4]]
LOSSLESS: dict[str, Exit] = {
    "speculative": SelfSpeculative(2, 4),
    "draft-and-verify": DraftAndVerify({3}, {2, 4}),
    "lookup": PromptLookup(3, min_ngram=1),
    "head": HeadDrafts(3, 0.0),
    "auto": Auto(),
}


@pytest.fixture(scope="module", params=["float32", "int8", "int4"])
def narrow(
    request: pytest.FixtureRequest,
    agreeing_directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> eecore.Model:
    weights = None if request.param == "float32" else request.param
    pack = write_pack(
        tmp_path_factory.mktemp("pack"),
        eecore.load(agreeing_directory, device="cpu"),
        taps=(2,),
        vocabulary_size=300,
    )
    asked: dict[str, Any] = {"kv_cache_dtype": "bfloat16"} if weights is None else {}
    return load(
        agreeing_directory,
        dtype="float32",
        weights=weights,
        kv_cache_tokens=2048,
        exits=pack,
        **asked,
    )


def tokens_of(model: eecore.Model, exit: Exit, **settings: Any) -> list[list[int]]:
    settings = {"max_tokens": 24, "ignore_eos": True, **settings}
    return [o.token_ids for o in eecore.generate(model, PROMPTS, exit=exit, **settings)]


@cpu_only
@pytest.mark.parametrize("policy", LOSSLESS.values(), ids=LOSSLESS.keys())
def test_lossless_modes_keep_the_output_of_full(narrow: eecore.Model, policy: Exit) -> None:
    expected = tokens_of(narrow, Full())
    assert narrow.shared_engine().engine.kv.k.dtype == torch.bfloat16
    assert tokens_of(narrow, policy) == expected


@cpu_only
def test_exits_fill_it(narrow: eecore.Model) -> None:
    outputs = eecore.generate(narrow, PROMPTS, exit=ConfidentExit(0.3), max_tokens=16)
    assert all(output.error is None for output in outputs)


@cpu_only
def test_a_request_gives_the_same_alone(narrow: eecore.Model) -> None:
    together = tokens_of(narrow, Full())
    alone = [
        eecore.generate(narrow, prompt, exit=Full(), max_tokens=24, ignore_eos=True)[0].token_ids
        for prompt in PROMPTS
    ]
    assert alone == together


@cpu_only
def test_outputs_are_close_to_those_of_floats(agreeing_directory: Path) -> None:
    kept = [
        load(agreeing_directory, dtype="float32", kv_cache_tokens=2048, kv_cache_dtype=dtype)
        for dtype in ("float32", "bfloat16")
    ]
    expected, got = (tokens_of(model, Full()) for model in kept)
    assert sum(a[:8] == b[:8] for a, b in zip(expected, got, strict=True)) >= len(PROMPTS) - 1


@cpu_only
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float32", "weights": "int8"}, torch.bfloat16),
        ({"dtype": "float32", "weights": "int4"}, torch.bfloat16),
        ({"dtype": "float32", "weights": "int8", "kv_cache_dtype": "float32"}, torch.float32),
        ({"dtype": "bfloat16", "weights": "int8"}, torch.bfloat16),
        ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}, torch.bfloat16),
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


def test_unsuitable_dtypes_are_refused(tiny_directory: Path, tmp_path: Path) -> None:
    message = "kv_cache_dtype: expected auto, fp8 or the dtype of states, bfloat16, on (cpu|cuda)"
    with pytest.raises(ModelError, match=message):
        load(tiny_directory, dtype="bfloat16", kv_cache_dtype="float32")
    t5 = write_t5(tmp_path)
    with pytest.raises(ModelError, match="kv_cache_dtype: expected auto for T5"):
        load(t5, kv_cache_dtype="bfloat16")
    quantised = load(t5, dtype="float32", weights="int8", kv_cache_tokens=64)
    assert cache_dtype(quantised.network, "auto") == torch.float32


@cpu_only
def test_the_automatic_size_follows_the_dtype(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eecore.generation.free_memory", lambda: 1 << 22)
    plain = load(tiny_directory, dtype="float32").engine_config.kv_cache_tokens
    narrow = load(tiny_directory, dtype="float32", weights="int4").engine_config
    assert narrow.kv_cache_tokens == 2 * plain


def test_the_command_line_takes_it(
    agreeing_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", str(agreeing_directory), "hello", "--max-tokens", "4", "--device", "cpu"]
    assert run([*command, "--dtype", "float32", "--kv-cache-dtype", "bfloat16"]) == 0
    assert run([*command, "--dtype", "bfloat16", "--kv-cache-dtype", "float32"]) == 3
    assert "or the dtype of states, bfloat16, on cpu, got float32" in capsys.readouterr().err


def test_other_families(tmp_path: Path) -> None:
    for family in ("qwen3", "qwen2_windows"):
        directory = write_model(tmp_path / family, family)
        model = load(directory, dtype="float32", weights="int8", kv_cache_tokens=1024)
        assert tokens_of(model, SelfSpeculative(2, 4)) == tokens_of(model, Full())
