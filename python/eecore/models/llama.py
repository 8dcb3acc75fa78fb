"""The forward pass of the Llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3).

Layers run in stretches: few rows on the CPU go through a whole stretch in one op, others layer by
layer. Weights of all layers are stacked, and a layer works on views: the K/V projections that
``kv_fill`` reads for every layer at once are the very ones that the layers use. No weight needs a
gradient. Weights of linear layers may be int8 with a scale per row; states and caches never are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from eecore import ops
from eecore.config import ModelConfig
from eecore.models.attention import AttentionBatch, keys_per_split
from eecore.models.int8 import WeightView, dequantise_rows
from eecore.models.kv_cache import KVCache
from eecore.models.layer_flags import LayerFlags
from eecore.models.linear import Linear
from eecore.models.rope import cos_sin_table
from eecore.models.source import ModelSource


@dataclass(frozen=True)
class LlamaWeights:
    """Every parameter; Q rows come before K rows before V rows, gate rows before up rows.

    Where there is a scale, float32 and of the weight's shape without its last axis, the weight is
    int8, and each of its rows times its scale is what the checkpoint holds.
    """

    embed_tokens: Tensor
    """[vocab_size, hidden_size]"""
    lm_head: Tensor
    """[vocab_size, hidden_size]; the same tensor as embed_tokens when they are tied."""
    final_norm: Tensor
    """[hidden_size]"""
    attention_norm: Tensor
    """[num_layers, hidden_size]"""
    mlp_norm: Tensor
    """[num_layers, hidden_size]"""
    qkv_weight: Tensor
    """[num_layers, q_size + 2 * kv_size, hidden_size]"""
    o_weight: Tensor
    """[num_layers, hidden_size, q_size]"""
    gate_up_weight: Tensor
    """[num_layers, 2 * intermediate_size, hidden_size]"""
    down_weight: Tensor
    """[num_layers, hidden_size, intermediate_size]"""
    qkv_bias: Tensor | None
    """[num_layers, q_size + 2 * kv_size]"""
    o_bias: Tensor | None
    """[num_layers, hidden_size]"""
    gate_up_bias: Tensor | None
    """[num_layers, 2 * intermediate_size]"""
    down_bias: Tensor | None
    """[num_layers, hidden_size]"""
    q_norm: Tensor | None
    """[num_layers, head_dim]"""
    k_norm: Tensor | None
    """[num_layers, head_dim]"""
    embed_scale: Tensor | None = None
    """[vocab_size], where the embeddings are the LM head too."""
    lm_head_scale: Tensor | None = None
    """[vocab_size]"""
    qkv_scale: Tensor | None = None
    """[num_layers, q_size + 2 * kv_size]"""
    o_scale: Tensor | None = None
    """[num_layers, hidden_size]"""
    gate_up_scale: Tensor | None = None
    """[num_layers, 2 * intermediate_size]"""
    down_scale: Tensor | None = None
    """[num_layers, hidden_size]"""

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        int8: bool = False,
    ) -> LlamaWeights:
        """Uninitialised weights of the config's sizes; on device "meta" they take no memory."""
        layers, hidden, inner = config.num_layers, config.hidden_size, config.intermediate_size
        qkv_size = config.q_size + 2 * config.kv_size

        def tensor(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        def tensor_if(wanted: bool, *shape: int) -> Tensor | None:
            return tensor(*shape) if wanted else None

        def matrix(*shape: int) -> tuple[Tensor, Tensor | None]:
            if not int8:
                return tensor(*shape), None
            whole = torch.empty(shape, device=device, dtype=torch.int8)
            return whole, torch.empty(shape[:-1], device=device, dtype=torch.float32)

        lm_head, lm_head_scale = matrix(config.vocab_size, hidden)
        qkv_weight, qkv_scale = matrix(layers, qkv_size, hidden)
        o_weight, o_scale = matrix(layers, hidden, config.q_size)
        gate_up_weight, gate_up_scale = matrix(layers, 2 * inner, hidden)
        down_weight, down_scale = matrix(layers, hidden, inner)
        tied = config.tie_word_embeddings
        return cls(
            embed_tokens=lm_head if tied else tensor(config.vocab_size, hidden),
            lm_head=lm_head,
            final_norm=tensor(hidden),
            attention_norm=tensor(layers, hidden),
            mlp_norm=tensor(layers, hidden),
            qkv_weight=qkv_weight,
            o_weight=o_weight,
            gate_up_weight=gate_up_weight,
            down_weight=down_weight,
            qkv_bias=tensor_if(config.attention_bias, layers, qkv_size),
            o_bias=tensor_if(config.output_bias, layers, hidden),
            gate_up_bias=tensor_if(config.mlp_bias, layers, 2 * inner),
            down_bias=tensor_if(config.mlp_bias, layers, hidden),
            q_norm=tensor_if(config.qk_norm, layers, config.head_dim),
            k_norm=tensor_if(config.qk_norm, layers, config.head_dim),
            embed_scale=lm_head_scale if tied else None,
            lm_head_scale=lm_head_scale,
            qkv_scale=qkv_scale,
            o_scale=o_scale,
            gate_up_scale=gate_up_scale,
            down_scale=down_scale,
        )

    def by_checkpoint_name(self, config: ModelConfig) -> dict[str, WeightView]:
        """What each tensor of a Hugging Face checkpoint fills, by the tensor's name."""
        q_size, kv_size, inner = config.q_size, config.kv_size, config.intermediate_size
        matrices: dict[str, tuple[Tensor, Tensor | None, slice]] = {
            "self_attn.q_proj.weight": (self.qkv_weight, self.qkv_scale, slice(q_size)),
            "self_attn.k_proj.weight": (
                self.qkv_weight,
                self.qkv_scale,
                slice(q_size, q_size + kv_size),
            ),
            "self_attn.v_proj.weight": (
                self.qkv_weight,
                self.qkv_scale,
                slice(q_size + kv_size, None),
            ),
            "self_attn.o_proj.weight": (self.o_weight, self.o_scale, slice(None)),
            "mlp.gate_proj.weight": (self.gate_up_weight, self.gate_up_scale, slice(inner)),
            "mlp.up_proj.weight": (self.gate_up_weight, self.gate_up_scale, slice(inner, None)),
            "mlp.down_proj.weight": (self.down_weight, self.down_scale, slice(None)),
        }
        vectors: dict[str, tuple[Tensor | None, slice]] = {
            "self_attn.q_proj.bias": (self.qkv_bias, slice(q_size)),
            "self_attn.k_proj.bias": (self.qkv_bias, slice(q_size, q_size + kv_size)),
            "self_attn.v_proj.bias": (self.qkv_bias, slice(q_size + kv_size, None)),
            "self_attn.o_proj.bias": (self.o_bias, slice(None)),
            "self_attn.q_norm.weight": (self.q_norm, slice(None)),
            "self_attn.k_norm.weight": (self.k_norm, slice(None)),
            "mlp.gate_proj.bias": (self.gate_up_bias, slice(inner)),
            "mlp.up_proj.bias": (self.gate_up_bias, slice(inner, None)),
            "mlp.down_proj.bias": (self.down_bias, slice(None)),
            "input_layernorm.weight": (self.attention_norm, slice(None)),
            "post_attention_layernorm.weight": (self.mlp_norm, slice(None)),
        }
        views = {
            "model.embed_tokens.weight": WeightView(self.embed_tokens, self.embed_scale),
            "model.norm.weight": WeightView(self.final_norm),
        }
        if not config.tie_word_embeddings:
            views["lm_head.weight"] = WeightView(self.lm_head, self.lm_head_scale)
        for layer in range(config.num_layers):
            for name, (weight, scale, rows) in matrices.items():
                views[f"model.layers.{layer}.{name}"] = WeightView(
                    weight[layer, rows], None if scale is None else scale[layer, rows]
                )
            for name, (stacked, rows) in vectors.items():
                if stacked is not None:
                    views[f"model.layers.{layer}.{name}"] = WeightView(stacked[layer, rows])
        return views


class LlamaModel:
    """A decoder whose layers are called in stretches, so that the caller decides how many run.

    Rows are tokens of any mix of sequences; ``hidden`` is the residual stream, before the final
    norm. Nothing keeps state between calls but the KV cache that is passed in.
    """

    def __init__(
        self, config: ModelConfig, weights: LlamaWeights, source: ModelSource | None = None
    ) -> None:
        self.config = config
        self.source = source
        self.weights = weights
        self.device = weights.final_norm.device
        self.dtype = weights.final_norm.dtype
        self._on_cpu = self.device.type == "cpu"
        self._linear = Linear(
            self.device,
            self.dtype,
            config.rms_norm_eps,
            is_int8=weights.qkv_scale is not None,
        )
        self.cos_sin = cos_sin_table(config.rope, config.max_position, self.device)
        self._scale = config.head_dim**-0.5
        self._keys_per_split = keys_per_split(self.device)
        self._head_counts = (config.num_q_heads, config.num_kv_heads, config.num_kv_heads)
        stacked = [getattr(weights, name) for name in ops.DecoderWeights._fields]
        self._stacked = ops.DecoderWeights(*stacked)
        each = [[None] * config.num_layers if t is None else t.unbind(0) for t in stacked]
        self._layers = [ops.DecoderWeights(*views) for views in zip(*each, strict=True)]
        windows = torch.tensor(config.layer_windows, dtype=torch.int32)
        self._windows = windows if windows.any() else None
        self._flags = LayerFlags(config.num_layers)
        kv_rows = slice(config.q_size, None)
        self._kv_weight = weights.qkv_weight[:, kv_rows]
        scale, bias = weights.qkv_scale, weights.qkv_bias
        self._kv_scale = None if scale is None else scale[:, kv_rows]
        self._kv_bias = None if bias is None else bias[:, kv_rows]

    def embed(self, token_ids: Tensor) -> Tensor:
        """[num_tokens, hidden_size] of int64 ids [num_tokens]."""
        weights = self.weights
        rows = weights.embed_tokens.index_select(0, token_ids)
        if weights.embed_scale is None:
            return rows
        return dequantise_rows(rows, weights.embed_scale.index_select(0, token_ids), self.dtype)

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

        Skipped attention writes no keys or values either. ``hidden`` [num_tokens, hidden_size] is
        not changed (and may be what comes back when all is skipped).
        """
        if self._on_cpu and self._linear.is_skinny(hidden):
            return ops.decoder_layers(
                hidden,
                self._stacked,
                kv.k,
                kv.v,
                batch.slot_mapping,
                batch.positions,
                self.cos_sin,
                batch.page_table,
                batch.seq_lens,
                batch.query_start_loc,
                begin_layer=begin,
                end_layer=end,
                scale=self._scale,
                eps=self.config.rms_norm_eps,
                sliding_window=self._windows,
                skip_attention=self._flags.of(skip_attention),
                skip_mlp=self._flags.of(skip_mlp),
                fixed_split_size=self._keys_per_split,
            )
        for index in range(begin, end):
            if index not in skip_attention:
                hidden = self._attention(index, hidden, kv, batch)
            if index not in skip_mlp:
                hidden = self._mlp(index, hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 [num_rows, vocab_size]: final norm and LM head."""
        weights = self.weights
        scale = weights.lm_head_scale
        return self._linear(hidden, weights.lm_head, scale=scale, norm=weights.final_norm).float()

    def confidence(self, hidden: Tensor) -> ops.SoftmaxConfidence:
        """Token, top-2 gap and log-sum-exp of each row's softmax, without logits in memory."""
        weights = self.weights
        return ops.exit_confidence_softmax(
            hidden,
            weights.final_norm,
            weights.lm_head,
            self.config.rms_norm_eps,
            lm_head_scale=weights.lm_head_scale,
        )

    def fill_kv(
        self,
        hidden: Tensor,
        exit_layer: Tensor,
        kv: KVCache,
        positions: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write keys and values of the layers that each row skipped, from its exit state.

        Row t fills layers ``exit_layer[t]..num_layers-1`` (int32) at ``slot_mapping[t]``, each with
        the layer's own norm, projection and rotary embedding. (Early-exit framework §3.2.)
        """
        ops.kv_fill(
            hidden,
            exit_layer,
            self.weights.attention_norm,
            self._kv_weight,
            kv.k,
            kv.v,
            slot_mapping,
            kv_scale=self._kv_scale,
            kv_bias=self._kv_bias,
            k_norm_weight=self.weights.k_norm,
            positions=positions,
            cos_sin=self.cos_sin,
            eps=self.config.rms_norm_eps,
        )

    def _attention(self, index: int, hidden: Tensor, kv: KVCache, batch: AttentionBatch) -> Tensor:
        config, layer = self.config, self._layers[index]
        k_cache, v_cache = kv.layers[index]
        qkv = self._linear(hidden, layer.qkv_weight, layer.qkv_bias, norm=layer.attention_norm)
        num_tokens, head_counts = hidden.shape[0], self._head_counts
        q, k, v = qkv.view(num_tokens, sum(head_counts), config.head_dim).split_with_sizes(
            head_counts, 1
        )
        ops.append_kv(
            q,
            k,
            v,
            k_cache,
            v_cache,
            batch.slot_mapping,
            positions=batch.positions,
            cos_sin=self.cos_sin,
            q_norm_weight=layer.q_norm,
            k_norm_weight=layer.k_norm,
            eps=config.rms_norm_eps,
        )
        attended = ops.paged_attention(
            q,
            k_cache,
            v_cache,
            batch.page_table,
            batch.seq_lens,
            batch.query_start_loc,
            scale=self._scale,
            sliding_window=config.layer_windows[index],
            fixed_split_size=self._keys_per_split,
        )
        attended = attended.view(num_tokens, config.q_size)
        return self._linear(attended, layer.o_weight, layer.o_bias, residual=hidden)

    def _mlp(self, index: int, hidden: Tensor) -> Tensor:
        layer = self._layers[index]
        if self._linear.is_skinny(hidden):
            gated = ops.skinny_gated_linear(
                hidden,
                layer.gate_up_weight,
                bias=layer.gate_up_bias,
                norm_weight=layer.mlp_norm,
                eps=self.config.rms_norm_eps,
            )
        else:
            gate_up = self._linear(
                hidden, layer.gate_up_weight, layer.gate_up_bias, norm=layer.mlp_norm
            )
            gate, up = gate_up.chunk(2, dim=1)
            gated = functional.silu(gate).mul_(up)
        return self._linear(gated, layer.down_weight, layer.down_bias, residual=hidden)
