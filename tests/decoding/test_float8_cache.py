"""A KV cache in float8: every mode decodes with it, and lossless ones keep the output of Full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import eecore
import emulated
from devices import as_on_cuda, check_tokens, heads_in_floats, load
from eecore import (
    Auto,
    ConfidentExit,
    DraftAndVerify,
    EngineConfig,
    ExitError,
    FixedExit,
    Full,
    HeadDrafts,
    ModelError,
    PromptLookup,
    RequestError,
    SelfSpeculative,
)
from eecore.cli.app import run
from eecore.exits import Exit
from eecore.models import KVCache
from head_packs import write_pack
from tiny_models import random_prompts, write_model
from tiny_t5 import write_t5

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[7, 8, 9] * 5, *random_prompts(1, 23, 9, 40, seed=4), [3, 4, 5, 6, 3, 4]]
LOSSLESS: dict[str, Exit] = {
    "speculative": SelfSpeculative(2, 4),
    "speculative-deep": SelfSpeculative(4, 6),
    "draft-and-verify": DraftAndVerify({3}, {2, 4}),
    "lookup": PromptLookup(3, min_ngram=1),
    "head": HeadDrafts(3, 0.0),
    "auto": Auto(),
}
OTHERS: dict[str, Exit] = {
    "fixed": FixedExit(3),
    "softmax-each": ConfidentExit(0.3),
    "softmax-all": ConfidentExit(0.3, batch="all"),
    "state": ConfidentExit(0.8, measure="state"),
}

# A row that rounds otherwise has keys and values in the next eighth, and other bits of bfloat16.
MARGIN = 0.3


@pytest.fixture(scope="module")
def pack(agreeing_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = eecore.load(agreeing_directory, device="cpu")
    return write_pack(tmp_path_factory.mktemp("pack"), model, taps=(2,), vocabulary_size=300)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def narrow(request: pytest.FixtureRequest, agreeing_directory: Path, pack: Path) -> eecore.Model:
    return load(
        agreeing_directory,
        dtype=request.param,
        kv_cache_tokens=2048,
        kv_cache_dtype="fp8",
        exits=pack,
    )


def tokens_of(
    model: eecore.Model, exit: Exit, prompts: list[list[int]] = PROMPTS, **settings: Any
) -> list[list[int]]:
    settings = {"max_tokens": 24, "ignore_eos": True, **settings}
    return [o.token_ids for o in eecore.generate(model, prompts, exit=exit, **settings)]


@pytest.mark.parametrize("policy", LOSSLESS.values(), ids=LOSSLESS.keys())
def test_lossless_modes_keep_the_output_of_full(narrow: eecore.Model, policy: Exit) -> None:
    expected = tokens_of(narrow, Full())
    assert narrow.shared_engine().engine.kv.k.dtype == torch.float8_e4m3fn
    check_tokens(narrow, PROMPTS, tokens_of(narrow, policy), expected, MARGIN)


@pytest.mark.parametrize("policy", OTHERS.values(), ids=OTHERS.keys())
def test_other_modes_answer(narrow: eecore.Model, policy: Exit) -> None:
    outputs = eecore.generate(narrow, PROMPTS, exit=policy, max_tokens=24, ignore_eos=True)
    assert [len(output.token_ids) for output in outputs] == [24] * len(PROMPTS)
    assert all(output.error is None for output in outputs)


def test_a_request_gives_the_same_alone(narrow: eecore.Model) -> None:
    together = tokens_of(narrow, Full())
    alone = [
        eecore.generate(narrow, prompt, exit=Full(), max_tokens=24, ignore_eos=True)[0].token_ids
        for prompt in PROMPTS
    ]
    check_tokens(narrow, PROMPTS, alone, together, MARGIN)


def test_few_pages_and_small_chunks_change_nothing(narrow: eecore.Model) -> None:
    """Preempted requests compute their prompts again."""
    limits = EngineConfig(kv_cache_tokens=96, max_prefill_chunk=7, kv_cache_dtype="fp8")
    small = eecore.Model(narrow.network, narrow.tokenizer, limits)
    expected = tokens_of(narrow, Full())
    check_tokens(narrow, PROMPTS, tokens_of(small, Full()), expected, MARGIN)


def test_outputs_are_close_to_those_of_floats(agreeing: eecore.Model, narrow: eecore.Model) -> None:
    """Rounding changes some tokens, but mostly not the first ones."""
    expected, got = tokens_of(agreeing, Full()), tokens_of(narrow, Full())
    same = sum(a[:4] == b[:4] for a, b in zip(expected, got, strict=True))
    assert same >= len(PROMPTS) - 2


def test_the_path_of_cuda(
    agreeing_directory: Path, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated.route(monkeypatch)
    heads_in_floats(monkeypatch)
    settings: dict[str, Any] = {"kv_cache_tokens": 512, "kv_cache_dtype": "fp8", "exits": pack}
    model = as_on_cuda(eecore.load(agreeing_directory, device="cpu", **settings))
    prompts = PROMPTS[:3]  # more rows than the skinny products take
    expected = tokens_of(model, Full(), prompts, max_tokens=5)
    for policy in (SelfSpeculative(2, 3), HeadDrafts(3, 0.0)):
        assert tokens_of(model, policy, prompts, max_tokens=5) == expected
    outputs = eecore.generate(model, prompts, exit=ConfidentExit(0.3), max_tokens=5)
    assert all(output.error is None for output in outputs)


def test_a_byte_of_cache_holds_more_tokens(tiny_directory: Path) -> None:
    model = load(tiny_directory, dtype="float32", kv_cache_tokens=100)
    sizes = [
        KVCache.bytes_per_token(model.config, dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
    ]
    assert sizes[0] == 2 * sizes[1] == 4 * sizes[2]


def test_the_automatic_size_follows_the_dtype(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eecore.generation.free_memory", lambda: 1 << 24)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 24, 1 << 25))
    plain = load(tiny_directory, dtype="float32").engine_config.kv_cache_tokens
    narrow = load(tiny_directory, dtype="float32", kv_cache_dtype="fp8").engine_config
    assert narrow.kv_cache_tokens // 4 == plain
    assert narrow.kv_cache_dtype == "fp8"


def test_unknown_and_unsuitable_dtypes_are_refused(tiny_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"kv_cache_dtype: expected auto, .* or fp8, got 'int8'"):
        load(tiny_directory, kv_cache_dtype="int8")
    with pytest.raises(ModelError, match="kv_cache_dtype: expected auto for T5"):
        load(write_t5(tmp_path), kv_cache_dtype="fp8")


def test_a_guarantee_is_for_the_cache_that_it_was_made_with(
    narrow: eecore.Model,
) -> None:
    policy = ConfidentExit(0.5)
    object.__setattr__(policy, "calibration", object())
    with pytest.raises(ExitError, match=r"calibration: expected a KV cache in .* got fp8"):
        eecore.generate(narrow, PROMPTS[0], exit=policy, max_tokens=2)


def test_the_command_line_takes_it(
    agreeing_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", str(agreeing_directory), "hello", "--max-tokens", "4"]
    assert run([*command, "--kv-cache-dtype", "fp8", "--device", "cpu"]) == 0
    assert run([*command, "--kv-cache-dtype", "fp4", "--device", "cpu"]) == 4
    assert (
        "kv_cache_dtype: expected auto, float32, bfloat16 or fp8, got 'fp4'"
        in capsys.readouterr().err
    )


def test_other_families(tmp_path: Path) -> None:
    for family in ("qwen3", "qwen2_windows"):
        directory = write_model(tmp_path / family, family)
        model = load(directory, kv_cache_tokens=1024, kv_cache_dtype="fp8")
        assert tokens_of(model, SelfSpeculative(2, 4)) == tokens_of(model, Full())
