"""A draft head: what drafts tokens after the last layer of a model that it was trained for.

It starts from the state after the last layer, and after some layers before, at the last position
that the model has computed, and from the token that the model gave there. Each of its steps is an
MLP and a head over the tokens that the model uses most. Before the MLP it may attend to keys and
values that the model itself has in its cache (GLIDE, Du et al. 2024), of all positions that the
model has computed; it has none of its own, so that nothing is kept between rounds. (After Medusa,
Cai et al. 2024; Hydra, Ankner et al. 2024; EAGLE-3, Li et al. 2025; recurrent drafter, Zhang et al.
2024.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eecore import ops
from eecore.config import ModelConfig
from eecore.models.attention import AttentionBatch
from eecore.models.head_vocabulary import NUM_SPARE, HeadVocabulary, matrix_rows
from eecore.models.kv_cache import KVCache
from eecore.models.linear import Linear
from eecore.ops import Matrix

__all__ = ["DraftHead", "HeadModel", "HeadSettings", "SeenKeys", "head_floats", "packed"]

LAYERS = "Q4_1"
"""Blocks of a head's own matrices."""
OWN_ROWS = "Q8_0"
"""Blocks of these rows where the model's own confidence is measured, and its LM head has blocks."""


@dataclass(frozen=True)
class HeadSettings:
    """What a head's ``head.json`` says of it."""

    digest: str
    """The digest of the model, see :func:`eecore.models.network_digest`."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    weights: str
    """What the model's weights were stored in when it was trained."""
    taps: tuple[int, ...]
    """Layers after which it takes the state, ascending; the last one is the model's last."""
    intermediate_size: int
    num_blocks: int
    vocabulary_size: int
    agreement: tuple[float, ...]
    """How often the first draft is the model's own token on held-out text, the second, ..."""
    attended: tuple[tuple[int, int], ...] = ()
    """(layer, key head) whose keys and values in the model's cache each step attends to; layers
    from 0."""
    queries: int = 0
    """Features of the queries to one key head, all its query heads together; 0 without any."""


class HeadWeights(Protocol):
    """The weights of a model that its draft head shares."""

    @property
    def final_norm(self) -> Tensor:
        """[hidden_size]"""
        ...

    @property
    def lm_head(self) -> Matrix:
        """[vocab_size, hidden_size]"""
        ...


