"""A looped model whose cache keeps the keys and values of the last loop alone: beside an oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import devices
import eecore
import emulated
from devices import as_on_cuda
from eecore import (
    Auto,
    ConfidentExit,
    EngineConfig,
    ExitError,
    FixedExit,
    Full,
    ModelError,
    PromptLookup,
    SelfSpeculative,
)
from eecore.cli.app import run
from eecore.models import KVCache
from eecore.serving.settings import ServerSettings, service_of
from looped_models import (
    ENDS,
    LOOPS,
    PROMPTS,
    STACK,
    decode,
    looped_tensors,
    outputs,
    tokens,
    write_looped,
)
from tiny_models import write_byte_tokenizer, write_model

pytestmark = pytest.mark.usefixtures("one_thread")

LIMITS: dict[str, Any] = {"kv_cache_tokens": 512, "kv_loops": "last"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("kept")
    write_looped(place)
    return place


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return looped_tensors()


@pytest.fixture(scope="module")
def model(directory: Path) -> eecore.Model:
    return devices.load(directory, dtype="float32", engine=EngineConfig(**LIMITS))


def limited(model: eecore.Model, **limits: Any) -> eecore.Model:
    """The same model in an engine of other limits."""
    return eecore.Model(model.network, None, EngineConfig(**{**LIMITS, **limits}))


def test_the_cache_has_the_layers_of_one_loop(model: eecore.Model) -> None:
    config, dtype = model.config, torch.float32
    kv = model.engine().kv
    assert kv.k.shape[0] == kv.v.shape[0] == STACK
    each = KVCache.bytes_per_token(config, dtype)
    assert each == LOOPS * KVCache.bytes_per_token(config, dtype, "last")


def test_the_usual_cache_has_room_for_as_many_times_the_tokens(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eecore.generation.free_memory", lambda: 40_000_000)
    sizes = [
        eecore.load(directory, device="cpu", kv_loops=kept).engine_config.kv_cache_tokens
        for kept in ("each", "last")
    ]
    assert sizes[1] == pytest.approx(LOOPS * sizes[0], rel=0.01)


@pytest.mark.parametrize("chunk", [512, 3])
def test_full_depth(model: eecore.Model, tensors: dict[str, Tensor], chunk: int) -> None:
    chunked = limited(model, max_prefill_chunk=chunk, page_size=4)
    expected = [decode(tensors, prompt, 10, chunk=chunk)[0] for prompt in PROMPTS]
    assert tokens(chunked, Full()) == tokens(chunked, None) == expected
    found = outputs(chunked, Full())
    assert {out.stats.contract for out in found} == {
        "keys and values of the last loop alone, approximate; full: every layer"
    }
    assert not any(out.stats.is_lossless for out in found)


def test_it_is_an_approximation(model: eecore.Model, tensors: dict[str, Tensor]) -> None:
    assert tokens(model, Full()) != [decode(tensors, prompt, 10)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("threshold", [0.35, 0.6])
def test_the_gate_exits_each_row_by_itself(
    model: eecore.Model, tensors: dict[str, Tensor], threshold: float
) -> None:
    policy = ConfidentExit(threshold, "gate")
    together = outputs(model, policy)
    alone = [outputs(model, policy, prompts=[prompt])[0] for prompt in PROMPTS]
    for prompt, *found in zip(PROMPTS, together, alone, strict=True):
        wanted, loops, confidences = decode(tensors, prompt, 10, threshold=threshold, chunk=512)
        for out in found:
            assert out.token_ids == wanted
            assert out.exit_layers == [ENDS[loop - 1] for loop in loops]
            assert out.confidences[1:] == pytest.approx(confidences[1:], abs=1e-4)
            assert out.stats.layers_filled == 0
    assert len({layer for out in together for layer in out.exit_layers[1:]}) > 1


@pytest.mark.parametrize("loop", range(1, LOOPS))
def test_a_fixed_exit(model: eecore.Model, tensors: dict[str, Tensor], loop: int) -> None:
    expected = [decode(tensors, prompt, 10, last_loop=loop, chunk=512)[0] for prompt in PROMPTS]
    assert tokens(model, FixedExit(ENDS[loop - 1])) == expected


@pytest.mark.parametrize("policy", [Full(), ConfidentExit(0.5, "gate")], ids=["full", "gate"])
def test_chunks_do_not_depend_on_other_requests(model: eecore.Model, policy: eecore.Exit) -> None:
    """Neither where a prompt is cut nor what a request that is preempted gets."""
    limits = {"max_prefill_chunk": 5, "page_size": 4}
    alone = limited(model, **limits)
    wanted = [tokens(alone, policy, prompts=[prompt], max_tokens=16)[0] for prompt in PROMPTS]
    narrow = limited(model, **limits, max_batch_tokens=7)
    assert tokens(narrow, policy, max_tokens=16) == wanted
    tight = limited(model, **limits, kv_cache_tokens=32)
    found = outputs(tight, policy, max_tokens=16)
    assert sum(out.stats.preemptions for out in found) > 0
    assert [out.token_ids for out in found] == wanted


def test_prompts_share_no_pages(model: eecore.Model) -> None:
    engine = model.engine()
    assert engine.config.prefix_cache
    assert not engine.has_prefix_cache


@pytest.mark.parametrize("policy", [Full(), ConfidentExit(0.35, "gate")], ids=["full", "gate"])
def test_the_cuda_path_gives_the_tokens_of_the_cpu(
    directory: Path, policy: eecore.Exit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> eecore.Model:
        limits = EngineConfig(**LIMITS)
        return eecore.load(directory, device="cpu", dtype="float32", engine=limits)

    expected = outputs(load(), policy, max_tokens=4)
    emulated.route(monkeypatch)
    got = outputs(as_on_cuda(load()), policy, max_tokens=4)
    assert [out.token_ids for out in got] == [out.token_ids for out in expected]
    assert [out.exit_layers for out in got] == [out.exit_layers for out in expected]


@pytest.mark.parametrize("drafts", [SelfSpeculative(ENDS[0], 3), PromptLookup(), Auto()])
def test_policies_that_draft_are_refused(model: eecore.Model, drafts: eecore.Exit) -> None:
    with pytest.raises(ExitError, match="expected a policy that does not draft where kv_loops is"):
        outputs(model, drafts)


def test_models_without_loops_are_refused(tmp_path: Path) -> None:
    limits = EngineConfig(**LIMITS)
    with pytest.raises(ModelError, match="kv_loops: expected 'each' for a model without loops"):
        devices.load(write_model(tmp_path), engine=limits)
    with pytest.raises(eecore.RequestError, match="kv_loops: expected"):
        EngineConfig(kv_loops="first")  # type: ignore[arg-type]


def test_the_command_line_and_a_server_run_all_layers_by_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_looped(tmp_path, vocab_size=260, eos_token_id=257)
    write_byte_tokenizer(tmp_path)
    words = ["generate", str(tmp_path), "ab=", "--raw", "--kv-loops", "last", "--json"]
    assert run([*words, "--max-tokens", "2", "--device", "cpu", "--threads", "1"]) == 0
    said = json.loads(capsys.readouterr().out)
    contract = "keys and values of the last loop alone, approximate; full: every layer"
    assert said["stats"]["contract"] == contract
    loaded = eecore.load(tmp_path, device="cpu", kv_cache_tokens=512, kv_loops="last")
    depths = service_of(loaded, ServerSettings()).served.depths
    assert (depths.default, depths.aliases) == ("full", ("full",))
