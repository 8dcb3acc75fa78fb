"""Attention of a prompt's chunks by the best kernels that are there.

eecore's own kernels are made for few queries. Of chunks that are long, whose lengths the host
knows, keys and values are gathered from their pages and given to flash-attn where it is installed,
else to torch's ``scaled_dot_product_attention``, which chooses its flash or cuDNN kernels.
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

__all__ = ["MIN_QUERIES", "Chunks", "PromptAttention", "prompt_attention_of"]

MIN_QUERIES = 64
"""Of a sequence, from which on its chunk is attended so."""
FLASH_ATTN = "flash_attn"


@dataclass(frozen=True)
class Chunks:
    """What the host knows of the sequences of a call, each with :data:`MIN_QUERIES` or more."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    """Keys of each sequence, those of its queries included."""


@dataclass(frozen=True)
class Scores:
    """How scores are made: those of :func:`eecore.ops.paged_attention`."""

    scale: float
    sliding_window: int = 0
    soft_cap: float = 0.0


class PromptAttention:
    """Causal attention of chunks, whose queries are the last positions of their sequences.

    Args:
        varlen: ``flash_attn_varlen_func``; None: torch's.
    """

    def __init__(self, varlen: Callable[..., Any] | None = None) -> None:
        self._varlen = varlen

    @property
    def name(self) -> str:
        return "torch" if self._varlen is None else FLASH_ATTN

    def takes(self, scores: Scores) -> bool:
        """Whether it has kernels of such scores: torch's flash kernel has no window and no cap."""
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
        """[num_tokens, num_q_heads, head_dim] of q.

        Args:
            q: [num_tokens, num_q_heads, head_dim].
            k_cache: [num_pages, page_size, num_kv_heads, head_dim], of q's dtype.
            v_cache: [num_pages, page_size, num_kv_heads, head_dim], likewise.
            page_table: int32 [num_seqs, max_pages_per_seq].
            chunks: of the sequences.
            scores: how they are made.
        """
        k, v = (gathered(cache, page_table, chunks.keys) for cache in (k_cache, v_cache))
        if self._varlen is None:
            return _by_torch(q, k, v, chunks, scores.scale)
        window = scores.sliding_window - 1 if scores.sliding_window else -1
        out = self._varlen(
            *(q, k, v, _starts(chunks.queries, q), _starts(chunks.keys, q)),
            *(max(chunks.queries), max(chunks.keys)),
            softmax_scale=scores.scale,
            causal=True,
            window_size=(window, 0 if scores.sliding_window else -1),
            softcap=scores.soft_cap,
        )
        assert isinstance(out, Tensor)
        return out


def gathered(cache: Tensor, page_table: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """[sum of lengths, num_kv_heads, head_dim]: the keys or values of each sequence, one after the
    other."""
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
    """The best that there is for a model; None: eecore's own kernels.

    An installed flash-attn that cannot be loaded, one of another torch, is warned of by name.
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