class HeadModel(Protocol):
    """What a draft head needs of the model that it drafts for, :class:`LlamaModel` for one."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    linear: Linear

    @property
    def measure(self) -> ops.SoftmaxMeasure:
        """What the model's own confidence is measured with."""
        ...

    @property
    def weights(self) -> HeadWeights:
        """The model's own, which are not changed."""
        ...

    def embed(
        self, token_ids: Tensor, *, previous: Tensor | None = None, sources: Tensor | None = None
    ) -> Tensor:
        """[num_tokens, hidden_size] of int64 ids [num_tokens]; see :meth:`Decoder.embed`."""
        ...

    def rotate(
        self,
        q: Tensor,
        layer: int,
        positions: Tensor,
        kv: KVCache,
        no_keys: tuple[Tensor, Tensor],
    ) -> None:
        """Give queries the rotary embedding of a layer, in place."""
        ...

    def attend(
        self, q: Tensor, layer: int, heads: slice, kv: KVCache, texts: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        """What queries find among keys of a layer: [num_rows, num_heads, head_dim]."""
        ...


class _Block(NamedTuple):
    norm: Tensor
    gate_up: Matrix
    down: Matrix


class _Asked(NamedTuple):
    """Key heads of one layer that one call asks."""

    layer: int
    heads: slice
    queries: slice
    """The queries among those of all query heads."""
    output: Matrix
    """[hidden_size, features of these queries]"""


@dataclass(frozen=True)
class _Attention:
    norm: Tensor
    query: Matrix
    """[attended * queries, hidden_size]"""
    asked: Sequence[_Asked]


@dataclass(frozen=True)
class SeenKeys:
    """What a step attends to: the keys of rows' texts, in the model's layers or the head's own."""

    kv: KVCache
    batch: AttentionBatch
    """One query a row, at the position of the token that the step takes; ``seq_lens``: the keys of
    the model, those of drafts not among them. Of a :class:`KeyedHead` one query at the position
    before it, whose key is written first; ``seq_lens`` count it."""
    no_keys: tuple[Tensor, Tensor]
    """See :meth:`LlamaModel.no_keys`."""


class DraftHead:
    """A head beside the model that it drafts for.

    On the CPU it drafts with blocks of 4 and 5 bits, whatever the model's weights are, since a
    draft is verified and has to cost little. Elsewhere its matrices are floats of the model's
    dtype.

    Args:
        network: the model; not changed.
        path: the pack's directory.
        settings: what its ``head.json`` says.
        tensors: of the pack, by name: float32, and matrices in uint8 as blocks of 4 bits.
        vocabulary: int64 [vocabulary_size], the tokens that it always knows.
    """

    def __init__(
        self,
        network: HeadModel,
        path: Path,
        settings: HeadSettings,
        tensors: Mapping[str, Tensor],
        vocabulary: Tensor,
    ) -> None:
        self.path, self.settings = path, settings
        self._linear = network.linear
        self._eps = network.config.rms_norm_eps
        form = _Form(network)
        norm, matrix = form.floats, form.matrix
        self._taps = [
            (norm(tensors["taps.norm"][i]), matrix(tensors["taps.weight"][i]))
            for i in range(len(self.settings.taps))
        ]
        self._state = norm(tensors["state.norm"]), matrix(tensors["state.weight"])
        self._token = norm(tensors["token.norm"]), matrix(tensors["token.weight"])
        self._blocks = [
            _Block(
                norm(tensors["mlp.norm"][i]),
                matrix(torch.cat((tensors["mlp.gate"][i], tensors["mlp.up"][i]))),
                matrix(tensors["mlp.down"][i]),
            )
            for i in range(self.settings.num_blocks)
        ]
        self._network = network
        self._attention: _Attention | None = None
        if self.settings.attended:
            a_key = self.settings.queries // network.config.head_dim
            outputs = tensors["attention.output"]
            self._attention = _Attention(
                norm(tensors["attention.norm"]),
                matrix(tensors["attention.query"].flatten(0, 1)),
                [
                    _Asked(
                        layer,
                        heads,
                        slice(first * a_key, end * a_key),
                        matrix(outputs[first:end].transpose(0, 1).flatten(1)),
                    )
                    for layer, heads, first, end in _calls(self.settings.attended)
                ],
            )
        self._norm, self._final_norm = norm(tensors["norm"]), network.weights.final_norm
        self.vocabulary = vocabulary.to(network.device)
        """int64 [vocabulary_size]: the tokens that it always knows."""
        self._lm_head = network.weights.lm_head
        self._texts: HeadVocabulary | None = None
        if form.packs:
            self._texts = HeadVocabulary(self._lm_head, self.vocabulary, NUM_SPARE)
        self._head = (
            matrix(matrix_rows(self._lm_head, self.vocabulary))
            if self._texts is None
            else self._texts.rows
        )

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers after which it takes the state."""
        return self.settings.taps

    @property
    def agreement(self) -> tuple[float, ...]:
        """How often the first draft is the model's own token on held-out text, the second, ..."""
        return self.settings.agreement

    @property
    def tokens(self) -> Tensor:
        """int64 [num_rows]: the token of each row of its head, those of texts among them."""
        return self.vocabulary if self._texts is None else self._texts.tokens

    def know(self, token_ids: Sequence[int]) -> None:
        """Have it draft these tokens, too, until others have taken their place; on the CPU."""
        if self._texts is not None:
            self._texts.take(token_ids)

    def begin(self, states: Sequence[Tensor]) -> Tensor:
        """What it starts from: [num_rows, hidden_size].

        Args:
            states: after each of the taps' layers, [num_rows, hidden_size].
        """
        begun: Tensor | None = None
        for state, (norm, weight) in zip(states, self._taps, strict=True):
            begun = self._linear(state, weight, norm=norm, residual=begun, few=True)
        assert begun is not None
        return begun

    def embed(self, token_ids: Tensor) -> Tensor:
        """What :meth:`step` takes of tokens: [num_rows, hidden_size] of int64 ids [num_rows]."""
        return self._network.embed(token_ids)

    @property
    def attends(self) -> bool:
        """Whether its steps want keys of the model."""
        return self._attention is not None

    def step(self, state: Tensor, embedded: Tensor, seen: SeenKeys | None = None) -> Tensor:
        """The state after one more token.

        Args:
            state: [num_rows, hidden_size], of :meth:`begin` or of the step before.
            embedded: [num_rows, hidden_size], the token's embedding.
            seen: where it :attr:`attends`.
        """
        norm, weight = self._state
        hidden = self._linear(state, weight, norm=norm, few=True)
        norm, weight = self._token
        hidden = self._linear(embedded, weight, norm=norm, residual=hidden, few=True)
        if self._attention is not None:
            assert seen is not None
            hidden = self._attended(hidden, self._attention, seen)
        for block in self._blocks:
            gated = ops.skinny_gated_linear(
                hidden,
                block.gate_up.weight,
                weight_table=block.gate_up.table,
                norm_weight=block.norm,
                eps=self._eps,
                constant_weight=True,
            )
            hidden = self._linear(gated, block.down, residual=hidden, few=True)
        return hidden

    def _attended(self, hidden: Tensor, attention: _Attention, seen: SeenKeys) -> Tensor:
        """The state, and what its queries find."""
        network, kv, batch = self._network, seen.kv, seen.batch
        texts = batch.page_table, batch.seq_lens, batch.query_start_loc
        q = self._linear(hidden, attention.query, norm=attention.norm, few=True)
        q = q.view(len(q), -1, network.config.head_dim)
        # A head attends to keys that are rotated alike: it is trained so.
        network.rotate(q, attention.asked[0].layer, batch.positions, kv, seen.no_keys)
        for asked in attention.asked:
            found = network.attend(q[:, asked.queries], asked.layer, asked.heads, kv, texts)
            hidden = self._linear(found.flatten(1), asked.output, residual=hidden, few=True)
        return hidden

    @property
    def measure(self) -> ops.SoftmaxMeasure:
        """The measure of a state: over :attr:`tokens`, by their places among them."""
        return self._measured_by(self._norm, self._head)

    def _measured_by(self, norm: Tensor, head: Matrix) -> ops.SoftmaxMeasure:
        """The model's own measure, with another norm and some rows of the LM head."""
        own = self._network.measure
        return own._replace(
            norm_weight=norm,
            lm_head=head.weight,
            lm_head_scale=head.scale,
            lm_head_table=head.table,
        )

    def gap(self, hidden: Tensor) -> Tensor:
        """The top-2 probability gap of the model's own states, among the tokens always known here.

        Args:
            hidden: [num_rows, hidden_size], after any of the model's layers.

        Returns:
            float32 [num_rows].
        """
        return self._measured_by(self._final_norm, self._own_rows)(hidden).confidence

    def prepare_gap(self) -> None:
        """Have what :meth:`gap` multiplies by, before a program that calls it is recorded."""
        _ = self._own_rows

    @cached_property
    def _own_rows(self) -> Matrix:
        """Rows of the model's LM head, as exact as that: floats where it has floats."""
        if self._texts is None:
            return self._head
        if self._lm_head.is_quantised:
            return packed(matrix_rows(self._lm_head, self.vocabulary), OWN_ROWS)
        return Matrix(self._lm_head.weight[self.vocabulary])

    @cached_property
    def vocabulary_sha256(self) -> str:
        """The digest of the tokens that it always knows."""
        return hashlib.sha256(self.vocabulary.cpu().numpy().tobytes()).hexdigest()


def _calls(attended: Sequence[tuple[int, int]]) -> list[tuple[int, slice, int, int]]:
    """Layer, key heads of one call, and which of all that are attended to: first and end.

    Those of one layer that follow one another at equal steps are asked in one call.
    """
    calls: list[tuple[int, slice, int, int]] = []
    first = 0
    while first < len(attended):
        layer, head = attended[first]
        end, step = first + 1, 1
        while end < len(attended) and attended[end][0] == layer:
            apart = attended[end][1] - attended[end - 1][1]
            if apart < 1 or (end > first + 1 and apart != step):
                break
            end, step = end + 1, apart
        calls.append((layer, slice(head, attended[end - 1][1] + 1, step), first, end))
        first = end
    return calls


class _Form:
    """How one model's head stores its numbers."""

    def __init__(self, network: HeadModel) -> None:
        self._device, self._dtype = network.device, network.dtype
        self._hidden_size = network.config.hidden_size

    @property
    def packs(self) -> bool:
        """Whether in blocks, where they are as long as these."""
        return self._device.type == "cpu" and self._hidden_size % 32 == 0

    def floats(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype).contiguous()

    def matrix(self, tensor: Tensor) -> Matrix:
        if self.packs and tensor.dtype == torch.uint8:
            return ops.pack_weight(tensor.contiguous(), LAYERS)
        if self.packs and tensor.shape[-1] % 32 == 0:
            return packed(tensor, LAYERS)
        return Matrix(self.floats(head_floats(tensor)))


def head_floats(tensor: Tensor) -> Tensor:
    """A tensor of a pack in float32: blocks of 4 bits as the numbers that they stand for."""
    if tensor.dtype != torch.uint8:
        return tensor.float()
    packed = ops.pack_weight(tensor.flatten(0, -2).contiguous(), LAYERS)
    assert packed.table is not None
    return ops.unpack_weight(packed.weight, packed.table).view(*tensor.shape[:-1], -1)


def packed(tensor: Tensor, format: str) -> Matrix:
    """A matrix of floats in blocks of a format, of the bits that a CPU drafts with."""
    return ops.pack_weight(ops.quantise_weight(tensor.float().contiguous(), format), format)
