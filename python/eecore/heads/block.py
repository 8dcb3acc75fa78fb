"""Draft heads that draft a whole block in one pass: DFlash and DSpark.

The states after some of the model's layers become keys and values of the head's own layers at every
position that the model has computed. To draft, these layers run once over a block: the last token,
then mask tokens, each of which sees the text and the whole block. The state after the last layer at
a mask gives the draft there. DSpark adds to the logits of a draft what a table says of the token
before it, so that drafts depend on each other, and learns the chance that a draft is accepted.
(DFlash: Chen et al. 2026; DSpark: DeepSpec 2026, arXiv 2607.05147.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from eecore import ops
from eecore.decoding.head_drafts import AheadDrafting, EndedRounds
from eecore.heads.block_drafts import BlockDrafting
from eecore.heads.published import PublishedHead, PublishedSettings
from eecore.models.attention import AttentionBatch
from eecore.models.draft_head import Positions
from eecore.models.kv_cache import KVCache
from eecore.models.linear import product
from eecore.models.llama import LlamaModel, LlamaWeights
from eecore.ops import Matrix


class Markov(NamedTuple):
    """DSpark's table of what a token adds to the logits of the token after it, of a low rank."""

    before: Matrix
    """[vocab_size, rank]: a row for each token."""
    after: Matrix
    """[draft_vocab_size, rank]: the linear layer that gives logits of a row."""

    def corrected(self, logits: Tensor, token_ids: Tensor, row: Tensor) -> Tensor:
        """The logits of a draft with what is added: [num_rows, draft_vocab_size].

        Args:
            logits: [num_rows, draft_vocab_size], any row stride.
            token_ids: int64 [num_rows], the tokens before.
            row: [num_rows, rank], any row stride; the rows of the table are put there.
        """
        table = self.before
        ops.embed_tokens(token_ids, table.weight, scale=table.scale, table=table.table, out=row)
        return product(row, self.after, residual=logits)


@dataclass(frozen=True, kw_only=True)
class BlockSettings(PublishedSettings):
    """The settings of DFlash and DSpark."""

    block_size: int
    """Tokens of a block: the text's last token, and masks."""
    mask_token: int
    """The token at positions to draft."""
    from_last: bool
    """Whether the position of the text's last token gives the first draft."""
    markov_rank: int = 0
    """The rank of the table that changes logits by the token before; 0: there is none."""
    has_confidence: bool = False
    """Whether the head predicts how likely a draft is to be accepted."""
    confidence_sees_token: bool = False
    """Whether the prediction also depends on the token before, by its row of the table."""


class BlockWeights(NamedTuple):
    """The weights of a head."""

    layers: LlamaWeights
    """The head's layers and norm; embeddings and LM head may be the model's."""
    taps: Matrix
    """[num_taps, hidden_size, hidden_size]: the projection of each tap's states."""
    context_norm: Tensor
    """[hidden_size]: the norm of the sum of the projected states."""
    markov: Markov | None = None
    confidence: ops.MlpMeasure | None = None
    tokens: Tensor | None = None
    """int64 [draft_vocab_size]: the model's token of each row of the LM head; None: row t is
    token t."""


