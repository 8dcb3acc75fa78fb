"""A layer inside a checkpoint that drafts further tokens: multi-token prediction (MTP), MiMo's.

The normed state of the model at a position and the embedding of the token after it, each normed,
become one state by a projection; a decoder layer with keys of its own follows, and a norm. What
comes out of it is the state of the next step, and the model's LM head gives its draft. (Gloeckle et
al. 2024; DeepSeek-V3, 2024; MiMo, 2025.)
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
from eecore.models.draft_head import SeenKeys
from eecore.models.keyed_head import ChainHead
from eecore.models.kv_cache import KVCache
from eecore.models.llama import LlamaModel, LlamaWeights
from eecore.ops import Matrix

__all__ = ["MtpHead", "MtpSettings", "MtpWeights"]

USUAL_AGREEMENT = (0.85, 0.6, 0.4, 0.3, 0.2, 0.2, 0.2, 0.2)
"""How often the drafts are accepted, about: the layer was trained for the first of them."""


@dataclass(frozen=True)
class MtpSettings:
    """What a config.json says of the layer."""

    config: ModelConfig
    """The config of the layer, as of a model that consists of it."""
    num_layers: int
    """Layers of the model, after which it takes the state."""

    kind, verifier = "MTP", ""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the model after which it takes the state."""
        return (self.num_layers,)

    @property
    def draft_vocab_size(self) -> int:
        """Rows of its LM head, the model's."""
        return self.config.vocab_size


class MtpWeights(NamedTuple):
    """The weights of the layer."""

    layer: LlamaWeights
    """The layer and the norm after it, and the model's embeddings and LM head."""
    state_norm: Tensor
    """[hidden_size], of the model's state or that of the step before."""
    token_norm: Tensor
    """[hidden_size], of the token's embedding."""
    of_state: Matrix
    """[hidden_size, hidden_size]: the part of the projection that takes the state."""
    of_token: Matrix
    """[hidden_size, hidden_size], the part that takes the embedding."""


class MtpHead(ChainHead):
    """The layer beside the model that it drafts for.

    Args:
        network: the model.
        settings: what config.json says.
        weights: in the model's dtype and on its device.
        path: of the checkpoint's directory.
    """

    kind, verifier = MtpSettings.kind, MtpSettings.verifier

    def __init__(
        self, network: LlamaModel, settings: MtpSettings, weights: MtpWeights, path: Path
    ) -> None:
        self.path, self.config, self.settings = path, settings.config, settings
        self.taps, self.agreement = settings.taps, USUAL_AGREEMENT
        self._network, self._weights = network, weights
        self._layers = LlamaModel(settings.config, weights.layer)
        self._nothing = torch.zeros_like(weights.state_norm)[None]
        self._first = [torch.zeros(0, dtype=torch.int32, device=network.device)]

    @property
    def tokens(self) -> None:
        """All tokens of the model."""

    @property
    def measure(self) -> ops.SoftmaxMeasure:
        return self._network.measure._replace(norm_weight=None)

    def prepare(self, kv: KVCache) -> None:
        self._layers.prepare(kv)

    def reserve(self, num_rows: int) -> None:
        if len(self._first[-1]) < num_rows:
            size = 1 << max(num_rows - 1, 63).bit_length()
            # Programs go on with those before.
            self._first.append(self._first[0].new_zeros(size))

    def begin(self, states: Sequence[Tensor]) -> Tensor:
        (state,) = states
        return self._normed(state, self._network.weights.final_norm)

    def fill(
        self,
        begun: Tensor,
        made: Tensor,
        sources: Tensor,
        kv: KVCache,
        positions: Tensor,
        slot_mapping: Tensor,
        starts: Tensor | None = None,
    ) -> None:
        embedded = self._network.embed(made, previous=made, sources=sources)
        if starts is not None:
            embedded.index_fill_(0, starts, 0.0)  # it is trained without the first one
        self.reserve(len(begun))
        first = self._first[-1][: len(begun)]
        hidden = self._together(begun, embedded)
        self._layers.fill_kv(hidden, first, kv, positions, slot_mapping)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._network.embed(token_ids)

    def step(self, state: Tensor, embedded: Tensor, seen: SeenKeys | None = None) -> Tensor:
        assert seen is not None
        assert seen.kv.of_head is not None
        hidden = self._together(state, embedded)
        hidden = self._layers.layers(0, 1, hidden, seen.kv.of_head, seen.batch)
        return self._normed(hidden, self._weights.layer.final_norm)

    def _together(self, state: Tensor, embedded: Tensor) -> Tensor:
        """What the layer is given: [num_rows, hidden_size]."""
        linear, weights = self._layers.linear, self._weights
        hidden = linear(state, weights.of_state, norm=weights.state_norm)
        return linear(embedded, weights.of_token, norm=weights.token_norm, residual=hidden)

    def _normed(self, hidden: Tensor, norm: Tensor) -> Tensor:
        nothing = self._nothing.expand_as(hidden)
        return ops.add_normed(hidden, norm, nothing, eps=self.config.rms_norm_eps)
