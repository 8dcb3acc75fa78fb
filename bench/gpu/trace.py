"""The kernels of a call or of a whole iteration, traced on tensors without memory.

The ops are recorded and not run; their launches come from bench/gpu/plans.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu.calls import Call, Known
from bench.gpu.devices import Device
from bench.gpu.launches import IfNode, Node, set_condition
from bench.gpu.plans import plan
from eecore.config import ModelConfig
from eecore.decoding.control import OnHost
from eecore.decoding.draft_kind import DraftKind
from eecore.decoding.draft_step import DraftStep
from eecore.decoding.exit_step import ExitKind, ExitStep
from eecore.decoding.memory import power_of_two
from eecore.decoding.sampling import HeadSizes
from eecore.decoding.step import Sizes
from eecore.models import (
    KeyedHead,
    KVCache,
    LlamaModel,
    LlamaWeights,
    PassHead,
    allocate_cache,
)
from eecore.models.weights import NewWeights
from eecore.planning.heads import max_ahead
from eecore.planning.route import GIVEN, Check, DraftPath

META = torch.device("meta")
PAGE_SIZE = 16


class _Recorder(TorchDispatchMode):
    """Records the calls of eecore's ops, which write their results into their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Call | Node] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function.namespace != "eecore":
            return function(*args, **(kwargs or {}))
        schema = function._schema
        given = dict(zip([each.name for each in schema.arguments], args, strict=False))
        arguments = {
            each.name: (kwargs or {}).get(each.name, given.get(each.name, each.default_value))
            for each in schema.arguments
        }
        written = frozenset(
            each.name
            for each in schema.arguments
            if each.alias_info is not None and each.alias_info.is_write
        )
        self.nodes.append(Call(schema.name.removeprefix("eecore::"), arguments, written))
        return None


@contextmanager
def without_memory() -> Iterator[None]:
    """A context in which tensors are on the meta device, and copies to the host have no values."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def nodes_of(run: Callable[[], object], device: Device, known: Known) -> list[Node]:
    """The launches of a function that calls ops on tensors of the meta device."""
    with _Recorder() as recorder:
        run()
    return _planned(recorder, device, known)


def _planned(recorder: _Recorder, device: Device, known: Known) -> list[Node]:
    nodes: list[Node] = []
    for node in recorder.nodes:
        nodes += plan(node, device, known) if isinstance(node, Call) else [node]
    return nodes


class _Passing(OnHost):
    """A control under which the first ``runs`` conditional bodies run; None: all of them."""

    def __init__(self, recorder: _Recorder, runs: int | None) -> None:
        self._recorder, self._runs = recorder, runs

    def condition(self, flag: Tensor) -> int | None:  # noqa: ARG002
        """See :class:`eecore.decoding.control.Control`."""
        return 0

    def unless(
        self,
        flag: Tensor,  # noqa: ARG002
        body: Callable[[], None],
        condition: int | None = None,
    ) -> None:
        """See :class:`eecore.decoding.control.Control`."""
        self._recorder.nodes += [IfNode()] if condition is not None else [set_condition(), IfNode()]
        if self._runs is None:
            body()
        elif self._runs:
            self._runs -= 1
            body()


def model_without_memory(config: ModelConfig) -> LlamaModel:
    """A model with bfloat16 weights on the meta device."""
    return LlamaModel(config, LlamaWeights.empty(config, NewWeights(META, torch.bfloat16)))


def iteration(
    model: LlamaModel,
    batch: int,
    seq_len: int,
    device: Device,
    *,
    rows_exit: bool | None = None,
    exit_layer: int | None = None,
) -> list[Node]:
    """The graph of a decoding step: full depth, or with a softmax check after a layer.

    Args:
        model: a model on the meta device.
        batch: the number of rows, a power of two.
        seq_len: keys of each row.
        device: the GPU.
        rows_exit: None for full depth without a check; else whether all rows exit at the check, so
            that the keys and values of the skipped layers are filled.
        exit_layer: the layer before the check; None: half of the layers.
    """
    num_layers = model.config.num_layers
    checks = rows_exit is not None
    at = num_layers // 2 if exit_layer is None else exit_layer
    points: tuple[tuple[int, tuple[Check, ...]], ...] = ((num_layers, ()),)
    if checks:
        points = ((at, (Check("softmax"),)), *points)
    sizes = _sizes(batch, seq_len)
    kind = ExitKind(points, fills=checks, taps=(), shares=False, sizes=sizes)
    program = ExitStep(model, _cache(model, sizes), kind)
    filled_from = at if rows_exit else num_layers
    with _Recorder() as recorder:
        program.run(_Passing(recorder, runs=0 if rows_exit else None))
    known = Known(seq_len, (filled_from,) * batch, tokens_known=rows_exit is True)
    return _planned(recorder, device, known)


def draft_round(
    model: LlamaModel,
    batch: int,
    seq_len: int,
    device: Device,
    num_drafts: int,
    *,
    first_layers: int = 0,
) -> list[Node]:
    """The graph of a round of drafts: all layers verify those of each row.

    The model's draft head makes as many for the next round, or the first layers make them before.

    Args:
        model: a model on the meta device; without ``first_layers`` it has a draft head with keys of
            its own.
        batch: the number of rows, a power of two.
        seq_len: keys of each row.
        device: the GPU.
        num_drafts: drafts of a row.
        first_layers: layers that draft; 0: the draft head does.
    """
    sizes = _sizes(batch, seq_len + num_drafts, positions=num_drafts + 1)
    path, ahead, taps, runs = DraftPath(first_layers, first_layers), 0, (), None
    if not first_layers:
        head = model.draft_head
        assert isinstance(head, KeyedHead)
        path, ahead, taps = GIVEN, max_ahead(head), head.taps
        runs = None if isinstance(head, PassHead) else num_drafts
    kind = DraftKind(path, num_drafts, False, 1, ahead, taps, sizes)
    program = DraftStep(model, _cache(model, sizes), kind)
    with _Recorder() as recorder:
        program.run(_Passing(recorder, runs))
    return _planned(recorder, device, Known(seq_len))


def _sizes(batch: int, seq_len: int, positions: int = 1) -> Sizes:
    num_pages = power_of_two(-(-seq_len // PAGE_SIZE))
    return Sizes(batch, num_pages, 0, HeadSizes(), positions, follows=False)


def _cache(model: LlamaModel, sizes: Sizes) -> KVCache:
    """Pages for all rows of a program."""
    kv = allocate_cache(model, sizes.num_rows * sizes.num_pages, PAGE_SIZE, model.dtype)
    model.prepare(kv)
    return kv
