"""KV caches as several engines lay them out: views with the dimensions that the ops name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

BESIDE = -7.0


class Caches(NamedTuple):
    """Views of one memory, [num_layers, num_pages, page_size, num_kv_heads, head_dim]."""

    memory: Tensor
    k: Tensor
    v: Tensor


class Sizes(NamedTuple):
    layers: int
    pages: int
    slots: int
    heads: int
    dim: int


Empty = Callable[..., Tensor]


def _halves_of_a_head(empty: Empty, n: Sizes) -> Caches:
    """The layout of vLLM 0.32 on GPUs: the key of a head, then its value."""
    memory = empty(n.layers, n.pages, n.slots, n.heads, 2 * n.dim)
    return Caches(memory, *memory.split(n.dim, -1))


def _layers_of_a_page(empty: Empty, n: Sizes) -> Caches:
    """The layout BLNHC of vLLM."""
    memory = empty(n.pages, n.layers, n.slots, n.heads, 2 * n.dim)
    return Caches(memory, *memory.transpose(0, 1).split(n.dim, -1))


def _pages_of_a_head(empty: Empty, n: Sizes) -> Caches:
    """The layout LHBNC of vLLM."""
    memory = empty(n.layers, n.heads, n.pages, n.slots, 2 * n.dim)
    return Caches(memory, *memory.permute(0, 2, 3, 1, 4).split(n.dim, -1))


def _slots_of_a_head(empty: Empty, n: Sizes) -> Caches:
    """The memory of vLLM 0.32 on CPUs; its own kernels turn the keys of a page around."""
    memory = empty(n.layers, n.pages, n.heads, 2 * n.slots, n.dim)
    return Caches(memory, *(half.transpose(2, 3) for half in memory.split(n.slots, 3)))


def _flashinfer_nhd(empty: Empty, n: Sizes) -> Caches:
    memory = empty(n.layers, n.pages, 2, n.slots, n.heads, n.dim)
    return Caches(memory, *memory.unbind(2))


def _flashinfer_hnd(empty: Empty, n: Sizes) -> Caches:
    memory = empty(n.layers, n.pages, 2, n.heads, n.slots, n.dim)
    return Caches(memory, *memory.transpose(3, 4).unbind(2))


def _every_other_page(empty: Empty, n: Sizes) -> Caches:
    memory = empty(2, n.layers, 2 * n.pages, n.slots, n.heads, n.dim)
    return Caches(memory, *memory[:, :, 1::2].unbind(0))


def _heads_anywhere(empty: Empty, n: Sizes) -> Caches:
    """Heads at no multiple of 16 bytes."""
    memory = empty(2, n.layers, n.pages, n.slots, n.heads, n.dim + 3)
    return Caches(memory, *memory[..., 1:-2].unbind(0))


def _keys_unlike_values(empty: Empty, n: Sizes) -> Caches:
    memory = empty(2, math.prod(n))
    k = memory[0].view(n.layers, n.heads, n.pages, n.slots, n.dim).permute(0, 2, 3, 1, 4)
    return Caches(memory, k, memory[1].view(n))


LAYOUTS = {
    each.__name__.lstrip("_"): each
    for each in (
        _halves_of_a_head,
        _layers_of_a_page,
        _pages_of_a_head,
        _slots_of_a_head,
        _flashinfer_nhd,
        _flashinfer_hnd,
        _every_other_page,
        _heads_anywhere,
        _keys_unlike_values,
    )
}


def laid_out(layout: str, k_cache: Tensor, v_cache: Tensor) -> Caches:
    """The same keys and values in a layout, and BESIDE around them; of one layer or of several."""

    def empty(*shape: int) -> Tensor:
        return torch.full(shape, BESIDE, dtype=k_cache.dtype, device=k_cache.device)

    one_layer = k_cache.dim() == 4
    sizes = Sizes(*((1, *k_cache.shape) if one_layer else k_cache.shape))
    memory, k, v = LAYOUTS[layout](empty, sizes)
    if one_layer:
        k, v = k[0], v[0]
    return Caches(memory, k.copy_(k_cache), v.copy_(v_cache))
