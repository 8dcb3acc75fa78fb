"""The device and path of the runtime's tests.

EECORE_TEST_DEVICE: ``cpu`` unless it says ``cuda``, a GPU, or ``emulated``, the path of CUDA over
the emulator, on the CPU's memory. Those two leave out what is about the CPU's own kernels
(:data:`cpu_only`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import eecore
import emulated
from eecore import generation, ops
from eecore.decoding.capture import CallByCall, RunProgram, Tapes
from eecore.models import Network, recurrent_head
from eecore.models.linear import MAX_SKINNY_ROWS

DEVICE = os.environ.get("EECORE_TEST_DEVICE", "cpu")
if DEVICE not in ("cpu", "cuda", "emulated"):
    raise ValueError(f"EECORE_TEST_DEVICE: expected cpu, cuda or emulated, got {DEVICE!r}")


def heads_in_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loaded draft heads draft in floats on the CPU too, as on a GPU."""
    monkeypatch.setattr(recurrent_head._Form, "packs", False)


cpu_only = pytest.mark.skipif(DEVICE != "cpu", reason="about the CPU's kernels")
# The difference of a probability or its logarithm in another batch. On the CPU a row rounds alike
# in any batch.
ROUNDING = 0.0 if DEVICE == "cpu" else 1e-4
if DEVICE == "emulated":
    emulated.route(pytest.MonkeyPatch())  # for good
    heads_in_floats(pytest.MonkeyPatch())


def share_the_gpu(num_workers: int) -> None:
    """Limit this process, one of ``num_workers``, to its share of a GPU's memory.

    A cache of no given size takes a share of the free memory, with room for what tests ask. torch
    releases the memory of freed caches before it exceeds its share; kernels and graphs of each
    process come on top.
    """
    whole = generation._default_kv_cache_tokens

    def share(network: Network, per_token: int, states: int) -> int:
        return max(256, min(16384, whole(network, per_token, states) // num_workers))

    pytest.MonkeyPatch().setattr(generation, "_default_kv_cache_tokens", share)  # for good
    torch.cuda.set_per_process_memory_fraction(0.7 / num_workers)


def load(directory: Path, **settings: Any) -> eecore.Model:
    """Call ``eecore.load`` for the device under test."""
    model = eecore.load(directory, device="cuda" if DEVICE == "cuda" else "cpu", **settings)
    if DEVICE == "emulated":
        as_on_cuda(model)
    return model


def check_tokens(
    model: eecore.Model,
    prompts: list[list[int]],
    got: list[list[int]],
    expected: list[list[int]],
    margin: float,
) -> None:
    """Greedy tokens have to be the same; off the CPU, up to the first near tie.

    There a row's rounding depends on the number of rows in its batch. Two tokens may then replace
    each other where the whole model gives both the best probability, within ``margin`` in its
    logarithm; the text after the first such place is not compared.
    """
    if DEVICE == "cpu":
        assert got == expected
        return
    for prompt, one, other in zip(prompts, got, expected, strict=True):
        assert len(one) == len(other)
        place = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        if place is None:
            continue
        text = [*prompt, *other[:place]]
        (output,) = eecore.generate(model, text, exit="full", max_tokens=1, logprobs=20)
        assert output.top_logprobs is not None
        best = output.top_logprobs[0]
        for token in (one[place], other[place]):
            gap = max(best.values()) - best.get(token, float("-inf"))
            assert gap <= margin, f"{prompt}: {one} for {other}: {token} is {gap} below the best"


def check_logprobs(got: eecore.Output, expected: eecore.Output) -> None:
    """Log-probabilities of the tokens and of the best ones are equal, as far as a device allows."""
    assert (got.logprobs is None) == (expected.logprobs is None)
    assert (got.top_logprobs is None) == (expected.top_logprobs is None)
    if DEVICE == "cpu":
        assert got.logprobs == expected.logprobs
        assert got.top_logprobs == expected.top_logprobs
        return
    if got.logprobs is not None and expected.logprobs is not None:
        assert got.logprobs == pytest.approx(expected.logprobs, abs=ROUNDING, rel=0)
    for one, other in zip(got.top_logprobs or [], expected.top_logprobs or [], strict=True):
        assert one == pytest.approx(other, abs=ROUNDING, rel=0)


def as_on_cuda(model: eecore.Model) -> eecore.Model:
    """The model on the CUDA path in the CPU's memory: single ops, rows masked, prompts padded as in
    a graph, call by call.
    """
    of_head = getattr(model.network.draft_head, "_layers", None)  # of a head with layers
    for network in (model.network, *([] if of_head is None else [of_head])):
        network.calls_single_ops = True
        network.linear.max_rows = MAX_SKINNY_ROWS
    model.run_program = CallByCall()
    model.run_program.captures_chunks = True
    return model


class Traced(Tapes):
    """Runs programs on the CPU, and keeps the calls of their replays."""

    def __init__(self) -> None:
        super().__init__(lambda tape: self.calls.extend(tape.trace()))
        self.calls: list[ops.CallTrace] = []

    def of(self, op: str) -> list[ops.CallTrace]:
        """The calls of one op."""
        return [call for call in self.calls if call.op == op]

    @property
    def executions(self) -> int:
        """The number of (row, layer) pairs that ran."""
        return sum(
            call.num_tokens * (call.end_layer - call.begin_layer)
            for call in self.of("decoder_layers")
        )


def engine_of(
    model: eecore.Model,
    config: eecore.EngineConfig | None = None,
    *,
    run: RunProgram | None = None,
    ahead: bool | None = None,
) -> eecore.Engine:
    """An engine that decodes as the model's own, or launches runs ahead."""
    return eecore.Engine(
        model.network,
        model.tokenizer,
        config or model.engine_config,
        run=run or model.run_program,
        ahead=ahead,
    )