class BlockHead(PublishedHead):
    """A head that drafts all tokens of a round in one pass over a block of places, the first of
    which is at the position of the text's last token. It drafts from keys alone, not from a state.

    Args:
        weights: the head's weights, in the model's dtype and on its device.

    Attributes:
        first_place: the place that gives the first draft.
        markov: what the token before a draft adds to its logits; None: nothing.
        confidence: the chance that a draft is accepted if all drafts before it are, from the
            draft's normed state, with the row of the token before where the settings say so; None:
            its probability takes that place.
    """

    def __init__(self, settings: BlockSettings, weights: BlockWeights, path: Path) -> None:
        self.first_place = 0 if settings.from_last else 1
        self.num_at_once = settings.block_size - self.first_place
        agreement = tuple(0.8 - 0.02 * k for k in range(self.num_at_once))
        super().__init__(settings, path, agreement)
        self.settings = settings
        self.markov, self.confidence = weights.markov, weights.confidence
        self._layers = LlamaModel(settings.config, weights.layers)
        self._taps, self._context_norm = weights.taps.unbind(), weights.context_norm
        self._norms = weights.context_norm.expand(settings.config.num_layers, -1)
        self._kv = weights.layers.qkv.rows(slice(settings.config.q_size, None))
        self._tokens = weights.tokens

    @property
    def is_sequential(self) -> bool:
        """Whether a draft, or its confidence, is made after those before it."""
        return self.markov is not None or self.confidence is not None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its states."""
        return self._layers.dtype

    @property
    def tokens(self) -> Tensor | None:
        return self._tokens

    @property
    def measure(self) -> ops.SoftmaxMeasure:
        return self._layers.measure

    def prepare(self, kv: KVCache) -> None:
        """Compute the tables that programs need; a block may reach past the cache's last slot."""
        self._layers.prepare(kv, self.settings.block_size)

    def begin(self, states: Sequence[Tensor], positions: Positions | None = None) -> Tensor:
        assert positions is not None
        begun: Tensor | None = None
        for state, matrix in zip(states, self._taps, strict=True):
            begun = self._layers.linear(state, matrix, residual=begun)
        assert begun is not None
        self._write(begun, positions)
        return begun

    def _write(self, begun: Tensor, positions: Positions) -> None:
        """Write keys and values at positions, from the sum of the projected states there."""
        layers, config, kv, batch = self._layers, self.config, positions.kv, positions.batch
        cos_sin, layer_ropes = layers.tables(kv)
        if layers.linear.is_skinny(begun):
            ops.kv_fill(
                begun,
                positions.first_layers,
                self._norms,
                self._kv,
                kv.k,
                kv.v,
                batch.slot_mapping,
                k_norm_weight=layers.weights.k_norm,
                positions=batch.positions,
                cos_sin=cos_sin,
                eps=config.rms_norm_eps,
                layer_ropes=layer_ropes,
            )
            return
        states = layers.linear.normed(begun, self._context_norm)
        k_norm = layers.weights.k_norm
        for index, ((k_cache, v_cache), matrix) in enumerate(
            zip(kv.layers, self._kv.unbind(), strict=True)
        ):
            both = layers.linear(states, matrix)
            k, v = both.view(len(both), 2, config.num_kv_heads, config.head_dim).unbind(1)
            ops.append_kv(
                None,
                k,
                v,
                k_cache,
                v_cache,
                batch.slot_mapping,
                positions=batch.positions,
                cos_sin=layers.cos_sin(kv.num_pages * kv.page_size, index),
                k_norm_weight=None if k_norm is None else k_norm[index],
                eps=config.rms_norm_eps,
            )

    def drafting(self, rounds: EndedRounds) -> AheadDrafting:
        return BlockDrafting(self, rounds)

    def block(self, token_ids: Tensor, kv: KVCache, batch: AttentionBatch) -> Tensor:
        """States after its layers: [num_tokens, hidden_size].

        Args:
            token_ids: int64 [num_tokens]: of each block the text's last token, then masks.
            kv: of its own layers.
            batch: a sequence for each block, whose queries see the text and the block.
        """
        hidden = self._layers.embed(token_ids)
        return self._layers.layers(0, self.config.num_layers, hidden, kv, batch)

    def normed(self, hidden: Tensor, zeros: Tensor, out: Tensor) -> Tensor:
        """Normed states.

        Args:
            hidden: [num_rows, hidden_size], from :meth:`block`.
            zeros: zeros, [num_rows, hidden_size].
            out: [num_rows, hidden_size], any row stride.
        """
        norm, eps = self._layers.weights.final_norm, self.config.rms_norm_eps
        return ops.add_normed(hidden, norm, zeros, eps=eps, out=out)

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, draft_vocab_size] of states from :meth:`block`, in the model's dtype."""
        return self._layers.logits(hidden, dtype=self.dtype)
