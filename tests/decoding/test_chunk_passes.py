"""Chunks of prompts as programs of rounded sizes: padding changes nothing, replays are cheap."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import eecore
import emulated
from bench.gpu.decode import model_config
from devices import as_on_cuda, engine_of
from eecore import Engine, EngineConfig, Full, SamplingParams
from eecore.decoding import chunk_pass
from eecore.decoding.capture import (
    CallByCall,
    Capture,
    RunProgram,
    _Capturing,
)
from eecore.decoding.chunk_pass import ChunkPass, ChunkRows, chunk_kind, rounded_tokens
from eecore.decoding.control import Always, Program
from eecore.exits import Exit
from emulated_graphs import EmulatedGraphs, new_stream
from tiny_models import random_prompts, write_model

pytestmark = pytest.mark.usefixtures("one_thread")

UNUSED = 7.0
"""The content of slots to which nothing is written."""


class Exact(CallByCall):
    """Runs chunks without padding."""


def engine_with(model: eecore.Model, run: RunProgram, **settings: Any) -> Engine:
    """An engine whose cache has a known content."""
    engine = engine_of(model, EngineConfig(kv_cache_tokens=512, **settings), run=run)
    for cache in (engine.kv.k, engine.kv.v):
        cache.fill_(UNUSED)
    return engine


def answers(
    engine: Engine, prompts: list[list[int]], policy: Exit | None = None, max_tokens: int = 1
) -> list[tuple[list[int], list[float] | None]]:
    """The tokens after the prompts of one batch, and their log-probabilities."""
    sampling = SamplingParams(max_tokens=max_tokens, logprobs=0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(prompt, exit=policy or Full(), sampling=sampling, request_id=str(i))
    done = {step.request_id: step.output for step in engine.run() if step.output is not None}
    outputs = [done[str(i)] for i in range(len(prompts))]
    return [(output.token_ids, output.logprobs) for output in outputs if output is not None]


def same_cache(one: Engine, other: Engine) -> bool:
    """Whether two engines have written the same to the same slots."""
    return torch.equal(one.kv.k, other.kv.k) and torch.equal(one.kv.v, other.kv.v)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedGraphs]:
    emulated.route(monkeypatch)
    with new_stream() as stream:
        made = EmulatedGraphs(stream)
        yield made
        made._captures.clear()  # before their stream


# Sizes


def test_sizes_are_few_and_padding_is_bounded() -> None:
    sizes = [rounded_tokens(count) for count in range(1, chunk_pass.MAX_TOKENS + 1)]
    assert sizes == sorted(sizes)
    assert all(size >= count for count, size in enumerate(sizes, start=1))
    assert [rounded_tokens(size) for size in dict.fromkeys(sizes)] == list(dict.fromkeys(sizes))
    assert len(set(sizes)) == 18
    assert max(size / count for count, size in enumerate(sizes[256:], start=257)) < 1.25


def rows_of(*chunks: tuple[int, int]) -> ChunkRows:
    """The rows of chunks, each with its tokens and keys."""
    counts = np.array([tokens for tokens, _ in chunks])
    lens = np.array([keys for _, keys in chunks], dtype=np.int32)
    positions = np.concatenate([np.arange(keys - tokens, keys) for tokens, keys in chunks])
    pages = np.zeros((len(chunks), -(-max(lens) // 16)), dtype=np.int32)
    starts = np.concatenate(([0], counts.cumsum())).astype(np.int32)
    return ChunkRows(positions, positions, pages, lens, starts, None)


@pytest.mark.parametrize(
    ("model", "chunks", "size"),
    [
        ("135m", [(2048, 2048)], (2048, 8, 128)),
        ("135m", [(2049, 2049)], None),  # more tokens than the largest program has
        ("135m", [(512, 8192)], (512, 8, 512)),
        ("1b", [(500, 2500)], (512, 8, 512)),
        ("1b", [(512, 16384)], None),  # attention by torch's kernels pays
        ("1b", [(9, 9)] * 9, (128, 32, 8)),
        ("8b", [(256, 256)], (256, 8, 32)),
        ("8b", [(512, 512)], None),  # the GPU is the limit
    ],
)
def test_passes_that_the_host_limits_have_programs(
    model: str, chunks: list[tuple[int, int]], size: tuple[int, int, int] | None
) -> None:
    config = model_config(model)
    kind = chunk_kind(config, rows_of(*chunks), config.num_layers, ())
    assert (None if kind is None else (kind.num_tokens, kind.num_seqs, kind.num_pages)) == size


# Results


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("two"), "mistral", num_hidden_layers=2)


def test_a_captured_chunk_is_replayed_for_any_chunk_of_its_size(
    two_layers: Path, graphs: EmulatedGraphs
) -> None:
    """Chunks of one request and of several, at the begin of prompts and after other chunks."""
    model = as_on_cuda(eecore.load(two_layers, device="cpu", kv_cache_tokens=512))
    settings = {"max_prefill_chunk": 16, "max_batch_tokens": 16}
    replayed, exact = (engine_with(model, run, **settings) for run in (graphs, Exact()))
    for lengths, max_tokens in [((26,), 1), ((10, 5), 3)]:
        prompts = random_prompts(*lengths, seed=sum(lengths))
        expected = answers(exact, prompts, max_tokens=max_tokens)
        assert answers(replayed, prompts, max_tokens=max_tokens) == expected
        assert same_cache(replayed, exact)
    chunks = [program for program in graphs.launched if isinstance(program, ChunkPass)]
    assert len(chunks) == 3
    assert len(set(map(id, chunks))) == 1
    assert len(graphs.launched) == 5  # the last two are steps of decoding


# Calls of the host


class Replayed(_Capturing):
    """Runs a program once, and then only as a GPU's host would, which launches a graph."""

    captures_chunks = True

    def _capture(self, program: Program) -> Capture:
        program.run(Always())
        return Capture(lambda: None, 0.0, 0)


@pytest.mark.parametrize(
    ("run", "of_chunk", "of_last"), [(Replayed, 165, 325), (Exact, None, None)]
)
def test_a_replayed_chunk_costs_the_host_few_calls(
    tmp_path: Path, run: type[RunProgram], of_chunk: int | None, of_last: int | None
) -> None:
    """The number of calls does not depend on that of layers; the last chunk gives a token."""
    found = {}
    for num_layers in (4, 30):
        directory = write_model(tmp_path / str(num_layers), num_hidden_layers=num_layers)
        model = as_on_cuda(eecore.load(directory, device="cpu", kv_cache_tokens=512))
        engine = engine_of(model, EngineConfig(512, max_prefill_chunk=40), run=run())
        calls = 0

        def counts(_frame: Any, event: str, _: object) -> None:
            nonlocal calls
            calls += event == "call"

        sampling = SamplingParams(max_tokens=1)
        engine.add_request(random_prompts(120)[0], exit=Full(), sampling=sampling)
        engine.step()
        found[num_layers] = []
        for _ in range(2):
            calls, before = 0, sys.getprofile()
            sys.setprofile(counts)
            try:
                engine.step()
            finally:
                sys.setprofile(before)
            found[num_layers].append(calls)
        assert not engine.has_unfinished
    if of_chunk is None or of_last is None:
        assert min(found[30]) > 30 * 40  # what is saved
        return
    assert found[4] == found[30]
    assert found[30][0] <= of_chunk
    assert found[30][1] <= of_last
