"""The proposer for vLLM: its settings and refusals, and a real vLLM's tokens.

vLLM lives in an environment of its own: that of ``python -m bench peers``, or of the interpreter
that EECORE_VLLM_PYTHON names. The tests that need it are skipped where there is none.
"""

from __future__ import annotations

import logging
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import eecore
from bench.harness.processes import EngineError
from bench.integrations import vllm as bench_vllm
from eecore import ModelError, RequestError
from eecore.integrations import vllm as plugin
from eecore.integrations.vllm import LayerSkipProposer, LayerSkipSettings
from tiny_models import random_prompts, write_model

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 300


def config(model: Path | str, **changes: Any) -> Any:
    """The fields of vLLM's config that the proposer reads."""
    settings = {
        "exit_layer": 2,
        "num_drafts": 3,
        "device": "cpu",
        "pages": None,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        **changes,
    }
    return SimpleNamespace(
        additional_config={"eecore": {"exit_layer": settings["exit_layer"]}},
        speculative_config=SimpleNamespace(num_speculative_tokens=settings["num_drafts"]),
        device_config=SimpleNamespace(device=settings["device"]),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=settings["tensor_parallel_size"],
            pipeline_parallel_size=settings["pipeline_parallel_size"],
        ),
        model_config=SimpleNamespace(model=str(model), revision=None, max_model_len=64),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        cache_config=SimpleNamespace(num_gpu_blocks=settings["pages"], block_size=32),
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("vllm"), eos_token_id=None)


def rows(*prompts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and tokens as vLLM keeps them, with old tokens after each end."""
    tokens = np.full((4, 64), 999, np.int32)
    for row, prompt in zip(tokens, prompts, strict=False):
        row[: len(prompt)] = prompt
    return np.array([*map(len, prompts), *[0] * (4 - len(prompts))], np.int32), tokens


@pytest.mark.parametrize(("pages", "room"), [(None, 4 * (64 + 16)), (5, 5 * 32)])
def test_room_is_as_much_as_vllm_has(directory: Path, pages: int | None, room: int) -> None:
    proposer = LayerSkipProposer(config(directory, pages=pages))
    proposer.load_model(None)
    proposer.propose([[]], *rows([1]))
    assert proposer._drafter is not None
    assert proposer._drafter._kv.num_pages == room // 16


def test_drafts_of_a_batch(directory: Path) -> None:
    proposer = LayerSkipProposer(config(directory))
    proposer.load_model(None)
    prompts = random_prompts(9, 4, 20, seed=1)
    lengths, tokens = rows(*prompts)
    whole = eecore.load(directory, device="cpu", kv_cache_tokens=512)
    outputs = eecore.generate(whole, prompts, exit=eecore.FixedExit(2), max_tokens=3)
    expected = [output.token_ids for output in outputs]
    # The prompt of the second is not through yet.
    assert proposer.propose([[1], [], [2, 3]], lengths, tokens) == [expected[0], [], expected[2]]
    assert proposer.propose([[1], [4], [5]], lengths, tokens, slot_mappings=None) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, r"expected an exit_layer, as in \{'eecore': \{'exit_layer': 3\}\}, got None"),
        ({}, "expected an exit_layer.* got None"),
        ({"eecore": {"layers": 3}}, r"expected an exit_layer.* got \{'layers': 3\}"),
        ({"eecore": {"exit_layer": 3, "deep": 1}}, "expected exit_layer, draft_.* got 'deep'"),
        ({"eecore": {"exit_layer": 0}}, r"\['eecore'\]\.exit_layer: expected a whole number, 1"),
        ({"eecore": {"exit_layer": 1, "draft_threshold": 2}}, "draft_threshold: expected None or"),
        ({"eecore": {"exit_layer": 1, "kv_cache_tokens": 0}}, "kv_cache_tokens: expected None or"),
    ],
)
def test_settings_that_cannot_be_used(given: Any, expected: str) -> None:
    with pytest.raises(RequestError, match=expected):
        LayerSkipSettings.of(given)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"device": "cuda:0"}, "device: expected cpu for drafts by eecore, got cuda:0"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: expected 1"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: expected 1"),
    ],
)
def test_where_it_does_not_run(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(RequestError, match=expected):
        LayerSkipProposer(config("model", **changes))


def test_a_model_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The model's files are those that vLLM fetched; eecore fetches none."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    named = SimpleNamespace(model="owner/name", revision=None)
    with pytest.raises(ModelError, match="owner/name: expected a model directory, got none"):
        plugin.model_directory(named)
    revision = "0" * 40
    where = tmp_path / "models--owner--name" / "snapshots" / revision
    where.mkdir(parents=True)
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text(revision)
    assert plugin.model_directory(named) == where


@pytest.mark.parametrize(("found", "warns"), [("0.32.4", False), ("0.31.0", True), ("1.0", True)])
def test_another_version_is_said(
    found: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "version", lambda _: found)
    with caplog.at_level(logging.WARNING):
        plugin.warn_if_untested()
    assert (
        f"expected vLLM 0.32, whose proposers it was tested with, got {found}" in caplog.text
    ) == warns


# A real one


Starts = Callable[[dict[str, Any]], bench_vllm.Engine]


@pytest.fixture(scope="module")
def start() -> Iterator[Starts]:
    """Starts vLLM on the model that ships, with pages so few that requests are preempted."""
    python = bench_vllm.interpreter()
    if not python.is_file():
        pytest.skip(f"no vLLM: expected an interpreter at {python} or in EECORE_VLLM_PYTHON")
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'python')!r}); import eecore.ops, vllm"
    tried = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"{python} cannot import vllm and eecore: {tried.stderr.splitlines()[-1]}")
    engines = []

    def started(settings: dict[str, Any]) -> bench_vllm.Engine:
        usual = {
            "model": str(eecore.default_model()),
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_batched_tokens": 24,
            "num_gpu_blocks_override": 10,
            "block_size": 32,
            "enforce_eager": True,
        }
        engines.append(bench_vllm.Engine({**usual, **settings}))
        return engines[-1]

    yield started
    for engine in engines:
        engine.process.close()


@pytest.mark.long
def test_greedy_tokens_are_those_of_vllm_alone(start: Starts) -> None:
    """Prompts are chunked, answers outgrow the cache, and prompts arrive as others end."""
    said = random.Random(0)
    sentences = ["turn the kitchen lights down", "what is the temperature", "open the garage door"]
    tokenizer = eecore.load(kv_cache_tokens=256).tokenizer
    assert tokenizer is not None
    prompts = [
        tokenizer.encode(" and ".join(said.choices(sentences, k=said.randint(1, 6))))
        for _ in range(24)
    ]
    plain = start({})
    drafting = start(bench_vllm.drafting(3, 6, draft_threshold=0.2))
    assert drafting.process.answer(START_TIMEOUT_S) == plain.process.answer(START_TIMEOUT_S)
    expected = plain.generate(prompts, 90)[1]
    assert drafting.generate(prompts, 90)[1] == expected
    assert drafting.generate(prompts[::-1], 90)[1] == expected[::-1]


@pytest.mark.long
def test_a_missing_exit_layer_ends_vllm_with_a_sentence(start: Starts) -> None:
    engine = start({**bench_vllm.drafting(3, 6), "additional_config": {}})
    with pytest.raises(EngineError):
        engine.process.answer(START_TIMEOUT_S)
    engine.process.log.seek(0)
    assert "additional_config['eecore']: expected an exit_layer" in engine.process.log.read()
