"""Draft heads that draft a whole block in one pass: DFlash, and DSpark with its corrections.

The states after some of the model's layers become keys and values of the head's own layers at every
position that the model has computed. A draft is one pass of these layers over a block: the last
token, then mask tokens, each of which sees the text and the whole block. What stands behind the
last layer at a mask gives the draft there. DSpark adds to the logits of a draft what its low-rank
table says of the token before it, so that one draft knows the other, and a learnt chance that the
draft is accepted. (DFlash: Chen et al. 2026; DSpark: DeepSpec 2026, arXiv 2607.05147.)
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
    """What the files of a head say of it."""

    kind: str
    """``DFlash`` or ``DSpark``."""
    config: ModelConfig
    """The config of the head's layers, as of a model that consists of them."""
    taps: tuple[int, ...]
    """Layers of the model after which it takes the state."""
    block_size: int
    """Tokens of a block: the last one of the text, and masks."""
    mask_token: int
    """The token that stands for what is to be drafted."""
    from_last: bool
    """Whether the place of the text's last token gives a draft, too: the first."""
    draft_vocab_size: int
    """Rows of its LM head."""
    markov_rank: int = 0
    """The rank of what is added to logits by the token before; 0: nothing is."""
    has_confidence: bool = False
    """Whether it says how likely a draft is to be accepted."""
    confidence_sees_token: bool = False
    """Whether that depends on the token before, too, by its row of the low-rank table."""
    verifier: str = ""
    """The name of the model that it was trained for; empty where nothing says so."""

    @property
    def num_drafts(self) -> int:
        """Drafts of a block."""
        return self.block_size - (not self.from_last)


class Markov(NamedTuple):
    """What is added to the logits of a draft by the token before it."""

    before: Matrix
    """[vocab_size, rank], by the token before."""
    after: Matrix
    """[draft_vocab_size, rank]"""


class BlockWeights(NamedTuple):
    """The weights of a head."""

    layers: LlamaWeights
    """The head's layers and norm; embeddings and LM head may be the model's."""
    taps: Matrix
    """[num_taps, hidden_size, hidden_size], of the states of each tap."""
    context_norm: Tensor
    """[hidden_size], of what the taps come to."""
    markov: Markov | None = None
    confidence: ops.MlpMeasure | None = None
    """Of a draft's normed state, followed by the row of the token before where it is seen: the
    chance that the draft is accepted if those before it are."""
    tokens: Tensor | None = None
    """int64 [draft_vocab_size]: the model's token of each row of the LM head; None: row t is
    token t."""


class BlockHead(KeyedHead):
    """A head that drafts a block in one pass.

    Args:
        settings: what its files say.
        weights: its own, in the model's dtype and on its device.
        path: of its directory.
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
        """The dtype of its states."""
        return self._layers.dtype

    @property
    def num_drafts(self) -> int:
        """Drafts of a block."""
        return self.settings.num_drafts

    @property
    def num_parameters(self) -> int:
        """Weights of its own, those that are the model's not among them."""
        config, rank = self.config, self.settings.markov_rank
        shared = 2 * config.vocab_size * config.hidden_size
        own = config.num_parameters - shared + config.vocab_size * rank
        own += self.settings.draft_vocab_size * rank
        return own + len(self.taps) * config.hidden_size**2 + config.hidden_size

    @property
    def tokens(self) -> Tensor | None:
        """int64 [draft_vocab_size]: the model's token of each row of its LM head; None: row t is
        token t."""
        return self._tokens

    @property
    def measure(self) -> ops.SoftmaxMeasure:
        """The measure of a state of :meth:`block`: over :attr:`tokens`, by their places."""
        return self._layers.measure

    def prepare(self, kv: KVCache) -> None:
        """Compute what programs need beside a cache; a block may reach past its last slot."""
        self._layers.prepare(kv, self.settings.block_size)

    def begin(self, states: Sequence[Tensor]) -> Tensor:
        """What the states of the taps come to: [num_rows, hidden_size].

        Args:
            states: after each of the :attr:`taps`, [num_rows, hidden_size].
        """
        begun: Tensor | None = None
        for state, matrix in zip(states, self._taps, strict=True):
            begun = self._layers.linear(state, matrix, residual=begun)
        assert begun is not None
        return begun

    def fill(
        self,
        begun: Tensor,
        made: Tensor,  # noqa: ARG002 (a position's keys say nothing of the token after it)
        sources: Tensor,  # noqa: ARG002
        kv: KVCache,
        positions: Tensor,
        slot_mapping: Tensor,
        starts: Tensor | None = None,  # noqa: ARG002
    ) -> None:
        """Write its keys and values at positions that the model has computed."""
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
                *(None, k, v, k_cache, v_cache, slot_mapping),
                positions=positions,
                cos_sin=layers.cos_sin(kv.num_pages * kv.page_size, index),
                k_norm_weight=None if k_norm is None else k_norm[index],
                eps=config.rms_norm_eps,
            )

    def reserve(self, num_rows: int) -> None:
        """Have the layer that :meth:`fill` begins with, 0, for so many rows."""
        if not self._zeros or len(self._zeros[-1]) < num_rows:
            size = 1 << max(num_rows - 1, 63).bit_length()
            zeros = torch.zeros(size, dtype=torch.int32, device=self._layers.device)
            self._zeros.append(zeros)  # programs go on with those before

    def block(self, token_ids: Tensor, kv: KVCache, batch: AttentionBatch) -> Tensor:
        """States after its layers: [num_tokens, hidden_size].

        Args:
            token_ids: int64 [num_tokens]: of each block the text's last token, then masks.
            kv: of its own layers.
            batch: a sequence for each block, not causal; keys of the text and the block.
        """
        hidden = self._layers.embed(token_ids)
        return self._layers.layers(0, self.config.num_layers, hidden, kv, batch)

    def normed(self, hidden: Tensor, zeros: Tensor, out: Tensor) -> Tensor:
        """Normed states.

        Args:
            hidden: [num_rows, hidden_size], of :meth:`block`.
            zeros: like it.
            out: like it, any row stride.
        """
        norm, eps = self._layers.weights.final_norm, self.config.rms_norm_eps
        return ops.add_normed(hidden, norm, zeros, eps=eps, out=out)

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, draft_vocab_size] of states of :meth:`block`, in the model's dtype."""
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
        """Logits and what the tokens before add to them: [num_rows, draft_vocab_size].

        Args:
            logits: [num_rows, draft_vocab_size], any row stride.
            rows: [num_rows, rank], of :meth:`row_before`.
        """
        assert self.markov is not None
        return self._layers.linear(rows, self.markov.after, residual=logits, few=True)
