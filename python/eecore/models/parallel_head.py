"""P-EAGLE: EAGLE-3 with several layers, which drafts all tokens in one pass.

The first layer takes a state and the token after it, as EAGLE-3's does; the other layers are plain.
At positions without a state it takes a learnt state and a mask token. (P-EAGLE, 2026, arXiv
2602.01469.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eecore import ops
from eecore.models.attention import AttentionBatch
from eecore.models.eagle_head import EagleHead
from eecore.models.keyed_head import PassHead, Positions
from eecore.models.kv_cache import KVCache
from eecore.models.llama import LlamaModel


class ParallelHead(PassHead):
    """A head all of whose places are masks.

    The last state and the text's last token go through its layers in :meth:`fill`, which gives the
    first draft.

    Args:
        first: the head without the layers after the first; its settings have a mask.
        rest: the layers after the first; None: there are none.
        mask: [num_taps, target_size], the learnt states of the taps.
    """

    causal, first_place = True, -1

    def __init__(self, first: EagleHead, rest: LlamaModel | None, mask: Tensor) -> None:
        settings, network = first.settings, first.network
        assert settings.mask is not None
        self.kind, self.path, self.verifier = first.kind, first.path, first.verifier
        self.config, self.taps, self.settings = settings.config, settings.taps, settings
        self.agreement = tuple(0.7 - 0.04 * k for k in range(settings.mask.num_drafts))
        self.block_size = settings.mask.num_drafts - 1
        self.mask_token = settings.mask.token
        self._first, self._layers, self._dtype = first, rest, network.dtype
        states = mask.to(network.device, network.dtype)
        token = torch.tensor([self.mask_token], device=network.device)
        with torch.inference_mode():
            self._mask = first.begin(states[:, None].unbind()), first.embed(token)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def tokens(self) -> Tensor | None:
        return self._first.tokens

    @property
    def measure(self) -> ops.SoftmaxMeasure:
        return self._first.measure

    def prepare(self, kv: KVCache) -> None:
        """Compute what programs need beside a cache; a block may reach past its last slot."""
        self._first.prepare(kv, self.block_size)
        if self._layers is not None:
            self._layers.prepare(kv.deeper, self.block_size)

    def begin(self, states: Sequence[Tensor]) -> Tensor:
        return self._first.begin(states)

    def fill(self, begun: Tensor, positions: Positions, kv: KVCache) -> Tensor:
        made, sources = positions.made, positions.sources
        embedded = self._first.embed(made, previous=made, sources=sources)
        return self._run(begun, embedded, kv, positions.batch, few=False)

    def block(self, token_ids: Tensor, kv: KVCache, batch: AttentionBatch) -> Tensor:
        rows = len(token_ids)
        state, embedded = (each.expand(rows, -1) for each in self._mask)
        return self._run(state, embedded, kv, batch, few=True)

    def _run(
        self, state: Tensor, embedded: Tensor, kv: KVCache, batch: AttentionBatch, *, few: bool
    ) -> Tensor:
        hidden = self._first.layer(state, embedded, kv, batch, few=few)
        if self._layers is None:
            return hidden
        return self._layers.layers(0, self._layers.config.num_layers, hidden, kv.deeper, batch)
