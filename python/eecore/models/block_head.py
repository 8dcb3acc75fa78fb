"""Draft heads that draft a whole block in one pass: DFlash, and DSpark with its corrections.

The states after some of the model's layers become keys and values of the head's own layers at every
position that the model has computed. To draft, these layers run once over a block: the last token,
then mask tokens, each of which sees the text and the whole block. The state after the last layer at
a mask gives the draft there. DSpark adds a low-rank table's values for the token before to a
draft's logits, so that drafts depend on each other, and learns the chance that a draft is accepted.
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
from eecore.config import ModelConfig
from eecore.models.attention import AttentionBatch
from eecore.models.keyed_head import KeyedHead
from eecore.models.kv_cache import KVCache
from eecore.models.llama import LlamaModel, LlamaWeights
from eecore.ops import Matrix

__all__ = ["BlockHead", "BlockSettings", "BlockWeights", "Markov"]


@dataclass(frozen=True)
class BlockSettings:
    """The settings in a head's files."""

    kind: str
    """``DFlash`` or ``DSpark``."""
    config: ModelConfig
    """The config of the head's layers, as if they were a model."""
    taps: tuple[int, ...]
    """Layers of the model after which the head takes the state."""
    block_size: int
    """Tokens of a block: the text's last token, and masks."""
    mask_token: int
    """The token at positions to draft."""
    from_last: bool
    """Whether the position of the text's last token gives the first draft."""
    draft_vocab_size: int
    """Rows of the head's LM head."""
    markov_rank: int = 0
    """The rank of the table that changes logits by the token before; 0: there is none."""
    has_confidence: bool = False
    """Whether the head predicts how likely a draft is to be accepted."""
    confidence_sees_token: bool = False
    """Whether the prediction also depends on the token before, by its row of the table."""
    verifier: str = ""
    """The name of the model that the head was trained for; empty: unknown."""

    @property
    def num_drafts(self) -> int:
        """Drafts of a block."""
        return self.block_size - (not self.from_last)


class Markov(NamedTuple):
    """A low-rank table: what the token before a draft adds to the draft's logits."""

    before: Matrix
    """[vocab_size, rank]: a row for each token before a draft."""
    after: Matrix
    """[draft_vocab_size, rank]: a row for each draft."""


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
    """The chance that a draft is accepted if all drafts before it are, from the draft's normed
    state, with the row of the token before where the settings say so."""
    tokens: Tensor | None = None
    """int64 [draft_vocab_size]: the model's token of each row of the LM head; None: row t is
    token t."""


