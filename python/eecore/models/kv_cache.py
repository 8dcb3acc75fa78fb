"""The paged key/value cache of all layers: two tensors, so that a layer index is a stride.

A layer with a gated delta rule has a state of fixed size for each text, beside the pages.

A convolution's layer has one row of its input for each position instead, in the same pages: so
whatever happens to pages also happens to its state.

A looped model's cache has the pages of all its loops, one loop after the other: page ``p`` of loop
``u`` is page ``u * num_pages + p`` of a layer, so that rows of a call can be in different loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eecore import ops
from eecore.config import AnyModelConfig, DeltaConfig
from eecore.errors import OutOfMemoryError

# Counters for one attention call on a GPU: one for each tile and key head whose keys several blocks
# share.
NUM_ARRIVALS = 4096
# Rows that a gated delta rule keeps of each text: those of a round with the most drafts that are
# allowed, of a quarter that a fill leaves for later, and of the convolution.
KEPT_ROWS = 96
SMALL_BYTES = 1 << 20
"""Bytes at the beginning of each layer's keys, and of its values, that stay in the system's small
pages."""


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer in pages; a slot is ``page * page_size + offset``."""

    k: Tensor
    """[layers with attention, num_loops * num_pages, page_size, num_kv_heads, head_dim]"""
    v: Tensor
    """[layers with attention, num_loops * num_pages, page_size, num_kv_heads, head_dim]"""
    key_scales: Tensor | None = None
    """Float32 [layers with attention, num_kv_heads], scales of keys in float8; None: 1."""
    value_scales: Tensor | None = None
    """Float32 [layers with attention, num_kv_heads], scales of values in float8; None: 1."""
    of_head: KVCache | None = None
    """The keys and values of a draft head's own layers, in the same pages and slots; None without
    such a head."""
    num_loops: int = 1
    """How many times the layers run."""
    states: Tensor | None = None
    """[layers with a convolution, num_pages, page_size, hidden_size]; None without such layers."""
    conv_layers: tuple[int, ...] = ()
    """The numbers of the layers with a convolution, ascending."""
    deltas: ops.DeltaState | None = None
    """The states of the layers with a gated delta rule, each field with an axis of these layers
    before its own; None without such layers."""
    delta_layers: tuple[int, ...] = ()
    """The numbers of these layers, ascending."""
    layers: list[tuple[Tensor, Tensor]] = field(init=False, repr=False, compare=False)
    """Views (k, v) of each layer through all loops, [num_pages, page_size, num_kv_heads, head_dim].
    For a layer with a convolution twice its states, [num_pages, page_size, hidden_size]; for one
    with a gated delta rule twice its rows.
    """
    layer_scales: list[tuple[Tensor | None, Tensor | None]] = field(
        init=False, repr=False, compare=False
    )
    """The scales of each layer's keys and values, [num_kv_heads]."""
    arrivals: Tensor = field(init=False, repr=False, compare=False)
    """Int32 [NUM_ARRIVALS], in which the blocks of one attention call at a time count; zeros
    between calls."""

    def __post_init__(self) -> None:
        views = [
            layer
            for loop in range(self.num_loops)
            for layer in zip(*(each.unbind(0) for each in self.loop(loop)), strict=True)
        ]
        scales = [
            [None] * len(views) if each is None else [*each.unbind(0)] * self.num_loops
            for each in (self.key_scales, self.value_scales)
        ]
        layer_scales = list(zip(*scales, strict=True))
        convolutions = () if self.states is None else self.states
        others = dict(zip(self.conv_layers, convolutions, strict=True))
        others |= zip(self.delta_layers, self.deltas.rows if self.deltas else (), strict=True)
        for layer, kept in sorted(others.items()):
            views.insert(layer, (kept, kept))
            layer_scales.insert(layer, (None, None))
        object.__setattr__(self, "layers", views)
        object.__setattr__(self, "layer_scales", layer_scales)
        arrivals = torch.zeros(NUM_ARRIVALS, dtype=torch.int32, device=self.k.device)
        object.__setattr__(self, "arrivals", arrivals)

    @classmethod
    def allocate(
        cls,
        config: AnyModelConfig,
        num_pages: int,
        page_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        scales: tuple[Tensor | None, Tensor | None] = (None, None),
        state_dtype: torch.dtype | None = None,
        deltas: tuple[int, torch.dtype] | None = None,
    ) -> KVCache:
        """Uninitialised pages: no slot is read before it is written.

        On a CPU a page takes memory when it is first written: the first pages of each layer, which
        are used first, 4 KiB at a time, so that a short text does not take megabytes in every
        layer; other pages 2 MiB at a time where the system has pages of that size, which are read
        faster. ``scales``: of keys and of values in float8. ``state_dtype``: of convolutions'
        states, which are not in float8; None: ``dtype``. ``deltas``: the number of states in layers
        with gated delta rules, and the model's dtype; None: texts have no state.

        Raises:
            OutOfMemoryError: the pages do not fit into memory.
        """
        loops, of_token = config.num_loops, (config.num_kv_heads, config.head_dim)
        convolutions = config.conv_layers
        num_attending, delta = len(config.attention_layers), config.delta
        shape = (num_attending, loops * num_pages, page_size, *of_token)
        states = None
        try:
            if convolutions:
                of_states = (len(convolutions), num_pages, page_size, config.hidden_size)
                states = _new_cache(of_states, device, state_dtype or dtype, 1)
            made = None
            if delta is not None:
                made = _new_deltas(delta, *(deltas or (0, dtype)), device)
            return cls(
                k=_new_cache(shape, device, dtype, loops),
                v=_new_cache(shape, device, dtype, loops),
                key_scales=scales[0],
                value_scales=scales[1],
                num_loops=loops,
                states=states,
                conv_layers=convolutions,
                deltas=made,
                delta_layers=() if delta is None else delta.layers,
            )
        except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
            tokens = num_pages * page_size
            num_bytes = tokens * cls.bytes_per_token(config, dtype)
            got, names = f"{tokens} tokens, {num_bytes} bytes", "kv_cache_tokens"
            if config.delta is not None and deltas is not None:
                count, of_model = deltas
                state_bytes = count * cls.bytes_per_state(config, of_model)
                got += f", and {count} states of texts, {state_bytes} bytes"
                names += ", max_num_seqs"
            raise OutOfMemoryError(
                f"{names}: expected a KV cache that fits into the memory of {device}, got {got} "
                f"({str(error).splitlines()[0]})"
            ) from error

    @staticmethod
    def bytes_per_token(
        config: AnyModelConfig, dtype: torch.dtype, state_dtype: torch.dtype | None = None
    ) -> int:
        """Bytes that one token takes in the caches of all layers."""
        convolutions = len(config.conv_layers)
        attending = len(config.attention_layers) * config.num_loops
        kept = 2 * attending * config.kv_size * dtype.itemsize
        return kept + convolutions * config.hidden_size * (state_dtype or dtype).itemsize

    @staticmethod
    def bytes_per_state(config: AnyModelConfig, dtype: torch.dtype) -> int:
        """Bytes of a text's state in the layers with gated delta rules, for a model of a dtype."""
        if config.delta is None:
            return 0
        made = _new_deltas(config.delta, 1, dtype, torch.device("meta"))
        return sum(each.nbytes for each in made)

    def state_of(self, layer: int) -> ops.DeltaState:
        """The states of a layer with a gated delta rule."""
        assert self.deltas is not None
        place = self.delta_layers.index(layer)
        return ops.DeltaState(*(each[place] for each in self.deltas))

    def copy_state(self, source: int, target: int) -> None:
        """Copy a text's state in all layers, by numbers from 1."""
        assert self.deltas is not None
        for each in self.deltas:
            each[:, target - 1].copy_(each[:, source - 1])

    def state_reaches(self, number: int) -> int:
        """The position after the last one that is summed up in a state."""
        assert self.deltas is not None
        return int(self.deltas.applied[:, number - 1].max())

    def loop(self, number: int) -> tuple[Tensor, Tensor]:
        """Views of the keys and values of all layers in a loop."""
        if self.num_loops == 1:
            return self.k, self.v
        pages = slice(number * self.num_pages, (number + 1) * self.num_pages)
        return self.k[:, pages], self.v[:, pages]

    @property
    def num_pages(self) -> int:
        """Pages that a sequence's pages are among: those of one loop."""
        return self.k.shape[1] // self.num_loops

    @property
    def loop_slots(self) -> int:
        """Slots from one loop of a looped model to the next; 0 for a model without loops."""
        return self.num_pages * self.page_size if self.num_loops > 1 else 0

    @property
    def page_size(self) -> int:
        return self.k.shape[2]


def _new_deltas(
    delta: DeltaConfig, num_states: int, dtype: torch.dtype, device: torch.device
) -> ops.DeltaState:
    tiles = -(-delta.value_dim // ops.DELTA_TILE)
    layers, heads = (len(delta.layers), num_states), delta.num_value_heads
    of_head = (heads, tiles, delta.key_dim, ops.DELTA_TILE)
    return ops.DeltaState(
        torch.empty(*layers, *of_head, device=device),
        torch.empty(*layers, KEPT_ROWS, delta.conv_size + 2 * heads, device=device, dtype=dtype),
        torch.zeros(*layers, delta.num_key_heads, device=device, dtype=torch.int32),
    )


def _new_cache(
    shape: Sequence[int], device: torch.device, dtype: torch.dtype, num_loops: int
) -> Tensor:
    made = torch.empty(shape, device=device, dtype=dtype)
    if device.type == "cpu" and made.numel():
        first = SMALL_BYTES // made[0, :1].nbytes + 1
        for layer in made.view(-1, shape[1] // num_loops, *shape[2:]):
            ops.in_huge_pages(layer[first:])
    return made
