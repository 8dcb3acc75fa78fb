"""What all models have in common: a decoder whose layers the caller runs in stretches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional

from eecore import ops
from eecore.config import Activation, AnyModelConfig
from eecore.models.attention import LayerFlags, keys_per_split
from eecore.models.draft_head import DraftHead
from eecore.models.linear import Linear
from eecore.models.source import ModelSource
from eecore.ops import Matrix

__all__ = ["Decoder"]


class Decoder:
    """A decoder whose layers are called in stretches, so that the caller decides how many run.

    Rows are tokens of any mix of sequences; ``hidden`` is the residual stream, before the final
    norm. Nothing keeps state between calls but the KV cache that is passed in.

    Args:
        config: of the model.
        source: which model it is, where that is known.
        embed_tokens: [vocab_size, hidden_size].
        lm_head: [vocab_size, hidden_size].
        head_norm: [hidden_size], the norm before the LM head.
        activation: of the MLPs, which are gated unless it is relu.
    """

    def __init__(
        self,
        config: AnyModelConfig,
        source: ModelSource | None,
        embed_tokens: Matrix,
        lm_head: Matrix,
        head_norm: Tensor,
        activation: Activation = "silu",
    ) -> None:
        self.source = source
        self.device, self.dtype = head_norm.device, head_norm.dtype
        self.draft_head: DraftHead | None = None
        """What drafts after the last layer, where there is one; none is trained for a T5."""
        self.learnt: dict[object, Any] = {}
        """What decoding learnt of passes over it, by what they depend on."""
        self.check_held: Callable[[Any], None] | None = None
        """Takes this over from the model that the weights are shared with, if there is one, or
        raises where that has become another."""
        self.calls_single_ops = self.device.type != "cpu"
        """Whether layers run op by op, not a stretch of them in one call."""
        self.linear = Linear(self.device, config.rms_norm_eps)
        self._embed_tokens, self._lm_head, self._head_norm = embed_tokens, lm_head, head_norm
        self._hidden_size, self._q_size = config.hidden_size, config.q_size
        self._eps, self._activation = config.rms_norm_eps, activation
        self._keys_per_split = keys_per_split(self.device)
        self._flags = LayerFlags(config.num_layers)

    def embed(
        self, token_ids: Tensor, *, previous: Tensor | None = None, sources: Tensor | None = None
    ) -> Tensor:
        """[num_tokens, hidden_size] of int64 ids [num_tokens].

        Token i is ``previous[sources[i]]`` instead where there are sources, int32 [num_tokens], and
        it is not -1.
        """
        table = self._embed_tokens
        return ops.embed_tokens(
            token_ids,
            table.weight,
            scale=table.scale,
            table=table.table,
            previous=previous,
            sources=sources,
            out=self._head_norm.new_empty(len(token_ids), self._hidden_size),
        )

    def logits(self, hidden: Tensor, *, few: bool = False) -> Tensor:
        """Float32 [num_rows, vocab_size]: final norm and LM head.

        With ``few`` in the model's dtype, by one of eecore's ops, however many rows there are.
        """
        logits = self.linear(hidden, self._lm_head, norm=self._head_norm, few=few)
        return logits if few else logits.float()

    def confidence(self, hidden: Tensor) -> ops.SoftmaxConfidence:
        """Token, top-2 gap and log-sum-exp of each row's softmax, without logits in memory."""
        return self.measure(hidden)

    @property
    def measure(self) -> ops.SoftmaxMeasure:
        """What :meth:`confidence` measures with."""
        head = self._lm_head
        return ops.SoftmaxMeasure(self._head_norm, head.weight, self._eps, head.scale, head.table)

    def _projected(self, attended: Tensor, o: Matrix, hidden: Tensor) -> Tensor:
        """Attention's output, added to the residual stream."""
        return self.linear(attended.view(-1, self._q_size), o, residual=hidden)

    def _mlp(self, layer: ops.DecoderWeights, hidden: Tensor) -> Tensor:
        activation, norm = self._activation, layer.mlp_norm
        if not self.linear.is_skinny(hidden):
            inner = _activated(self.linear(hidden, layer.gate_up, norm=norm), activation)
        else:
            into_inner = ops.skinny_linear if activation == "relu" else ops.skinny_gated_linear
            inner = into_inner(
                hidden,
                layer.gate_up.weight,
                weight_scale=layer.gate_up.scale,
                weight_table=layer.gate_up.table,
                bias=layer.gate_up.bias,
                norm_weight=norm,
                eps=self._eps,
                activation=activation,
                constant_weight=True,
            )
        return self.linear(inner, layer.down, residual=hidden)


def _activated(inner: Tensor, activation: Activation) -> Tensor:
    if activation == "relu":
        return inner.relu_()
    gate, up = inner.chunk(2, dim=1)
    if activation == "silu":
        return functional.silu(gate).mul_(up)
    return functional.gelu(gate, approximate="tanh").mul_(up)