class BlockHead(KeyedHead):
    """A head that drafts a block in one pass.

    Args:
        settings: the settings in the head's files.
        weights: the head's weights, in the model's dtype and on its device.
        path: the head's directory.
    """

    def __init__(self, settings: BlockSettings, weights: BlockWeights, path: Path) -> None:
        self.settings, self.path, self.kind = settings, path, settings.kind
        self.config, self.taps = settings.config, settings.taps
        self.verifier = settings.verifier
        self.agreement = tuple(0.8 - 0.02 * k for k in range(settings.num_drafts))
        self.markov, self.confidence = weights.markov, weights.confidence
        self._layers = LlamaModel(settings.config, weights.layers)
        self._taps, self._context_norm = weights.taps.unbind(), weights.context_norm
        self._norms = weights.context_norm.expand(settings.config.num_layers, -1)
        self._kv = weights.layers.qkv.rows(slice(settings.config.q_size, None))
        self._tokens = weights.tokens
        self._zeros: list[Tensor] = []

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the head's states."""
        return self._layers.dtype

    @property
    def num_drafts(self) -> int:
        """Drafts of a block."""
        return self.settings.num_drafts

    @property
    def num_parameters(self) -> int:
        """Weights that the head does not share with the model."""
        config, rank = self.config, self.settings.markov_rank
        shared = 2 * config.vocab_size * config.hidden_size
        own = config.num_parameters - shared + config.vocab_size * rank
        own += self.settings.draft_vocab_size * rank
        return own + len(self.taps) * config.hidden_size**2 + config.hidden_size

    @property
    def tokens(self) -> Tensor | None:
        """int64 [draft_vocab_size]: the model's token of each row of the head's LM head; None: row
        t is token t."""
        return self._tokens

    @property
    def measure(self) -> ops.SoftmaxMeasure:
        """The measure of a state of :meth:`block`; its tokens are rows of the head's LM head."""
        return self._layers.measure

    def prepare(self, kv: KVCache) -> None:
        """Compute the tables that programs need; a block may reach past the cache's last slot."""
        self._layers.prepare(kv, self.settings.block_size)

    def begin(self, states: Sequence[Tensor]) -> Tensor:
        """The sum of the taps' projected states: [num_rows, hidden_size].

        Args:
            states: the states after each of the :attr:`taps`, [num_rows, hidden_size].
        """
        begun: Tensor | None = None
        for state, matrix in zip(states, self._taps, strict=True):
            begun = self._layers.linear(state, matrix, residual=begun)
        assert begun is not None
        return begun

    def fill(
        self,
        begun: Tensor,
        made: Tensor,  # noqa: ARG002 (a position's keys do not depend on the next token)
        sources: Tensor,  # noqa: ARG002
        kv: KVCache,
        positions: Tensor,
        slot_mapping: Tensor,
        starts: Tensor | None = None,  # noqa: ARG002
    ) -> None:
        """Write the head's keys and values at positions that the model has computed."""
        layers, config = self._layers, self.config
        cos_sin, layer_ropes = layers.tables(kv)
        if layers.linear.is_skinny(begun):
            self.reserve(len(begun))
            ops.kv_fill(
                begun,
                self._zeros[-1][: len(begun)],
                self._norms,
                self._kv,
                kv.k,
                kv.v,
                slot_mapping,
                k_norm_weight=layers.weights.k_norm,
                positions=positions,
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
                slot_mapping,
                positions=positions,
                cos_sin=layers.cos_sin(kv.num_pages * kv.page_size, index),
                k_norm_weight=None if k_norm is None else k_norm[index],
                eps=config.rms_norm_eps,
            )

    def reserve(self, num_rows: int) -> None:
        """Allocate the first layer's number, 0, which :meth:`fill` needs for each of its rows."""
        if not self._zeros or len(self._zeros[-1]) < num_rows:
            size = 1 << max(num_rows - 1, 63).bit_length()
            zeros = torch.zeros(size, dtype=torch.int32, device=self._layers.device)
            self._zeros.append(zeros)  # recorded programs keep the earlier ones

    def block(self, token_ids: Tensor, kv: KVCache, batch: AttentionBatch) -> Tensor:
        """States after the head's layers: [num_tokens, hidden_size].

        Args:
            token_ids: int64 [num_tokens]: for each block the text's last token, then masks.
            kv: the cache of the head's layers.
            batch: a sequence for each block, not causal; its keys are the text's and the block's.
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
        return self._layers.logits(hidden, few=True)

    def row_before(self, token_ids: Tensor, out: Tensor) -> Tensor:
        """The rows of tokens in the low-rank table: [num_rows, rank].

        Args:
            token_ids: int64 [num_rows], the tokens before the drafts.
            out: [num_rows, rank], any row stride.
        """
        assert self.markov is not None
        table = self.markov.before
        return ops.embed_tokens(
            token_ids, table.weight, scale=table.scale, table=table.table, out=out
        )

    def corrected(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Logits plus what the tokens before add to them: [num_rows, draft_vocab_size].

        Args:
            logits: [num_rows, draft_vocab_size], any row stride.
            rows: [num_rows, rank], from :meth:`row_before`.
        """
        assert self.markov is not None
        return self._layers.linear(rows, self.markov.after, residual=logits, few=True)
