"""What all models have in common: a decoder whose layers the caller runs in stretches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eecore import ops
from eecore.config import Activation, AnyModelConfig
from eecore.models.attention import LayerFlags, keys_per_split
from eecore.models.draft_head import DraftHead
from eecore.models.linear import Linear, product
from eecore.models.source import ModelSource
from eecore.ops import Matrix


@dataclass(frozen=True)
class Multipliers:
    """Factors that a model applies between its parts; the defaults change nothing."""

    embedding: float = 1.0
    """The factor of embeddings, rounded to the model's dtype."""
    residual: float = 1.0
    """The factor of a sublayer's output before it is added to the residual stream."""
    logits: float = 1.0
    """The factor of logits."""
    logits_soft_cap: float = 0.0
    """c > 0: multiplied logits l become ``c * tanh(l / c)``."""


class Decoder:
    """A decoder whose layers are called in stretches, so that the caller decides how many run.

    Rows are tokens of any mix of sequences; ``hidden`` is the residual stream, before the final
    norm. Nothing keeps state between calls but the KV cache that is passed in.

    Args:
        source: which model this is; None: unknown.
        embed_tokens: [vocab_size, hidden_size].
        lm_head: [vocab_size, hidden_size].
        head_norm: [hidden_size], the norm before the LM head; in a looped model the norm at the end
            of each loop.
        activation: the activation of the MLPs, which are gated unless it is relu.
    """

    def __init__(
        self,
        config: AnyModelConfig,
        source: ModelSource | None,
        embed_tokens: Matrix,
        lm_head: Matrix,
        head_norm: Tensor,
        activation: Activation = "silu",
        multipliers: Multipliers = Multipliers(),
    ) -> None:
        self.source = source
        self.device, self.dtype = head_norm.device, head_norm.dtype
        self.draft_head: DraftHead | None = None
        """The draft head after the last layer, if there is one; a T5 has none."""
        self.learnt: dict[object, Any] = {}
        """What decoding has learnt about passes over this model, by the settings it holds for."""
        self.check_held: Callable[[Any], None] | None = None
        """Takes this network and updates it from the model that shares its weights, or raises an
        error if that model now needs another network; None: the weights are not shared."""
        self.calls_single_ops = self.device.type != "cpu"
        """Whether layers run op by op; otherwise one call runs a stretch of layers."""
        self.linear = Linear(self.device, config.rms_norm_eps)
        self._embed_tokens, self._lm_head, self._head_norm = embed_tokens, lm_head, head_norm
        self._hidden_size, self._q_size = config.hidden_size, config.q_size
        self._eps, self._activation = config.rms_norm_eps, activation
        self._is_looped = config.num_loops > 1
        self._multipliers = multipliers
        self._embedding_multiplier = float(torch.tensor(multipliers.embedding, dtype=self.dtype))
        self._keys_per_split = keys_per_split(self.device)
        self._flags = LayerFlags(config.num_layers // config.num_loops)

    def embed(
        self,
        token_ids: Tensor,
        *,
        previous: Tensor | None = None,
        sources: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The embeddings, [num_tokens, hidden_size], of int64 ids [num_tokens]; of -1 what is in
        ``out``.

        With ``sources``, int32 [num_tokens], token i is ``previous[sources[i]]`` instead wherever
        ``sources[i]`` is not -1.
        """
        if out is None:
            out = self._head_norm.new_empty(len(token_ids), self._hidden_size)
        table = self._embed_tokens
        return ops.embed_tokens(
            token_ids,
            table.weight,
            scale=table.scale,
            table=table.table,
            previous=previous,
            sources=sources,
            multiplier=self._embedding_multiplier,
            out=out,
        )

    def logits(self, hidden: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """[num_rows, vocab_size]: final norm and LM head.

        In float32 the sums are not rounded: their largest, the lowest id among equals, is the token
        of :meth:`confidence`.
        """
        return product(
            hidden,
            self._lm_head,
            norm_weight=None if self._is_looped else self._head_norm,
            eps=self._eps,
            multiplier=self._multipliers.logits,
            soft_cap=self._multipliers.logits_soft_cap,
            dtype=dtype,
        )

    def confidence(self, hidden: Tensor) -> ops.SoftmaxConfidence:
        """Token, top-2 gap and log-sum-exp of each row's softmax, without logits in memory."""
        return self.measure(hidden)

    @property
    def measure(self) -> ops.SoftmaxMeasure:
        """The norm, LM head and factors that :meth:`confidence` uses."""
        head, numbers = self._lm_head, self._multipliers
        return ops.SoftmaxMeasure(
            None if self._is_looped else self._head_norm,
            head.weight,
            self._eps,
            head.scale,
            head.table,
            numbers.logits,
            numbers.logits_soft_cap,
        )

    def _projected(
        self, attended: Tensor, o: Matrix, hidden: Tensor, post_norm: Tensor | None = None
    ) -> Tensor:
        """Attention's projected output, normed if there is a norm, added to the residual stream."""
        return self._onto(hidden, attended.view(-1, self._q_size), o, post_norm)

    def _onto(self, hidden: Tensor, x: Tensor, matrix: Matrix, post_norm: Tensor | None) -> Tensor:
        """The residual stream plus a linear layer's scaled output, normed if there is a norm."""
        multiplier = self._multipliers.residual
        if post_norm is None:
            return self.linear(x, matrix, residual=hidden, multiplier=multiplier)
        given = self.linear(x, matrix)
        return ops.add_normed(given, post_norm, hidden, eps=self._eps, multiplier=multiplier)

    def _mlp(self, layer: ops.DecoderWeights, hidden: Tensor) -> Tensor:
        inner = self.linear.gated(hidden, layer.gate_up, layer.mlp_norm, self._activation)
        return self._onto(hidden, inner, layer.down, layer.mlp_post_norm)
