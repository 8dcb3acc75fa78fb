"""Multi-token prediction (MTP): a layer inside a checkpoint that drafts further tokens.

MiMo and Qwen3.5 have one. The model's normed state at a position and the embedding of the next
token, each normed, are projected to one state, which goes through a decoder layer with its own
keys, and a norm. The result is the state of the next step, and the model's LM head turns it into a
draft. (Gloeckle et al. 2024; DeepSeek-V3, 2024; MiMo, 2025.)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from eecore import ops
from eecore.heads.published import PublishedHead, PublishedSettings
from eecore.models.draft_head import Positions, SeenKeys
from eecore.models.hybrid import decoder_of
from eecore.models.kv_cache import KVCache
from eecore.models.llama import LlamaModel, LlamaWeights
from eecore.ops import Matrix

USUAL_AGREEMENT = (0.85, 0.6, 0.4, 0.3, 0.2, 0.2, 0.2, 0.2)
"""Approximate acceptance rates by position of the draft; the layer was trained for the first."""


class MtpWeights(NamedTuple):
    """The weights of the layer."""

    layer: LlamaWeights
    """The layer and the norm after it, and the model's embeddings and LM head."""
    state_norm: Tensor
    """[hidden_size]: the norm of the model's state, or of the state of the step before."""
    token_norm: Tensor
    """[hidden_size]: the norm of the token's embedding."""
    of_state: Matrix
    """[hidden_size, hidden_size]: the part of the projection that takes the state."""
    of_token: Matrix
    """[hidden_size, hidden_size]: the part of the projection that takes the embedding."""
    leaves_first_out: bool
    """Whether the layer was trained with zeros for the embedding at a text's first position."""


class MtpHead(PublishedHead):
    """The layer, with the model that it drafts for.

    Args:
        weights: the layer's weights, in the model's dtype and on its device.
    """

    def __init__(
        self, network: LlamaModel, settings: PublishedSettings, weights: MtpWeights, path: Path
    ) -> None:
        super().__init__(settings, path, USUAL_AGREEMENT)
        self._network, self._weights = network, weights
        self._layers = decoder_of(settings.config, weights.layer)
        self._nothing = torch.zeros_like(weights.state_norm)[None]

    @property
    def tokens(self) -> None:
        """None: row t of the LM head is token t."""

    @property
    def measure(self) -> ops.SoftmaxMeasure:
        return self._network.measure._replace(norm_weight=None)

    def prepare(self, kv: KVCache) -> None:
        self._layers.prepare(kv)

    def begin(self, states: Sequence[Tensor], positions: Positions | None = None) -> Tensor:
        assert positions is not None
        made, batch = positions.made, positions.batch
        (state,) = states
        begun = self._normed(state, self._network.weights.final_norm)
        embedded = self._network.embed(made, previous=made, sources=positions.sources)
        if self._weights.leaves_first_out and positions.starts is not None:
            embedded.index_fill_(0, positions.starts, 0.0)
        hidden = self._together(begun, embedded)
        self._layers.fill_kv(
            hidden, positions.first_layers, positions.kv, batch.positions, batch.slot_mapping
        )
        return begun

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._network.embed(token_ids)

    def step(self, state: Tensor, embedded: Tensor, seen: SeenKeys | None = None) -> Tensor:
        assert seen is not None
        assert seen.kv.of_head is not None
        hidden = self._together(state, embedded)
        hidden = self._layers.layers(0, 1, hidden, seen.kv.of_head, seen.batch)
        return self._normed(hidden, self._weights.layer.final_norm)

    def _together(self, state: Tensor, embedded: Tensor) -> Tensor:
        """The layer's input: [num_rows, hidden_size]."""
        linear, weights = self._layers.linear, self._weights
        hidden = linear(state, weights.of_state, norm=weights.state_norm)
        return linear(embedded, weights.of_token, norm=weights.token_norm, residual=hidden)

    def _normed(self, hidden: Tensor, norm: Tensor) -> Tensor:
        nothing = self._nothing.expand_as(hidden)
        return ops.add_normed(hidden, norm, nothing, eps=self.config.rms_norm_eps)
