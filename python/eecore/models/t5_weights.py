"""The parameters of a T5, stacked over layers, and the names that checkpoints give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eecore.config import T5Config
from eecore.models.int8 import WeightView

__all__ = ["Matrix", "T5CrossWeights", "T5StackWeights", "T5Weights"]


class Matrix(NamedTuple):
    """A linear layer's weight, of one layer or of all; int8 where it has a scale per row."""

    weight: Tensor
    """[num_layers, out_features, in_features], or of one layer."""
    scale: Tensor | None
    """float32, of that shape without its last axis."""

    def unbind(self) -> list[Matrix]:
        """Layer by layer."""
        scales = [None] * len(self.weight) if self.scale is None else self.scale.unbind(0)
        return [Matrix(*pair) for pair in zip(self.weight.unbind(0), scales, strict=True)]

    def view(self, layer: int, rows: slice) -> WeightView:
        """Rows of one layer."""
        scale = None if self.scale is None else self.scale[layer, rows]
        return WeightView(self.weight[layer, rows], scale)


MakeTensor = Callable[..., Tensor]
MakeMatrix = Callable[..., Matrix]


@dataclass(frozen=True)
class T5StackWeights:
    """Encoder or decoder: self attention and MLP of every layer, and the norm behind the last."""

    attention_norm: Tensor
    """[num_layers, hidden_size]"""
    mlp_norm: Tensor
    """[num_layers, hidden_size]"""
    final_norm: Tensor
    """[hidden_size]"""
    position_bias: Tensor
    """float32 [num_buckets, num_heads], of every layer."""
    qkv: Matrix
    """[num_layers, 3 * q_size, hidden_size]: Q rows, then K rows, then V rows."""
    o: Matrix
    """[num_layers, hidden_size, q_size]"""
    gate_up: Matrix
    """[num_layers, 2 * intermediate_size, hidden_size]: gate rows, then up rows; of an MLP that is
    not gated [num_layers, intermediate_size, hidden_size]."""
    down: Matrix
    """[num_layers, hidden_size, intermediate_size]"""

    @classmethod
    def empty(
        cls, config: T5Config, num_layers: int, tensor: MakeTensor, matrix: MakeMatrix
    ) -> T5StackWeights:
        """Uninitialised."""
        hidden, inner = config.hidden_size, config.intermediate_size
        return cls(
            attention_norm=tensor(num_layers, hidden),
            mlp_norm=tensor(num_layers, hidden),
            final_norm=tensor(hidden),
            position_bias=tensor(config.num_buckets, config.num_heads, dtype=torch.float32),
            qkv=matrix(num_layers, 3 * config.q_size, hidden),
            o=matrix(num_layers, hidden, config.q_size),
            gate_up=matrix(num_layers, inner * (2 if config.is_gated else 1), hidden),
            down=matrix(num_layers, hidden, inner),
        )

    def by_checkpoint_name(self, config: T5Config, stack: str, mlp: int) -> dict[str, WeightView]:
        """Under ``stack`` ("encoder", "decoder"); the MLP is sublayer ``mlp`` of a block."""
        size, inner, whole = config.q_size, config.intermediate_size, slice(None)
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        views = {
            bias: WeightView(self.position_bias),
            f"{stack}.final_layer_norm.weight": WeightView(self.final_norm),
        }
        dense: dict[str, tuple[Matrix, slice]] = {"wo": (self.down, whole)}
        if config.is_gated:
            dense |= {
                "wi_0": (self.gate_up, slice(inner)),
                "wi_1": (self.gate_up, slice(inner, None)),
            }
        else:
            dense["wi"] = self.gate_up, whole
        attention = {
            "q": (self.qkv, slice(size)),
            "k": (self.qkv, slice(size, 2 * size)),
            "v": (self.qkv, slice(2 * size, None)),
            "o": (self.o, whole),
        }
        for layer in range(len(self.attention_norm)):
            block = f"{stack}.block.{layer}.layer"
            for name, (matrix, rows) in attention.items():
                views[f"{block}.0.SelfAttention.{name}.weight"] = matrix.view(layer, rows)
            for name, (matrix, rows) in dense.items():
                views[f"{block}.{mlp}.DenseReluDense.{name}.weight"] = matrix.view(layer, rows)
            views[f"{block}.0.layer_norm.weight"] = WeightView(self.attention_norm[layer])
            views[f"{block}.{mlp}.layer_norm.weight"] = WeightView(self.mlp_norm[layer])
        return views


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
    def empty(cls, config: T5Config, tensor: MakeTensor, matrix: MakeMatrix) -> T5CrossWeights:
        """Uninitialised."""
        layers, hidden, size = config.num_layers, config.hidden_size, config.q_size
        return cls(
            norm=tensor(layers, hidden),
            q=matrix(layers, size, hidden),
            kv=matrix(layers, 2 * size, hidden),
            o=matrix(layers, hidden, size),
        )

    def by_checkpoint_name(self, config: T5Config) -> dict[str, WeightView]:
        """What each tensor of a checkpoint fills."""
        size, whole = config.q_size, slice(None)
        views = {}
        for layer in range(config.num_layers):
            block = f"decoder.block.{layer}.layer.1"
            views[f"{block}.layer_norm.weight"] = WeightView(self.norm[layer])
            for name, matrix, rows in (
                ("q", self.q, whole),
                ("k", self.kv, slice(size)),
                ("v", self.kv, slice(size, None)),
                ("o", self.o, whole),
            ):
                views[f"{block}.EncDecAttention.{name}.weight"] = matrix.view(layer, rows)
        return views


@dataclass(frozen=True)
class T5Weights:
    """Every parameter."""

    embed_tokens: Matrix
    """[vocab_size, hidden_size], of encoder and decoder; int8 only where it is the LM head too."""
    lm_head: Matrix
    """[vocab_size, hidden_size]; the same as embed_tokens when they are tied."""
    encoder: T5StackWeights
    decoder: T5StackWeights
    cross: T5CrossWeights

    @classmethod
    def empty(
        cls,
        config: T5Config,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        int8: bool = False,
    ) -> T5Weights:
        """Uninitialised weights of the config's sizes; on device "meta" they take no memory."""

        def tensor(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        def matrix(*shape: int) -> Matrix:
            if not int8:
                return Matrix(tensor(*shape), None)
            return Matrix(
                tensor(*shape, dtype=torch.int8), tensor(*shape[:-1], dtype=torch.float32)
            )

        lm_head = matrix(config.vocab_size, config.hidden_size)
        untied = Matrix(tensor(config.vocab_size, config.hidden_size), None)
        return cls(
            embed_tokens=lm_head if config.tie_word_embeddings else untied,
            lm_head=lm_head,
            encoder=T5StackWeights.empty(config, config.num_encoder_layers, tensor, matrix),
            decoder=T5StackWeights.empty(config, config.num_layers, tensor, matrix),
            cross=T5CrossWeights.empty(config, tensor, matrix),
        )

    def by_checkpoint_name(self, config: T5Config, embeddings: str) -> dict[str, WeightView]:
        """What each tensor of a Hugging Face checkpoint fills, by the tensor's name.

        Args:
            config: whose weights these are.
            embeddings: what the checkpoint calls them.
        """
        views = {
            embeddings: WeightView(*self.embed_tokens),
            **self.encoder.by_checkpoint_name(config, "encoder", mlp=1),
            **self.decoder.by_checkpoint_name(config, "decoder", mlp=2),
            **self.cross.by_checkpoint_name(config),
        }
        if not config.tie_word_embeddings:
            views["lm_head.weight"] = WeightView(*self.lm_head)
        return views
