"""Attention of a prompt's chunks by the best installed kernels.

eecore's own kernels are made for few queries. For long chunks whose lengths the host knows, keys
and values are gathered from their pages and given to flash-attn if it is installed, else to torch's
``scaled_dot_product_attention``, which chooses its flash or cuDNN kernels.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

MIN_QUERIES = 64
"""Queries of a sequence from which on these kernels attend to its chunk."""
FLASH_ATTN = "flash_attn"


@dataclass(frozen=True)
class Chunks:
    """The lengths of a call's sequences, each with :data:`MIN_QUERIES` queries or more."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    """Keys of each sequence, its queries' own keys included."""


@dataclass(frozen=True)
class Scores:
    """How scores are computed, as by :func:`eecore.ops.paged_attention`."""

    scale: float
    sliding_window: int = 0
    soft_cap: float = 0.0


class PromptAttention:
    """Causal attention of chunks, whose queries are the last positions of their sequences.

    Args:
        varlen: ``flash_attn_varlen_func``; None: torch's attention.
    """

    def __init__(self, varlen: Callable[..., Any] | None = None) -> None:
        self._varlen = varlen

    @property
    def name(self) -> str:
        return "torch" if self._varlen is None else FLASH_ATTN

    def takes(self, scores: Scores) -> bool:
        """Whether there is a kernel for such scores: torch's flash kernel has no window or cap."""
        return self._varlen is not None or (not scores.sliding_window and not scores.soft_cap)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        chunks: Chunks,
        scores: Scores,
    ) -> Tensor:
        """The output of attention, [num_tokens, num_q_heads, head_dim].

        Args:
            q: [num_tokens, num_q_heads, head_dim].
            k_cache: [num_pages, page_size, num_kv_heads, head_dim], of q's dtype.
            v_cache: [num_pages, page_size, num_kv_heads, head_dim], of q's dtype.
            page_table: int32 [num_seqs, max_pages_per_seq].
            chunks: the lengths of the sequences.
            scores: how scores are computed.
        """
        k, v = (gathered(cache, page_table, chunks.keys) for cache in (k_cache, v_cache))
        if self._varlen is None:
            return _by_torch(q, k, v, chunks, scores.scale)
        window = scores.sliding_window - 1 if scores.sliding_window else -1
        out = self._varlen(
            q,
            k,
            v,
            _starts(chunks.queries, q),
            _starts(chunks.keys, q),
            max(chunks.queries),
            max(chunks.keys),
            softmax_scale=scores.scale,
            causal=True,
            window_size=(window, 0 if scores.sliding_window else -1),
            softcap=scores.soft_cap,
        )
        assert isinstance(out, Tensor)
        return out


def gathered(cache: Tensor, page_table: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """[sum of lengths, num_kv_heads, head_dim]: the sequences' keys or values, concatenated."""
    page_size = cache.shape[1]
    pages = [-(-length // page_size) for length in lengths]
    rows = [page_table[i, :count] for i, count in enumerate(pages)]
    found = cache.index_select(0, torch.cat(rows)).flatten(0, 1)
    if all(length == count * page_size for length, count in zip(lengths, pages, strict=True)):
        return found
    first, parts = 0, []
    for length, count in zip(lengths, pages, strict=True):
        parts.append(found[first : first + length])
        first += count * page_size
    return torch.cat(parts)


def _starts(lengths: tuple[int, ...], like: Tensor) -> Tensor:
    sums = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return sums.to(like.device, non_blocking=True)


def _by_torch(q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, scale: float) -> Tensor:
    from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler

    outs, query, key = [], 0, 0
    for queries, keys in zip(chunks.queries, chunks.keys, strict=True):
        of_queries, of_keys = slice(query, query + queries), slice(key, key + keys)
        out = functional.scaled_dot_product_attention(
            q[of_queries].transpose(0, 1)[None],
            k[of_keys].transpose(0, 1)[None],
            v[of_keys].transpose(0, 1)[None],
            attn_mask=causal_lower_right(queries, keys),
            scale=scale,
            enable_gqa=True,
        )
        outs.append(out[0].transpose(0, 1))
        query, key = of_queries.stop, of_keys.stop
    return torch.cat(outs)


def prompt_attention_of(device: torch.device, dtype: torch.dtype) -> PromptAttention | None:
    """The best installed attention for a model; None: eecore's own kernels.

    A warning names an installed flash-attn that cannot be loaded, such as one for another torch.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        return PromptAttention(importlib.import_module(FLASH_ATTN).flash_attn_varlen_func)
    except ModuleNotFoundError as error:
        if error.name != FLASH_ATTN:
            _warn(error)
    except (ImportError, OSError, AttributeError) as error:
        _warn(error)
    return PromptAttention()


def _warn(error: Exception) -> None:
    warnings.warn(
        f"flash_attn: expected one that torch {torch.__version__} can load, got {error}: prompts "
        "are attended by torch's kernels",
        stacklevel=3,
    )
