"""Captured programs on CUDA: only nodes that the body of an IF node may have.

CUDA takes kernels, copies and fills of device memory, and other IF nodes there; no wait for the
host, no copy from it or to it, no allocation by the driver. eecore's ops are kernels. All else that
a program calls is seen here, run call by call on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cuda_path import POLICIES, PROMPTS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import eecore
from devices import as_on_cuda, heads_in_floats
from eecore import DraftAndVerify, SamplingParams
from eecore.decoding.capture import CallByCall
from eecore.decoding.control import OnHost, Program
from head_packs import write_pack
from tiny_models import random_prompts
from tripwire import Fault

pytestmark = pytest.mark.usefixtures("one_thread")

MEMORY = {"empty", "empty_like", "new_empty", "empty_strided"}  # of the pool of the capture
VIEWS = {"view", "slice", "select", "split_with_sizes", "unbind", "unsqueeze", "detach", "alias"}
VIEWS |= {"as_strided", "_unsafe_view", "expand", "squeeze", "t", "transpose", "permute", "chunk"}
PRODUCTS = {"linear", "rms_norm", "silu", "mul_", "add_"}
"""Kernels of torch, which wait for nothing on the host."""


class Nodes(TorchDispatchMode):
    """The ops that a program calls, each with the depth of its body."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0
        self.seen: set[tuple[str, int]] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen.add((str(function.overloadpacket), self.depth))
        return function(*args, **(kwargs or {}))


class Bodies(OnHost):
    """Runs every body, needed or not, as a capture does."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def unless(
        self,
        flag: Tensor,  # noqa: ARG002
        body: Callable[[], None],
        condition: int | None = None,  # noqa: ARG002
    ) -> None:
        """See :class:`eecore.decoding.control.Control`."""
        self._nodes.depth += 1
        body()
        self._nodes.depth -= 1


class Watched(CallByCall):
    """Runs programs, and keeps their nodes."""

    def __init__(self) -> None:
        self.nodes = Nodes()

    def __call__(self, program: Program) -> None:
        with self.nodes:
            try:
                program.run(Bodies(self.nodes))
            except RuntimeError as error:  # a body that was not needed has no sound inputs
                raise Fault from error


@pytest.fixture(scope="module")
def model(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    """The tiny model with a draft head on the CUDA path, by the ops of the CPU."""
    plain = eecore.load(tiny_directory, device="cpu")
    folder = tmp_path_factory.mktemp("pack")
    pack = write_pack(folder, plain, taps=(2,), vocabulary_size=300)
    with pytest.MonkeyPatch.context() as monkeypatch:
        heads_in_floats(monkeypatch)
        loaded = eecore.load(tiny_directory, device="cpu", kv_cache_tokens=512, exits=pack)
    return as_on_cuda(loaded)


SAMPLED = SamplingParams(max_tokens=5, temperature=0.9, top_k=20, seed=3, logprobs=2)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(max_tokens=5), SAMPLED], ids=["greedy", "draws"]
)
@pytest.mark.parametrize("mode", [*POLICIES, "verify"])
def test_programs_are_ops_of_eecore(
    model: eecore.Model, mode: str, sampling: SamplingParams
) -> None:
    policy = (POLICIES | {"verify": DraftAndVerify({1}, {2}, num_drafts=3)})[mode]
    run = Watched()
    engine = eecore.Engine(model.network, model.tokenizer, model.engine_config, run=run)
    for prompt in PROMPTS:
        engine.add_request(list(prompt), exit=policy, sampling=sampling)
    assert [step.output for step in engine.run() if step.output is not None]
    assert others(run.nodes) <= MEMORY | VIEWS
    in_bodies = {name for name, depth in run.nodes.seen if depth > 0}
    assert ("eecore.exit_rows" in in_bodies or "eecore.append_drafts" in in_bodies) is (
        mode not in ("full", "fixed", "lookup", "head")
    )


@pytest.mark.parametrize("length", [9, 70])
def test_chunks_of_prompts_are_ops_of_eecore_and_products(model: eecore.Model, length: int) -> None:
    """Only chunks of more rows than eecore's products take have torch's kernels."""
    run = Watched()
    run.captures_chunks = True
    engine = eecore.Engine(model.network, model.tokenizer, model.engine_config, run=run)
    sampling = SamplingParams(max_tokens=1)
    for prompt in random_prompts(length, length):
        engine.add_request(prompt, exit="full", sampling=sampling)
    assert [step.output for step in engine.run() if step.output is not None]
    assert ("eecore.paged_attention", 0) in run.nodes.seen
    found = others(run.nodes)
    assert found <= MEMORY | VIEWS | (PRODUCTS if length > 16 else set())
    assert bool(found & PRODUCTS) is (length > 16)


def others(nodes: Nodes) -> set[str]:
    """Names of the calls that are not eecore's ops."""
    names = {name for name, _ in nodes.seen if not name.startswith("eecore.")}
    return {name.removeprefix("aten.") for name in names}


def test_what_has_no_place_in_a_body_is_seen() -> None:
    nodes = Nodes()
    with nodes:
        Bodies(nodes).unless(
            torch.zeros(1), lambda: torch.ones(3).to("cpu", torch.float64).sum().item()
        )
    assert others(nodes) - MEMORY - VIEWS >= {"_to_copy", "_local_scalar_dense", "sum"}
    assert {depth for name, depth in nodes.seen if name == "aten.sum"} == {1}
