"""A draft head, which drafts tokens after the last layer of the model that it was trained for.

It starts from the states after the last layer and some earlier layers, at the last position that
the model has computed, and from the token that the model gave there. Each step is an MLP and a head
over the tokens that the model uses most. Before the MLP a step may attend to the model's keys and
values of all positions that the model has computed (GLIDE, Du et al. 2024); the head has no keys of
its own, so nothing is kept between rounds. (After Medusa, Cai et al. 2024; Hydra, Ankner et al.
2024; Li et al. 2025; recurrent drafter, Zhang et al. 2024.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from eecore import ops
from eecore.models.draft_head import DraftHead, Positions, SeenKeys
from eecore.models.head_vocabulary import NUM_SPARE, HeadVocabulary, matrix_rows
from eecore.models.llama import LlamaModel
from eecore.ops import Matrix

LAYERS = "Q4_1"
"""The block format of a head's own matrices."""
OWN_ROWS = "Q8_0"
"""The block format of the rows of the model's LM head that :meth:`RecurrentHead.gap` multiplies
by, if the LM head is quantised."""


@dataclass(frozen=True)
class HeadSettings:
    """The settings in a head's ``head.json``."""

    digest: str
    """The digest of the model, see :func:`eecore.models.network_digest`."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    weights: str
    """How the model's weights were stored when the head was trained."""
    taps: tuple[int, ...]
    """Layers after which the head takes the state, ascending, up to the model's last layer."""
    intermediate_size: int
    num_blocks: int
    vocabulary_size: int
    agreement: tuple[float, ...]
    """How often the first draft is the model's own token on held-out text, the second, ..."""
    attended: tuple[tuple[int, int], ...] = ()
    """(layer, key head) pairs that each step attends to in the model's cache; layers from 0."""
    queries: int = 0
    """Features of the queries to one key head, all its query heads together; 0: no attention."""


class _Block(NamedTuple):
    norm: Tensor
    gate_up: Matrix
    down: Matrix


class _KeyHeads(NamedTuple):
    """Key heads of one layer that one call of attention reads."""

    layer: int
    heads: slice
    queries: slice
    """The query heads of this call, among all query heads."""
    output: Matrix
    """[hidden_size, features of these queries]"""


@dataclass(frozen=True)
class _Attention:
    norm: Tensor
    query: Matrix
    """[attended * queries, hidden_size]"""
    key_heads: Sequence[_KeyHeads]


