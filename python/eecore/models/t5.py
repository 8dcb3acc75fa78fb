"""The forward pass of T5, T5 v1.1, Flan-T5 and mT5 (Raffel et al. 2020).

The encoder runs once per request. From its states come the keys and values that every decoder layer
attends to, written to pages of the same cache as the decoder's own. The decoder runs in stretches
of layers, as :class:`eecore.models.LlamaModel` does. Positions enter only by a bias on the scores
of self attention, and no score is scaled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eecore import ops
from eecore.config import T5Config
from eecore.models.attention import AttentionBatch, CrossBatch, Texts
from eecore.models.decoder import Decoder
from eecore.models.kv_cache import KVCache
from eecore.models.source import ModelSource
from eecore.models.t5_weights import T5Weights


class T5Model(Decoder):
    """An encoder and a decoder."""

    def __init__(
        self, config: T5Config, weights: T5Weights, source: ModelSource | None = None
    ) -> None:
        norm = torch.empty_like(weights.decoder.final_norm)
        head = weights.embed_tokens, weights.lm_head, norm, config.activation
        super().__init__(config, source, *head)
        self.config, self.weights = config, weights
        self._encoder = weights.encoder.stacked().unbind()
        self._stacked = weights.decoder.stacked()
        self._decoder = self._stacked.unbind()
        self._cross = weights.cross
        self._cross_q, self._cross_o = weights.cross.q.unbind(), weights.cross.o.unbind()
        # The encoder's last norm is the one before every layer's keys and values.
        self._encoder_norms = weights.encoder.final_norm.expand(config.num_layers, -1)
        self.refresh()
        self._kv = weights.decoder.qkv.rows(slice(config.q_size, None))

    def refresh(self) -> None:
        """Compute again what depends on weights that may have changed."""
        norm = self.weights.decoder.final_norm.float()
        self._head_norm.copy_(norm * self.config.output_scale)

    def prepare(self, kv: KVCache) -> None:
        """Do nothing: a T5 needs no tables (see :meth:`eecore.models.LlamaModel.prepare`)."""

    def encode(self, token_ids: Tensor, lengths: list[int], kv: KVCache, slots: Tensor) -> None:
        """Run the encoder, and write every decoder layer's keys and values of its states.

        Args:
            token_ids: int64 [num_tokens], the inputs one after the other.
            lengths: the length of each input, 1 or more.
            slots: int64 [num_tokens], where keys and values go.
        """
        hidden = self.embed(token_ids)
        batch = _input_batch(lengths, self.device)
        for index in range(self.config.num_encoder_layers):
            hidden = self._encoder_attention(index, hidden, batch)
            hidden = self._mlp(self._encoder[index], hidden)
        self._write_cross_kv(hidden, kv, slots)

    def layers(
        self,
        begin: int,
        end: int,
        hidden: Tensor,
        kv: KVCache,
        batch: AttentionBatch,
        *,
        skip_attention: frozenset[int] = frozenset(),
        skip_mlp: frozenset[int] = frozenset(),
    ) -> Tensor:
        """The residual stream after layers ``begin..end-1``; a skipped sublayer adds nothing to it.

        Skipping attention skips self attention and cross attention; no keys or values are written
        then. ``hidden`` [num_tokens, hidden_size] is not changed (and may be returned itself if
        everything is skipped). On the CPU a row's result is bit for bit the same whichever rows run
        with it.
        """
        assert batch.cross is not None
        if not self.calls_single_ops:
            return ops.decoder_layers(
                hidden,
                self._stacked,
                kv.k,
                kv.v,
                batch.slot_mapping,
                None,
                None,
                batch.page_table,
                batch.seq_lens,
                batch.query_start_loc,
                begin_layer=begin,
                end_layer=end,
                scale=1.0,
                eps=self.config.rms_norm_eps,
                skip_attention=self._flags.of(skip_attention),
                skip_mlp=self._flags.of(skip_mlp),
                fixed_split_size=self._keys_per_split,
                position_bias=self.weights.decoder.position_bias,
                max_distance=self.config.max_distance,
                activation=self.config.activation,
                cross=ops.CrossAttention(
                    self._cross.norm,
                    self._cross.q,
                    self._cross.o,
                    batch.cross.page_table,
                    batch.cross.seq_lens,
                ),
            )
        for index in range(begin, end):
            if index not in skip_attention:
                hidden = self._self_attention(index, hidden, kv, batch)
                hidden = self._cross_attention(index, hidden, kv, batch, batch.cross)
            if index not in skip_mlp:
                hidden = self._mlp(self._decoder[index], hidden)
        return hidden

    def fill_kv(
        self,
        hidden: Tensor,
        exit_layer: Tensor,
        kv: KVCache,
        positions: Tensor,  # noqa: ARG002 (no rotary embedding)
        slot_mapping: Tensor,
        texts: Texts | None = None,  # noqa: ARG002 (no states)
    ) -> None:
        """Write the decoder's keys and values of the layers that each row skipped.

        Row t fills layers ``exit_layer[t]..num_layers-1`` (int32) at ``slot_mapping[t]``, each with
        the layer's own norm and projection of the row's exit state; keys and values of the
        encoder's states need no filling. (Early-exit framework §3.2.)
        """
        ops.kv_fill(
            hidden,
            exit_layer,
            self.weights.decoder.attention_norm,
            self._kv,
            kv.k,
            kv.v,
            slot_mapping,
            eps=self.config.rms_norm_eps,
        )

    # The encoder

    def _encoder_attention(self, index: int, hidden: Tensor, batch: AttentionBatch) -> Tensor:
        layer = self._encoder[index]
        q, k, v = self._heads(hidden, layer)
        attended = ops.paged_attention(
            q,
            k[:, None],  # each token is a page, without a copy
            v[:, None],
            batch.page_table,
            batch.seq_lens,
            batch.query_start_loc,
            scale=1.0,
            causal=False,
            fixed_split_size=self._keys_per_split,
            position_bias=self.weights.encoder.position_bias,
            max_distance=self.config.max_distance,
            bidirectional=True,
        )
        return self._projected(attended, layer.o, hidden)

    def _write_cross_kv(self, hidden: Tensor, kv: KVCache, slots: Tensor) -> None:
        """Keys and values of all decoder layers from the encoder's last states."""
        config, both = self.config, self._cross.kv
        if self.linear.is_skinny(hidden):
            first = torch.zeros(hidden.shape[0], dtype=torch.int32, device=self.device)
            ops.kv_fill(
                hidden, first, self._encoder_norms, both, kv.k, kv.v, slots, eps=config.rms_norm_eps
            )
            return
        states = self.linear.normed(hidden, self.weights.encoder.final_norm)
        for (k_cache, v_cache), matrix in zip(kv.layers, both.unbind(), strict=True):
            projected = self.linear(states, matrix)
            k, v = projected.view(-1, 2, config.num_heads, config.head_dim).unbind(1)
            ops.append_kv(None, k, v, k_cache, v_cache, slots)

    # The decoder, layer by layer

    def _self_attention(
        self, index: int, hidden: Tensor, kv: KVCache, batch: AttentionBatch
    ) -> Tensor:
        layer = self._decoder[index]
        k_cache, v_cache = kv.layers[index]
        append = ops.AppendKv(k_cache, v_cache, batch.slot_mapping)
        q = self.linear.into_cache(hidden, layer.qkv, layer.attention_norm, append)
        attended = ops.paged_attention(
            q,
            k_cache,
            v_cache,
            batch.page_table,
            batch.seq_lens,
            batch.query_start_loc,
            scale=1.0,
            fixed_split_size=self._keys_per_split,
            position_bias=self.weights.decoder.position_bias,
            max_distance=self.config.max_distance,
            arrivals=kv.arrivals,
            constant_places=True,
        )
        return self._projected(attended, layer.o, hidden)

    def _cross_attention(
        self, index: int, hidden: Tensor, kv: KVCache, batch: AttentionBatch, cross: CrossBatch
    ) -> Tensor:
        k_cache, v_cache = kv.layers[index]
        q = self.linear(hidden, self._cross_q[index], norm=self._cross.norm[index])
        attended = ops.paged_attention(
            q.view(-1, self.config.num_heads, self.config.head_dim),
            k_cache,
            v_cache,
            cross.page_table,
            cross.seq_lens,
            batch.query_start_loc,
            scale=1.0,
            causal=False,
            fixed_split_size=self._keys_per_split,
            arrivals=kv.arrivals,
        )
        return self._projected(attended, self._cross_o[index], hidden)

    # Both

    def _heads(self, hidden: Tensor, layer: ops.DecoderWeights) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V, each [num_tokens, num_heads, head_dim]."""
        projected = self.linear(hidden, layer.qkv, norm=layer.attention_norm)
        q, k, v = projected.view(-1, 3, self.config.num_heads, self.config.head_dim).unbind(1)
        return q, k, v


def _input_batch(lengths: list[int], device: torch.device) -> AttentionBatch:
    """The batch of whole inputs, with each token as a page."""
    sizes = torch.tensor(lengths, dtype=torch.int32)
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    starts[1:] = sizes.cumsum(0)
    last = int(starts[-1]) - 1
    table = (starts[:-1, None] + torch.arange(int(sizes.max()), dtype=torch.int32)).clamp(max=last)
    positions = torch.arange(last + 1)
    return AttentionBatch(
        positions=positions.to(device),
        slot_mapping=positions.to(device),
        page_table=table.to(torch.int32).to(device),
        seq_lens=sizes.to(device),
        query_start_loc=starts.to(device),
    )
