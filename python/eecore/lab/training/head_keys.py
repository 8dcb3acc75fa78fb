"""The keys and values of a model that a draft head attends to while it is trained."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eecore.models import KVCache, LlamaModel

REPEATED = 120
"""Random tokens, repeated once, to find the heads that attend to what came after the first
occurrence; fewer where the model has fewer positions.
"""

Attended = tuple[tuple[int, int], ...]
"""Pairs of a layer, from 0, and a key head."""


@torch.inference_mode()
def choose_attended(network: LlamaModel, count: int) -> Attended:
    """The key heads of a model that attend most to what followed an earlier occurrence of a
    token.

    These are its induction heads (Olsson et al. 2022): their queries ask where a token was before,
    and their values say what followed. At most ``count``, from layers that attend to whole texts
    and whose queries are rotated alike. None for a model that caps scores, which a head does not
    learn, or that has layers without keys.
    """
    config = network.config
    whole = [layer for layer, window in enumerate(config.layer_windows) if not window]
    alike = {layer for layer in whole if network.rotate_alike((whole[0], layer))}
    if config.attention_soft_cap is not None or config.conv_layers or config.delta:
        return ()
    repeated = min(REPEATED, (config.max_position - 1) // 2)
    if repeated < 2:
        return ()
    some = torch.randint(config.vocab_size, (repeated,), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat((some[:1], some, some)).to(network.device)
    length = len(tokens)
    kv = KVCache.allocate(config, 1, length, device=network.device, dtype=network.dtype)
    batch = network.whole_text(length)
    rows = torch.arange(repeated + 1, length - 1)
    scores = torch.zeros(config.num_layers, config.num_kv_heads)
    hidden = network.embed(tokens)
    groups = (config.num_kv_heads, config.num_q_heads // config.num_kv_heads)
    for layer in range(config.num_layers):
        queries = network.queries(layer, hidden)
        network.rotate(queries, layer, batch.positions, kv, network.no_keys(length))
        hidden = network.layers(layer, layer + 1, hidden, kv, batch)
        if layer not in alike:
            continue
        keys = kv.k[layer, 0].float().transpose(0, 1)  # [key heads, length, head_dim]
        heads = queries.float().transpose(0, 1).reshape(*groups, length, -1)
        looks = heads @ keys[:, None].transpose(2, 3) * network.attention_scale
        later = torch.ones(length, length, dtype=torch.bool, device=keys.device).triu(1)
        shares = looks.masked_fill(later, -torch.inf).softmax(-1)
        scores[layer] = shares[:, :, rows, rows - repeated + 1].sum((1, 2)).cpu()
    best = torch.argsort(scores.flatten(), descending=True, stable=True)[:count]
    found = [divmod(int(place), config.num_kv_heads) for place in best]
    return tuple(sorted(pair for pair in found if pair[0] in alike))


def keys_at(kv: KVCache, attended: Attended, slots: Tensor) -> Tensor:
    """The keys and values of slots, int64 [num_tokens]: [num_tokens, num_attended, 2, head_dim]."""
    found = [
        torch.stack([cache[:, :, head].flatten(0, 1)[slots] for cache in kv.layers[layer]], 1)
        for layer, head in attended
    ]
    return torch.stack(found, 1)


def is_last(text: Tensor) -> Tensor:
    """Whether each row is the last of its text: bool [n], for int64 [n] text indices."""
    last = torch.ones_like(text, dtype=torch.bool)
    last[:-1] = text[1:] != text[:-1]
    return last


def key_begins(text: Tensor, positions: Tensor) -> Tensor:
    """For each row the place where the keys of its text begin: int64 [n]; texts follow each
    other.

    Args:
        text: int64 [n], the rows' texts.
        positions: int64 [n], their positions; the keys of a text end with its last row's.
    """
    last = is_last(text)
    lengths = positions[last] + 1
    begins = lengths.cumsum(0) - lengths
    which = last.long().cumsum(0) - last.long()
    return begins[which]


@dataclass(frozen=True)
class TextKeys:
    """Keys and values that rows attend to; rows of one text follow one another.

    Attributes:
        keys: bfloat16 [num_texts, num_attended, longest, head_dim].
        values: likewise.
        place: int64 [n], the text of each row, ascending.
        seen: int64 [n], the number of keys that the row sees: those before it drafted.
        positions: int64 [n], positions of the tokens of the next step.
        cos_sin: float32 [max_position, rotary_dim].
        scale: the scores' factor; None: head_dim**-0.5.
    """

    keys: Tensor
    values: Tensor
    place: Tensor
    seen: Tensor
    positions: Tensor
    cos_sin: Tensor
    scale: float | None = None

    @classmethod
    def of(
        cls,
        stored: Tensor,
        begins: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        scale: float | None = None,
    ) -> TextKeys:
        """The keys and values for rows that start to draft.

        Args:
            stored: keys on disk, [m, num_attended, 2, head_dim].
            begins: int64 [n], where the keys of each row's text begin among all of them.
            positions: int64 [n], the rows' positions.
            scale: the scores' factor; None: head_dim**-0.5.
        """
        firsts, place = torch.unique_consecutive(begins, return_inverse=True)
        lengths = torch.zeros_like(firsts).scatter_reduce_(0, place, positions + 1, "amax")
        longest = int(lengths.max())
        both = torch.zeros(
            len(firsts), 2, stored.shape[1], longest, stored.shape[3], dtype=torch.bfloat16
        )
        for i, (first, length) in enumerate(zip(firsts.tolist(), lengths.tolist(), strict=True)):
            both[i, :, :, :length] = stored[first : first + length].permute(2, 1, 0, 3)
        keys, values = both.unbind(1)
        return cls(keys, values, place, positions + 1, positions + 1, cos_sin, scale)

    def rows(self, index: Tensor) -> TextKeys:
        """Some of the rows, in their order: int64 indices, or bool."""
        return replace(
            self,
            place=self.place[index],
            seen=self.seen[index],
            positions=self.positions[index],
        )

    def advanced(self) -> TextKeys:
        """The same rows a token later; the keys stay as they are."""
        return replace(self, positions=self.positions + 1)

    def found(self, queries: Tensor) -> Tensor:
        """The attention of queries over the keys: float32 [n, num_attended, queries].

        Args:
            queries: [n, num_attended, queries], not rotated.
        """
        count, head_dim = self.keys.shape[1], self.keys.shape[3]
        heads = self._rotated(queries.reshape(*queries.shape[:2], -1, head_dim))
        # Rows of one text side by side, padded to the longest.
        counts = torch.bincount(self.place, minlength=len(self.keys))
        offset = torch.arange(len(self.place)) - (counts.cumsum(0) - counts)[self.place]
        shape = (len(self.keys), int(counts.max()))
        spread = heads.new_zeros(*shape, count, heads.shape[2], head_dim)
        spread[self.place, offset] = heads
        seen = torch.ones(shape, dtype=torch.int64)
        seen[self.place, offset] = self.seen
        sees = torch.arange(self.keys.shape[2]) < seen[..., None]
        q = spread.permute(0, 2, 3, 1, 4).bfloat16()  # texts, attended, heads, rows, head_dim
        out = torch.nn.functional.scaled_dot_product_attention(
            q.flatten(0, 1),
            self.keys[:, :, None].expand(-1, -1, q.shape[2], -1, -1).flatten(0, 1),
            self.values[:, :, None].expand(-1, -1, q.shape[2], -1, -1).flatten(0, 1),
            attn_mask=sees[:, None].expand(-1, count, -1, -1).flatten(0, 1)[:, None],
            scale=self.scale,
        )
        found: Tensor = out.view(q.shape).permute(0, 3, 1, 2, 4)[self.place, offset]
        return found.flatten(2).float()

    def _rotated(self, heads: Tensor) -> Tensor:
        table = self.cos_sin[self.positions.clamp(max=len(self.cos_sin) - 1)]
        cos, sin = table[:, None, None].chunk(2, -1)
        half = cos.shape[-1]
        a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
