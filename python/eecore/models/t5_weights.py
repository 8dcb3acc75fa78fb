"""The parameters of a T5, stacked over layers, and the names that checkpoints give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eecore import ops
from eecore.config import T5Config
from eecore.models.weights import NewWeights, WeightView, layer_views
from eecore.ops import Matrix


@dataclass(frozen=True)
class T5StackWeights:
    """Encoder or decoder: self attention and MLP of every layer, and the norm after the last."""

    attention_norm: Tensor
    """[num_layers, hidden_size]"""
    mlp_norm: Tensor
    """[num_layers, hidden_size]"""
    final_norm: Tensor
    """[hidden_size]"""
    position_bias: Tensor
    """float32 [num_buckets, num_heads], shared by all layers."""
    qkv: Matrix
    """[num_layers, 3 * q_size, hidden_size]: Q rows, then K rows, then V rows."""
    o: Matrix
    """[num_layers, hidden_size, q_size]"""
    gate_up: Matrix
    """[num_layers, 2 * intermediate_size, hidden_size]: gate rows, then up rows; [num_layers,
    intermediate_size, hidden_size] if the MLP is not gated."""
    down: Matrix
    """[num_layers, hidden_size, intermediate_size]"""

    @classmethod
    def empty(cls, config: T5Config, num_layers: int, new: NewWeights) -> T5StackWeights:
        """Uninitialised weights of the config's sizes."""
        hidden, inner, size = config.hidden_size, config.intermediate_size, config.q_size
        halves = (inner,) * (2 if config.is_gated else 1)
        return cls(
            attention_norm=new.tensor(num_layers, hidden),
            mlp_norm=new.tensor(num_layers, hidden),
            final_norm=new.tensor(hidden),
            position_bias=new.tensor(config.num_buckets, config.num_heads, dtype=torch.float32),
            qkv=new.matrix(
                "qkv",
                num_layers,
                3 * size,
                hidden,
                parts=(size,) * 3,
                cares=("usual", "more", "most"),
            ),
            o=new.matrix("o", num_layers, hidden, size),
            gate_up=new.matrix("gate_up", num_layers, sum(halves), hidden, parts=halves),
            down=new.matrix("down", num_layers, hidden, inner),
        )

    def stacked(self) -> ops.DecoderWeights:
        """The weights of the layers."""
        names = ops.DecoderWeights._fields
        parts: dict[str, Any] = {name: getattr(self, name, None) for name in names}
        return ops.DecoderWeights(**parts)

    def by_checkpoint_name(self, config: T5Config, stack: str, mlp: int) -> dict[str, WeightView]:
        """What each tensor under ``stack`` ("encoder" or "decoder") of a checkpoint fills.

        The MLP is sublayer ``mlp`` of a block.
        """
        size, inner = config.q_size, config.intermediate_size
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        views = {
            bias: WeightView(self.position_bias),
            f"{stack}.final_layer_norm.weight": WeightView(self.final_norm),
        }
        dense = {"wo": self.down}
        if config.is_gated:
            dense |= {
                "wi_0": self.gate_up.rows(slice(inner)),
                "wi_1": self.gate_up.rows(slice(inner, None)),
            }
        else:
            dense["wi"] = self.gate_up
        attention = {
            "q": self.qkv.rows(slice(size)),
            "k": self.qkv.rows(slice(size, 2 * size)),
            "v": self.qkv.rows(slice(2 * size, None)),
            "o": self.o,
        }
        matrices = {f"0.SelfAttention.{name}": matrix for name, matrix in attention.items()}
        matrices |= {f"{mlp}.DenseReluDense.{name}": matrix for name, matrix in dense.items()}
        norms = {"0.layer_norm": self.attention_norm, f"{mlp}.layer_norm": self.mlp_norm}
        return views | layer_views(f"{stack}.block.{{}}.layer", matrices, norms)


@dataclass(frozen=True)
class T5CrossWeights:
    """The decoder's attention to the encoder's states, in every layer."""

    norm: Tensor
    """[num_layers, hidden_size]"""
    q: Matrix
    """[num_layers, q_size, hidden_size]"""
    kv: Matrix
    """[num_layers, 2 * q_size, hidden_size]: K rows, then V rows."""
    o: Matrix
    """[num_layers, hidden_size, q_size]"""

    @classmethod
    def empty(cls, config: T5Config, new: NewWeights) -> T5CrossWeights:
        """Uninitialised weights of the config's sizes."""
        layers, hidden, size = config.num_layers, config.hidden_size, config.q_size
        return cls(
            norm=new.tensor(layers, hidden),
            q=new.matrix("cross_q", layers, size, hidden),
            kv=new.matrix(
                "cross_kv", layers, 2 * size, hidden, parts=(size, size), cares=("more", "most")
            ),
            o=new.matrix("cross_o", layers, hidden, size),
        )

    def by_checkpoint_name(self, config: T5Config) -> dict[str, WeightView]:
        """What each tensor of a checkpoint fills."""
        matrices = {
            "EncDecAttention.q": self.q,
            "EncDecAttention.k": self.kv.rows(slice(config.q_size)),
            "EncDecAttention.v": self.kv.rows(slice(config.q_size, None)),
            "EncDecAttention.o": self.o,
        }
        return layer_views("decoder.block.{}.layer.1", matrices, {"layer_norm": self.norm})


@dataclass(frozen=True)
class T5Weights:
    """Every parameter."""

    embed_tokens: Matrix
    """[vocab_size, hidden_size], of encoder and decoder; quantised only if also the LM head."""
    lm_head: Matrix
    """[vocab_size, hidden_size]; the same as embed_tokens when they are tied."""
    encoder: T5StackWeights
    decoder: T5StackWeights
    cross: T5CrossWeights

    @classmethod
    def empty(cls, config: T5Config, new: NewWeights) -> T5Weights:
        """Uninitialised weights of the config's sizes."""
        shape, tied = (config.vocab_size, config.hidden_size), config.tie_word_embeddings
        embeddings = new.matrix("embed_tokens", *shape, is_head=tied)
        return cls(
            embed_tokens=embeddings,
            lm_head=embeddings if tied else new.matrix("lm_head", *shape, is_head=True),
            encoder=T5StackWeights.empty(config, config.num_encoder_layers, new),
            decoder=T5StackWeights.empty(config, config.num_layers, new),
            cross=T5CrossWeights.empty(config, new),
        )

    def by_checkpoint_name(self, config: T5Config, embeddings: str) -> dict[str, WeightView]:
        """What each tensor of a Hugging Face checkpoint fills, by the tensor's name."""
        views = {
            embeddings: WeightView.of(self.embed_tokens, "most"),
            **self.encoder.by_checkpoint_name(config, "encoder", mlp=1),
            **self.decoder.by_checkpoint_name(config, "decoder", mlp=2),
            **self.cross.by_checkpoint_name(config),
        }
        if not config.tie_word_embeddings:
            views["lm_head.weight"] = WeightView.of(self.lm_head, "most")
        return views
