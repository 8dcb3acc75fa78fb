"""``attn_implementation="eecore"``: attention of transformers' models by ``paged_attention``.

A mask says which keys a query sees. Here it is the first of them and the end, so that it can be any
mask whose queries see keys next to each other: causal or not, with windows, chunks, several texts
in a row, a prefix, padding on either side. Queries that follow each other by the kernel's own rule
become one sequence of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from eecore import ops
from eecore.errors import RequestError

NAME = "eecore"
# Arguments of models that the kernel does not support.
LACKING = ("s_aux", "sinks", "position_bias", "block_indices", "cache")
QUERIES = 1024
"""Rows of a mask that are in memory at once."""
HIDDEN = -1e4
"""A number in an additive mask, or a lower one, that hides a key."""


def register_attention() -> str:
    """Register ``attn_implementation="eecore"`` with transformers, and return that name.

    ``AutoModelForCausalLM.from_pretrained(..., attn_implementation=eecore.register_attention())``
    or ``model.set_attn_implementation(eecore.register_attention())``. It is for masks in which the
    keys that a query sees are next to each other, for soft caps, and for dynamic or static caches,
    in inference only. Other masks and arguments of a model raise a RequestError when it runs.
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, seen_keys)
    return NAME


def seen_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **more: Any,
) -> Tensor:
    """The mask function that transformers calls, with its arguments.

    Returns:
        int32 [batch_size, 1, q_length, 2], the first key that a query sees, and the end.

    Raises:
        RequestError: a query sees keys that are not next to each other.
    """
    is_plain = attention_mask is None or bool(attention_mask.all())
    if mask_function is causal_mask_function and is_plain:
        ends = torch.arange(1, q_length + 1, device=device) + (int(q_offset) - int(kv_offset))
        ranges = torch.stack((torch.zeros_like(ends), ends), dim=1).int()
        return ranges.expand(batch_size, 1, q_length, 2)
    more |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    found = []
    for begin in range(0, q_length, QUERIES):
        mask = sdpa_mask(
            batch_size=batch_size,
            q_length=min(QUERIES, q_length - begin),
            kv_length=kv_length,
            q_offset=q_offset + begin,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            device=device,
            **more,
        )
        assert mask is not None
        part = _ranges(mask)
        if part is None:
            names = " with ".join(dict.fromkeys(_names(mask_function, set())))
            raise _has_holes(names if is_plain else f"{names} and padding")
        found.append(part)
    return torch.cat(found, dim=2)


def _names(function: Any, seen: set[int]) -> Iterator[str]:
    """The functions that a mask is made of, by the names of those that make them.

    Args:
        seen: ids of functions that are named already; one may hold itself.
    """
    seen.add(id(function))
    parts: list[Any] = []
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        parts += held if isinstance(held, tuple) else [held]
    inner = [part for part in parts if callable(part) and id(part) not in seen]
    for part in inner:
        yield from _names(part, seen)
    if not inner:
        yield str(getattr(function, "__qualname__", function)).split(".")[0]


def _ranges(mask: Tensor) -> Tensor | None:
    """The ranges of :func:`seen_keys`, of a bool mask [batch_size, 1, q_length, kv_length]; None
    where a query sees keys that are not next to each other.
    """
    begins = mask.clone()
    begins[..., 1:] &= ~mask[..., :-1]
    if bool((begins.sum(-1) > 1).any()):
        return None
    first = begins.byte().argmax(-1)
    return torch.stack((first, first + mask.sum(-1)), dim=-1).int()


