"""The forward pass of a decoder some of whose layers have something else instead of attention.

A convolution (LFM2) needs the inputs of a few positions before a row's own. They lie in the pages
of the row's text, one row a position, as keys do, so that rejected drafts, preempted texts, shared
beginnings and fills need nothing of their own.

A gated delta rule (Qwen3.5) sums up all positions before in a state of fixed size, one for each
text. Only positions that are certain are in it: those after them are kept as rows, and every call
repeats them, so that rejected drafts leave nothing there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eecore import ops
from eecore.config import ModelConfig
from eecore.models.attention import AttentionBatch, Texts
from eecore.models.kv_cache import KVCache
from eecore.models.llama import LlamaModel, LlamaWeights
from eecore.models.source import ModelSource
from eecore.ops import Matrix


class HybridModel(LlamaModel):
    """A decoder with attention in some layers, and convolutions or gated delta rules in the others.

    Layers run op by op on every device.
    """

    _runs_stretches = False

    def __init__(
        self, config: ModelConfig, weights: LlamaWeights, source: ModelSource | None = None
    ) -> None:
        norms, convolutions, deltas = weights.attention_norm, weights.convolutions, weights.deltas
        assert norms is not None
        self._taps: dict[int, Tensor] = {}
        self._deltas: dict[int, tuple[Matrix, ops.DeltaWeights]] = {}
        if convolutions is not None:
            self._taps |= zip(config.conv_layers, convolutions.taps.unbind(), strict=True)
        if deltas is not None:
            assert config.delta is not None
            own = zip(deltas.taps, deltas.log_rate, deltas.dt_bias, deltas.norm, strict=True)
            each = [ops.DeltaWeights(*of_layer) for of_layer in own]
            gates = [Matrix(gate) for gate in deltas.gates.weight]
            self._deltas |= zip(config.delta.layers, zip(gates, each, strict=True), strict=True)
        self._tiled_heads = config.delta is not None and config.delta.tiled_heads
        super().__init__(config, weights, source)
        attending = torch.tensor(config.attention_layers, dtype=torch.int32, device=self.device)
        self._attending, self._norms = attending, norms
        self._fill_norm = norms[attending]

    def refresh(self) -> None:
        """Bring up to date what is computed from the weights."""
        assert self._attending is not None
        torch.index_select(self._norms, 0, self._attending, out=self._fill_norm)

    def _by_layer(self) -> list[ops.DecoderWeights]:
        """The weights of each layer; those of a layer without attention have its projections in the
        places of attention's."""
        config, weights = self.config, self.weights
        pairs: dict[int, tuple[Matrix, Matrix]] = {}
        kinds = [(config.attention_layers, weights.qkv, weights.o)]
        if (convolutions := weights.convolutions) is not None:
            kinds.append((config.conv_layers, convolutions.first, convolutions.last))
        if (deltas := weights.deltas) is not None:
            kinds.append((tuple(self._deltas), deltas.first, deltas.last))
        for layers, first, last in kinds:
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

    def _attention(
        self,
        index: int,
        hidden: Tensor,
        kv: KVCache,
        cache: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        places: bool,
    ) -> Tensor:
        """The residual stream after attention of a layer, or after what it has instead."""
        if index in self._taps:
            return self._convolution(index, hidden, kv, batch)
        if index in self._deltas:
            return self._delta(index, hidden, kv, batch)
        return super()._attention(index, hidden, kv, cache, batch, places)

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

    def _delta(self, index: int, hidden: Tensor, kv: KVCache, batch: AttentionBatch) -> Tensor:
        """The residual stream after the gated delta rule of a layer, whose states it writes."""
        layer = self._layers[index]
        assert batch.states is not None
        mixed = ops.gated_delta(
            *self._delta_rows(index, hidden),
            kv.state_of(index),
            batch.states,
            self._deltas[index][1],
            batch.seq_lens,
            batch.query_start_loc,
            slot_mapping=batch.slot_mapping,
            tiled_heads=self._tiled_heads,
            eps=self._eps,
        )
        return self._onto(hidden, mixed, layer.o, layer.attention_post_norm)

    def _delta_rows(self, index: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What a gated delta rule takes of each row."""
        layer, (gates, _) = self._layers[index], self._deltas[index]
        norm = layer.attention_norm
        return self.linear(hidden, layer.qkv, norm=norm), self.linear(hidden, gates, norm=norm)

    def fill_kv(
        self,
        hidden: Tensor,
        exit_layer: Tensor,
        kv: KVCache,
        positions: Tensor,
        slot_mapping: Tensor,
        texts: Texts | None = None,
    ) -> None:
        """Write keys, values and states of the layers that each row skipped, from its exit state:
        see :meth:`LlamaModel.fill_kv`. The state of a layer without attention is that of its own
        norm and projections of the exit state.
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
        for index, (_, weights) in self._deltas.items():
            assert texts is not None
            states, lens, starts = texts
            ops.gated_delta_fill(
                *self._delta_rows(index, hidden),
                kv.state_of(index),
                states,
                weights,
                lens,
                starts,
                exit_layer,
                index,
                tiled_heads=self._tiled_heads,
            )


def decoder_of(
    config: ModelConfig, weights: LlamaWeights, source: ModelSource | None = None
) -> LlamaModel:
    """A decoder of the class that its layers need."""
    has_others = len(config.attention_layers) < config.stack_size
    return (HybridModel if has_others or config.attention_gate else LlamaModel)(
        config, weights, source
    )
