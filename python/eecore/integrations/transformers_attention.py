"""``attn_implementation="eecore"``: attention of transformers' models by ``paged_attention``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from eecore import ops
from eecore.errors import RequestError
from eecore.values import shown

NAME = "eecore"
# Arguments of models that the kernel does not support.
LACKING = ("softcap", "s_aux", "position_bias", "cache")


def register_attention() -> str:
    """Register ``attn_implementation="eecore"`` with transformers, and return that name.

    ``AutoModelForCausalLM.from_pretrained(..., attn_implementation=eecore.register_attention())``
    or ``model.set_attn_implementation(eecore.register_attention())``. It is for causal attention
    with or without sliding windows, prompts padded on the left, and dynamic or static caches, in
    inference only. Other arguments of a model raise a RequestError when it runs.
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, padding)
    return NAME


def padding(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    attention_mask: Tensor | None = None,
    **_of_masks: Any,
) -> Tensor | None:
    """The keys that exist: bool [batch_size, keys], or None for all ``kv_length``.

    Keys of a static cache after these columns have not been written.
    """
    written = min(int(q_offset) + q_length, kv_length)
    if attention_mask is None:
        return None if written == kv_length else torch.ones(batch_size, written, dtype=torch.bool)
    mask = attention_mask[:, -written:].bool()
    return None if written == kv_length and bool(mask.all()) else mask


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls.

    Args:
        query: [batch_size, num_q_heads, q_length, head_dim].
        key: [batch_size, num_kv_heads, kv_length, head_dim].
        value: as ``key``.
        attention_mask: from :func:`padding`.
        scaling: factor of the scores; head_dim ** -0.5 when None.
        dropout: must be 0.
        sliding_window: keys that a query sees, itself included; None for all.
        is_causal: the module's own when None.

    Returns:
        [batch_size, q_length, num_q_heads, head_dim], and None for the weights.

    Raises:
        RequestError: the kernel does not support an argument.
    """
    _refuse(query, attention_mask, dropout, asked)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    batch, q_heads, q_length, head_dim = query.shape
    kv_heads, kv_length = key.shape[1:3]
    group = q_heads // kv_heads
    # Each key head becomes a sequence with one head; its queries are those of its group.
    queries = query.view(batch, kv_heads, group, q_length, head_dim).transpose(2, 3)
    lengths, starts = _written(attention_mask, batch, kv_length, query.device)
    num_seqs = batch * kv_heads
    if attention_mask is None:
        pages = (num_seqs, kv_length, 1, head_dim)
        table = torch.arange(num_seqs, dtype=torch.int32, device=query.device)[:, None]
    else:  # a page for each key, so that a sequence can begin anywhere
        pages = (num_seqs * kv_length, 1, 1, head_dim)
        begins = torch.arange(num_seqs, device=query.device) * kv_length
        begins += starts.repeat_interleave(kv_heads)
        steps = torch.arange(kv_length, device=query.device)
        table = (begins[:, None] + steps).clamp_(max=num_seqs * kv_length - 1).int()
    counts = lengths.clamp(max=q_length).repeat_interleave(kv_heads)
    begin = torch.zeros(num_seqs + 1, dtype=torch.int32, device=query.device)
    begin[1:] = counts.cumsum(0)
    asks = None
    if attention_mask is not None and q_length > 1:  # queries of padding attend to nothing
        asks = torch.arange(q_length, device=query.device) >= q_length - counts[:, None]
        rows = queries.reshape(num_seqs, q_length, group, head_dim)[asks]
    else:
        rows = queries.reshape(num_seqs * q_length, group, head_dim)
    attended = ops.paged_attention(
        rows,
        key.contiguous().view(pages),
        value.contiguous().view(pages),
        table,
        lengths.repeat_interleave(kv_heads).int(),
        begin,
        scale=head_dim**-0.5 if scaling is None else scaling,
        causal=causal,
        sliding_window=sliding_window or 0,
    )
    if asks is not None:
        whole = attended.new_zeros(num_seqs, q_length, group, head_dim)
        whole[asks] = attended
        attended = whole
    attended = attended.view(batch, kv_heads, q_length, group, head_dim).transpose(1, 2)
    return attended.reshape(batch, q_length, q_heads, head_dim), None


def _written(
    mask: Tensor | None, batch: int, kv_length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """For each sequence the number of its keys, and the place of the first."""
    if mask is None:
        return torch.full((batch,), kv_length, device=device), torch.zeros(batch, dtype=torch.long)
    mask = mask.to(device)
    lengths = mask.sum(1)
    starts = mask.shape[1] - lengths
    if not torch.equal(mask.int().argmax(1)[lengths > 0], starts[lengths > 0]):
        raise RequestError(
            f"attention_mask: expected padding only on the left with {NAME}, got it elsewhere"
        )
    return lengths, starts


def _refuse(query: Tensor, mask: Tensor | None, dropout: float, asked: dict[str, Any]) -> None:
    for name in LACKING:
        if asked.get(name) is not None:
            raise RequestError(
                f"{name}: expected none with attn_implementation={NAME!r}, got {shown(asked[name])}"
            )
    if dropout:
        raise RequestError(f"dropout: expected 0 with attn_implementation={NAME!r}, got {dropout}")
    if asked.get("output_attentions"):
        raise RequestError(f"output_attentions: {NAME} has none to give; expected 'eager' for them")
    if query.requires_grad and torch.is_grad_enabled():
        raise RequestError(f"{NAME} has no gradients: expected torch.no_grad(), or 'sdpa' to train")
    if mask is not None and mask.dim() != 2:
        raise RequestError(
            f"attention_mask: expected [batch_size, keys] with {NAME}, got {list(mask.shape)}"
        )
