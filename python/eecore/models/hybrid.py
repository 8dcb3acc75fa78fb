"""The forward pass of a decoder some of whose layers have a short convolution instead of attention.

A convolution needs the inputs of a few positions before a row's own. They lie in the pages of the
row's text, one row a position, as keys do, so that rejected drafts, preempted texts, shared
beginnings and fills need nothing of their own. (LFM2.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from eecore import ops
from eecore.config import ModelConfig
from eecore.models.attention import AttentionBatch
from eecore.models.kv_cache import KVCache
from eecore.models.llama import LlamaModel, LlamaWeights
from eecore.models.source import ModelSource


class HybridModel(LlamaModel):
    """A decoder with attention in some layers and a gated convolution in the others.

    Layers run op by op on every device.
    """

    def __init__(
        self, config: ModelConfig, weights: LlamaWeights, source: ModelSource | None = None
    ) -> None:
        convolutions, norms = weights.convolutions, weights.attention_norm
        assert convolutions is not None
        assert norms is not None
        self._convolutions = convolutions
        self._taps = dict(zip(config.conv_layers, convolutions.taps.unbind(), strict=True))
        super().__init__(config, weights, source)
        attending = torch.tensor(config.attention_layers, dtype=torch.int32, device=self.device)
        self._attending, self._norms = attending, norms
        self._fill_norm = norms[attending]

    def refresh(self) -> None:
        """Bring up to date what is computed from the weights."""
        assert self._attending is not None
        torch.index_select(self._norms, 0, self._attending, out=self._fill_norm)

    def _by_layer(self) -> list[ops.DecoderWeights]:
        """The weights of each layer; those of a convolution's layer have its projections in the
        places of attention's."""
        config, weights, convolutions = self.config, self.weights, self._convolutions
        pairs: dict[int, tuple[ops.Matrix, ops.Matrix]] = {}
        for layers, first, last in (
            (config.attention_layers, weights.qkv, weights.o),
            (config.conv_layers, convolutions.first, convolutions.last),
        ):
            pairs |= zip(layers, zip(first.unbind(), last.unbind(), strict=True), strict=True)
        none = dict.fromkeys(range(config.num_layers))
        q_norms, k_norms = (
            none if norm is None else none | dict(zip(config.attention_layers, norm, strict=True))
            for norm in (weights.q_norm, weights.k_norm)
        )
        of_all = self._stacked._replace(
            qkv=weights.gate_up, o=weights.down, q_norm=None, k_norm=None
        ).unbind()
        return [
            weights_of._replace(
                qkv=pairs[layer][0],
                o=pairs[layer][1],
                q_norm=q_norms[layer],
                k_norm=k_norms[layer],
            )
            for layer, weights_of in enumerate(of_all)
        ]

    def _stretch(
        self,
        first: int | None,
        layers: range,
        hidden: Tensor,
        kv: KVCache,
        batch: AttentionBatch,
        skip_attention: frozenset[int] = frozenset(),
        skip_mlp: frozenset[int] = frozenset(),
    ) -> Tensor:
        """The residual stream after some layers."""
        assert first == 0
        for index in layers:
            if index in skip_attention:
                pass
            elif index in self._taps:
                hidden = self._convolution(index, hidden, kv, batch)
            else:
                places = index > layers.start
                hidden = self._attention(index, hidden, kv, kv.layers[index], batch, places=places)
            if index not in skip_mlp:
                hidden = self._mlp(self._layers[index], hidden)
        return hidden

    def _convolution(
        self, index: int, hidden: Tensor, kv: KVCache, batch: AttentionBatch
    ) -> Tensor:
        """The residual stream after the convolution of a layer, whose states it writes."""
        layer = self._layers[index]
        mixed = ops.short_conv(
            self.linear(hidden, layer.qkv, norm=layer.attention_norm),
            kv.layers[index][0],
            batch.slot_mapping,
            self._taps[index],
            batch.page_table,
            batch.seq_lens,
            batch.query_start_loc,
        )
        return self._onto(hidden, mixed, layer.o, layer.attention_post_norm)

    def fill_kv(
        self,
        hidden: Tensor,
        exit_layer: Tensor,
        kv: KVCache,
        positions: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write keys, values and states of the layers that each row skipped, from its exit state:
        see :meth:`LlamaModel.fill_kv`. A convolution's state is its layer's own norm and
        projection of the exit state.
        """
        if self.config.attention_layers:
            super().fill_kv(hidden, exit_layer, kv, positions, slot_mapping)
        for index in self.config.conv_layers:
            layer = self._layers[index]
            ops.short_conv_fill(
                self.linear(hidden, layer.qkv, norm=layer.attention_norm),
                kv.layers[index][0],
                slot_mapping,
                exit_layer,
                index,
            )