class RecurrentHead(DraftHead):
    """A head, with the model that it drafts for.

    On the CPU it drafts with blocks of 4 and 5 bits, however the model's weights are stored, since
    a draft is verified and has to be cheap. Elsewhere its matrices are floats of the model's dtype.

    Args:
        tensors: the pack's tensors by name: float32, or matrices in uint8 as blocks of 4 bits.
        vocabulary: int64 [vocabulary_size], the tokens that the head always knows.
    """

    kind = "recurrent"

    def __init__(
        self,
        network: LlamaModel,
        path: Path,
        settings: HeadSettings,
        tensors: Mapping[str, Tensor],
        vocabulary: Tensor,
    ) -> None:
        self.path, self.settings = path, settings
        self.taps, self.agreement = settings.taps, settings.agreement
        self.attends = bool(settings.attended)
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
            per_key = self.settings.queries // network.config.head_dim
            outputs = tensors["attention.output"]
            self._attention = _Attention(
                norm(tensors["attention.norm"]),
                matrix(tensors["attention.query"].flatten(0, 1)),
                [
                    _KeyHeads(
                        layer,
                        heads,
                        slice(first * per_key, end * per_key),
                        matrix(outputs[first:end].transpose(0, 1).flatten(1)),
                    )
                    for layer, heads, first, end in _calls(self.settings.attended)
                ],
            )
        self._norm, self._final_norm = norm(tensors["norm"]), network.weights.final_norm
        self.vocabulary = vocabulary.to(network.device)
        """int64 [vocabulary_size]: the tokens that the head always knows; on the CPU it also drafts
        tokens of the current texts."""
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
    def tokens(self) -> Tensor:
        return self.vocabulary if self._texts is None else self._texts.tokens

    def know(self, token_ids: Sequence[int]) -> None:
        if self._texts is not None:
            self._texts.take(token_ids)

    def begin(self, states: Sequence[Tensor], positions: Positions | None = None) -> Tensor:  # noqa: ARG002 (it has no keys)
        begun: Tensor | None = None
        for state, (norm, weight) in zip(states, self._taps, strict=True):
            begun = self._linear(state, weight, norm=norm, residual=begun, few=True)
        assert begun is not None
        return begun

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._network.embed(token_ids)

    def step(self, state: Tensor, embedded: Tensor, seen: SeenKeys | None = None) -> Tensor:
        norm, weight = self._state
        hidden = self._linear(state, weight, norm=norm, few=True)
        norm, weight = self._token
        hidden = self._linear(embedded, weight, norm=norm, residual=hidden, few=True)
        if self._attention is not None:
            assert seen is not None
            hidden = self._attended(hidden, self._attention, seen)
        for block in self._blocks:
            gated = self._linear.gated(hidden, block.gate_up, block.norm, few=True)
            hidden = self._linear(gated, block.down, residual=hidden, few=True)
        return hidden

    def _attended(self, hidden: Tensor, attention: _Attention, seen: SeenKeys) -> Tensor:
        """The state plus the output of its attention to the model's keys."""
        network, kv, batch = self._network, seen.kv, seen.batch
        texts = batch.page_table, batch.seq_lens, batch.query_start_loc
        q = self._linear(hidden, attention.query, norm=attention.norm, few=True)
        q = q.view(len(q), -1, network.config.head_dim)
        # All layers that a head attends to rotate alike: it is trained that way.
        network.rotate(q, attention.key_heads[0].layer, batch.positions, kv, seen.no_keys)
        for heads in attention.key_heads:
            found = network.attend(q[:, heads.queries], heads.layer, heads.heads, kv, texts)
            hidden = self._linear(found.flatten(1), heads.output, residual=hidden, few=True)
        return hidden

    @property
    def measure(self) -> ops.SoftmaxMeasure:
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
        return self._measured_by(self._final_norm, self._own_rows)(hidden).confidence

    def prepare_gap(self) -> None:
        _ = self._own_rows

    @cached_property
    def _own_rows(self) -> Matrix:
        """The vocabulary's rows of the model's LM head: floats if the LM head is in floats."""
        if self._texts is None:
            return self._head
        if self._lm_head.is_quantised:
            return packed(matrix_rows(self._lm_head, self.vocabulary), OWN_ROWS)
        return Matrix(self._lm_head.weight[self.vocabulary])

    @cached_property
    def vocabulary_sha256(self) -> str:
        return hashlib.sha256(self.vocabulary.cpu().numpy().tobytes()).hexdigest()


def _calls(attended: Sequence[tuple[int, int]]) -> list[tuple[int, slice, int, int]]:
    """The calls of attention: layer, key heads, and their range in ``attended``, first and end.

    Key heads of one layer at equal steps share a call.
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
    """How one model's head stores its weights."""

    def __init__(self, network: LlamaModel) -> None:
        self._device, self._dtype = network.device, network.dtype
        self._hidden_size = network.config.hidden_size

    @property
    def packs(self) -> bool:
        """Whether in blocks: on the CPU, if rows are whole blocks."""
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
    """A tensor of a pack in float32, with blocks of 4 bits dequantised."""
    if tensor.dtype != torch.uint8:
        return tensor.float()
    packed = ops.pack_weight(tensor.flatten(0, -2).contiguous(), LAYERS)
    assert packed.table is not None
    return ops.unpack_weight(packed.weight, packed.table).view(*tensor.shape[:-1], -1)


def packed(tensor: Tensor, format: str) -> Matrix:
    """A matrix of floats, quantised to a block format and packed."""
    return ops.pack_weight(ops.quantise_weight(tensor.float().contiguous(), format), format)