def _has_holes(name: str) -> RequestError:
    return RequestError(
        f"attention_mask: expected keys next to each other for each query with {NAME}, got {name}"
    )


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
    softcap: float | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls.

    Args:
        query: [batch_size, num_q_heads, q_length, head_dim].
        key: [batch_size, num_kv_heads, kv_length, head_dim].
        value: as ``key``.
        attention_mask: from :func:`seen_keys`, or a caller's own [batch_size, 1, q_length,
            kv_length], bool or added to the scores.
        scaling: factor of the scores; head_dim ** -0.5 when None.
        dropout: must be 0.
        sliding_window: must agree with the mask, which decides.
        is_causal: decides without a mask; the module's own when None.
        softcap: cap of the scores; None for none.

    Returns:
        [batch_size, q_length, num_q_heads, head_dim], and None for the weights.

    Raises:
        RequestError: the kernel does not support an argument.
    """
    _refuse(query, key, value, dropout, asked)
    batch, q_heads, q_length, head_dim = query.shape
    kv_heads, kv_length = key.shape[1:3]
    if attention_mask is not None:
        ranges = _checked(attention_mask, batch, q_length, kv_length)
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        ranges = _without_mask(query, kv_length, bool(causal), sliding_window)
    name = f"plan_of_{kv_heads}_heads"  # layers share their mask
    plan = vars(ranges).get(name)
    if plan is None:
        plan = _plan(ranges.to(query.device), kv_heads)
        setattr(ranges, name, plan)
    group = q_heads // kv_heads
    # Each key head becomes a sequence with one head; its queries are those of its group.
    rows = query.view(batch, kv_heads, group, q_length, head_dim).transpose(2, 3)
    rows = rows.reshape(-1, group, head_dim)
    pages, table = (batch * kv_heads, kv_length, 1, head_dim), plan.rows[:, None]
    if plan.has_starts:  # a page for each key, so that a sequence can begin anywhere
        pages = (batch * kv_heads * kv_length, 1, 1, head_dim)
        steps = torch.arange(plan.longest, device=query.device)
        table = (plan.rows * kv_length + plan.starts)[:, None] + steps
        table = table.clamp_(max=pages[0] - 1)
    attended = ops.paged_attention(
        rows if plan.kept is None else rows[plan.kept],
        key.contiguous().view(pages),
        value.contiguous().view(pages),
        table.int(),
        plan.lengths,
        plan.query_start_loc,
        scale=head_dim**-0.5 if scaling is None else scaling,
        soft_cap=softcap or 0.0,
        causal=plan.causal,
        sliding_window=plan.window,
    )
    if plan.kept is not None:
        whole = attended.new_zeros(rows.shape)
        whole[plan.kept] = attended
        attended = whole
    attended = attended.view(batch, kv_heads, q_length, group, head_dim).transpose(1, 2)
    return attended.reshape(batch, q_length, q_heads, head_dim), None


class _Plan(NamedTuple):
    """Sequences of the kernel; rows are [batch_size, num_kv_heads, q_length] as one axis."""

    kept: Tensor | None
    """int64 [num_kept]: the rows that see a key; None for all."""
    query_start_loc: Tensor
    """int32 [num_seqs + 1], into the rows kept."""
    rows: Tensor
    """int64 [num_seqs]: batch row * num_kv_heads + key head."""
    starts: Tensor
    """int64 [num_seqs]: the first key."""
    has_starts: bool
    """Whether any of these is not 0."""
    lengths: Tensor
    """int32 [num_seqs]: keys from there on."""
    longest: int
    causal: bool
    window: int


def _plan(ranges: Tensor, kv_heads: int) -> _Plan:
    """The fewest sequences in which each query sees its range [batch_size, 1, q_length, 2].

    In a sequence of causal queries each range ends a key later than the one before, and begins with
    the sequence, or a window before its end. Where all queries of each row see the same keys, a row
    is a sequence that is not causal.
    """
    ranges = ranges.long().expand(-1, kv_heads, -1, -1)
    first, end = ranges.unbind(-1)
    q_length = first.shape[-1]
    sees = end > first
    joins = torch.ones_like(sees)
    joins[..., 0] = False
    causal = bool((ranges[..., 1:, :] != ranges[..., :-1, :]).any())
    window = int((end - first).max()) if causal else 0
    if causal:
        begins = torch.maximum(first[..., :-1], end[..., 1:] - window)
        joins[..., 1:] = (end[..., 1:] == end[..., :-1] + 1) & (first[..., 1:] == begins)
        joins[..., 1:] &= sees[..., :-1]
    kept = None if bool(sees.all()) else sees.flatten().nonzero()[:, 0]
    first, end, joins = first.flatten(), end.flatten(), joins.flatten()
    places = torch.arange(first.numel(), device=first.device) if kept is None else kept
    begin = (~joins[places]).nonzero()[:, 0]
    loc = torch.cat((begin, begin.new_tensor([places.numel()])))
    starts, last = places[begin], places[loc[1:] - 1]
    lengths = end[last] - first[starts]
    longest = max(lengths.tolist(), default=0)
    return _Plan(
        kept,
        loc.int(),
        starts // q_length,
        first[starts],
        bool(first[starts].any()),
        lengths.int(),
        longest,
        causal,
        window if window < longest else 0,
    )


def _checked(mask: Tensor, batch: int, q_length: int, kv_length: int) -> Tensor:
    """The ranges of a mask."""
    is_ours = mask.dtype == torch.int32 and mask.dim() == 4
    wanted = (q_length, 2 if is_ours else kv_length)
    good = mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[1] == 1
    if not good or tuple(mask.shape[2:]) != wanted:
        raise RequestError(
            f"attention_mask: expected [{batch}, 1, {wanted[0]}, {wanted[1]}] with {NAME}, "
            f"got {list(mask.shape)}"
        )
    if not is_ours:
        if mask.is_floating_point():
            if bool(((mask != 0) & ~(mask <= HIDDEN)).any()):
                raise RequestError(
                    f"attention_mask: expected 0, or {HIDDEN:g} and less, with {NAME}, "
                    "got other numbers to add to the scores"
                )
            mask = mask == 0
        elif mask.dtype != torch.bool:
            raise RequestError(f"attention_mask: expected bool or floats, got {mask.dtype}")
        seen = _ranges(mask)
        if seen is None:
            raise _has_holes("a mask of the caller with holes")
        mask = seen
    return mask if len(mask) == batch else mask.expand(batch, -1, -1, -1)


def _without_mask(query: Tensor, kv_length: int, causal: bool, window: int | None) -> Tensor:
    """The ranges where a model gives no mask."""
    batch, _, q_length, _ = query.shape
    causal = causal and q_length > 1
    if (causal and q_length != kv_length) or (window and window < kv_length):
        kind = "causal queries" if causal else f"queries with a window of {window} keys"
        raise RequestError(
            f"attention_mask: expected one for {q_length} {kind} of {kv_length} keys with {NAME}, "
            "got None"
        )
    ends = torch.full((q_length,), kv_length, device=query.device)
    if causal:
        ends = torch.arange(1, q_length + 1, device=query.device)
    return torch.stack((torch.zeros_like(ends), ends), dim=1).expand(batch, 1, q_length, 2)


def _refuse(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, asked: dict[str, Any]
) -> None:
    for name in LACKING:
        if asked.get(name) is not None:
            raise RequestError(
                f"{name}: expected none with attn_implementation={NAME!r}, "
                f"got a {type(asked[name]).__name__}"
            )
    if dropout:
        raise RequestError(f"dropout: expected 0 with attn_implementation={NAME!r}, got {dropout}")
    if asked.get("output_attentions"):
        raise RequestError(f"output_attentions: {NAME} has none to give; expected 'eager' for them")
    if query.requires_grad and torch.is_grad_enabled():
        raise RequestError(f"{NAME} has no gradients: expected torch.no_grad(), or 'sdpa' to train")
    batch, _, _, head_dim = query.shape
    wanted = [batch, *key.shape[1:3], head_dim]
    for name, tensor in (("key", key), ("value", value)):
        if list(tensor.shape) != wanted:
            raise RequestError(f"{name}: expected {wanted} with {NAME}, got {list(tensor.shape)}")
