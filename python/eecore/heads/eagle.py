"""EAGLE-3: a draft head of one layer that takes three states of the model.

The states of a position, projected to one by ``fc``, and the embedding of the next token go through
a layer that attends to earlier positions. Its output gives a draft, and is the state of the next
step. (EAGLE-3, Li et al. 2025; norms of EAGLE-3.1 as in SpecForge.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eecore import ops
from eecore.heads.published import PublishedHead, PublishedSettings
from eecore.models.attention import AttentionBatch, keys_per_split
from eecore.models.draft_head import Positions, SeenKeys
from eecore.models.kv_cache import KVCache
from eecore.models.linear import Linear
from eecore.models.llama import LlamaModel, LlamaWeights
from eecore.models.recurrent_head import packed
from eecore.models.rope import RopeTables
from eecore.models.weights import NewWeights
from eecore.ops import Matrix

USUAL_AGREEMENT = (0.7, 0.65, 0.6, 0.6, 0.55, 0.55, 0.5, 0.5)
"""Approximate acceptance rates of a public head's drafts, with which ``Auto`` requests begin."""
LAYER = "Q4_1"
"""The block format of the layer, if the model's weights are quantised."""
LM_HEAD = "Q5_1"
"""The block format of the LM head, if the model's weights are quantised."""


@dataclass(frozen=True, kw_only=True)
class EagleSettings(PublishedSettings):
    """The settings of EAGLE-3 and EAGLE-3.1; ``config.vocab_size`` is the model's."""

    target_size: int
    """The model's hidden_size."""
    norm_before_residual: bool = False
    """Whether the layer's residual stream is the normed state."""
    norm_before_fc: bool = False
    """Whether one RMS norm is applied to all states together."""
    fc_norm: bool = False
    """Whether an RMS norm is applied to each state."""
    norm_logits: bool = True
    """Whether an RMS norm is applied before the LM head."""
    norm_output: bool = False
    """Whether each step takes the normed state of the step before; with ``norm_logits``."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the required tensors, by their names in ``midlayer.*`` files."""
        c, taken = self.config, len(self.taps) * self.target_size
        hidden = c.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, taken),
            "midlayer.hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
            "lm_head.weight": (self.draft_vocab_size, hidden),
            **self._layer_shapes(),
        }
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (taken,)
        if self.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (self.target_size,) for i in range(len(self.taps))}
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the layer's tensors: a model's, but attention takes two states."""
        layer = LlamaWeights.empty(self.config, NewWeights("meta", torch.float32))
        start, shapes = "model.layers.0.", dict[str, tuple[int, ...]]()
        for name, view in layer.by_checkpoint_name(self.config).items():
            if name.startswith(start):
                *rows, columns = view.weight.shape
                takes_both = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
                shape = (*rows, columns * (1 + takes_both))
                shapes[f"midlayer.{name.removeprefix(start)}"] = shape
        return shapes


class EagleHead(PublishedHead):
    """A head, with the model that it drafts for.

    Its matrices are floats of the model's dtype; on a CPU they are blocks of 4 and 5 bits if the
    model's weights are quantised.

    Args:
        network: the model; not changed.
        path: the head's directory.
        settings: the settings in ``config.json``.
        tensors: the tensors of :attr:`EagleSettings.shapes`, in floats, and ``embed_tokens.weight``
            if the head has its own embeddings.
        tokens: int64 [draft_vocab_size], the model's token of each row of the head's LM head.
    """

    def __init__(
        self,
        network: LlamaModel,
        path: Path,
        settings: EagleSettings,
        tensors: Mapping[str, Tensor],
        tokens: Tensor,
    ) -> None:
        super().__init__(settings, path, USUAL_AGREEMENT)
        self.settings, self.network = settings, network
        self._eps = settings.config.rms_norm_eps
        self._linear = Linear(network.device, self._eps)
        self._keys_per_split = keys_per_split(network.device)
        self._ropes = RopeTables(settings.config, network.device)
        self._tokens = tokens.to(network.device)

        def floats(tensor: Tensor) -> Tensor:
            return tensor.to(network.device, network.dtype).contiguous()

        def vector(name: str) -> Tensor | None:
            return floats(tensors[name]) if name in tensors else None

        quantised = network.weights.lm_head.is_quantised and network.device.type == "cpu"

        def matrix(*names: str, columns: slice = slice(None), format: str = LAYER) -> Matrix:
            weight = torch.cat([tensors[f"{name}.weight"][:, columns] for name in names])
            biases = [tensors[f"{n}.bias"] for n in names if f"{n}.bias" in tensors]
            bias = floats(torch.cat(biases)) if biases and not columns.start else None
            if not quantised or weight.shape[1] % 32:
                return Matrix(floats(weight), bias)
            return packed(weight, format)._replace(bias=bias)

        layer, hidden = "midlayer", settings.config.hidden_size
        size = settings.target_size
        self._fc = [
            (vector(f"fc_norm.{i}.weight"), matrix("fc", columns=slice(i * size, (i + 1) * size)))
            for i in range(len(self.taps))
        ]
        self._input_norm = vector("input_norm.weight")
        if self._input_norm is not None:
            self._fc = [(self._input_norm, matrix("fc"))]
        qkv = [f"{layer}.self_attn.{name}_proj" for name in "qkv"]
        self._token_norm = floats(tensors[f"{layer}.input_layernorm.weight"])
        self._state_norm = floats(tensors[f"{layer}.hidden_norm.weight"])
        self._qkv = matrix(*qkv, columns=slice(hidden)), matrix(*qkv, columns=slice(hidden, None))
        self._head_norms = tuple(vector(f"{layer}.self_attn.{n}_norm.weight") for n in "qk")
        self._o = matrix(f"{layer}.self_attn.o_proj")
        self._mlp_norm = floats(tensors[f"{layer}.post_attention_layernorm.weight"])
        self._gate_up = matrix(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj")
        self._down = matrix(f"{layer}.mlp.down_proj")
        self._norm, self._lm_head = (
            floats(tensors["norm.weight"]),
            matrix("lm_head", format=LM_HEAD),
        )
        self._embeddings = vector("embed_tokens.weight")
        self._zeros = floats(torch.zeros(1, hidden))

    @property
    def tokens(self) -> Tensor:
        return self._tokens

    @property
    def measure(self) -> ops.SoftmaxMeasure:
        normed = self.settings.norm_output or not self.settings.norm_logits
        norm = None if normed else self._norm
        head = self._lm_head
        return ops.SoftmaxMeasure(norm, head.weight, self._eps, head.scale, head.table)

    def prepare(self, kv: KVCache) -> None:
        self._ropes.reaching(kv.num_pages * kv.page_size)

    def begin(self, states: Sequence[Tensor], positions: Positions | None = None) -> Tensor:
        assert positions is not None
        begun: Tensor | None = None
        if self._input_norm is not None:
            states = [_beside(states)]
        for state, (norm, weight) in zip(states, self._fc, strict=True):
            begun = self._linear(state, weight, norm=norm, residual=begun)
        assert begun is not None
        made, sources = positions.made, positions.sources
        embedded = self.embed(made, previous=made, sources=sources)
        _, k, v = self._projected(begun, embedded, slice(self.config.q_size, None))
        self._append(None, k, v, positions.kv, positions.batch)
        return begun

    def embed(
        self, token_ids: Tensor, *, previous: Tensor | None = None, sources: Tensor | None = None
    ) -> Tensor:
        """What a layer takes of tokens; see :meth:`LlamaModel.embed`."""
        table = self._embeddings
        if table is None:
            return self.network.embed(token_ids, previous=previous, sources=sources)
        return ops.embed_tokens(token_ids, table, previous=previous, sources=sources)

    def step(self, state: Tensor, embedded: Tensor, seen: SeenKeys | None = None) -> Tensor:
        assert seen is not None
        assert seen.kv.of_head is not None
        kv, batch, config, linear = seen.kv.of_head, seen.batch, self.config, self._linear
        q, k, v = self._projected(state, embedded, slice(None))
        self._append(q, k, v, kv, batch)
        attended = ops.paged_attention(
            q,
            *kv.layers[0],
            batch.page_table,
            batch.seq_lens,
            batch.query_start_loc,
            scale=config.head_dim**-0.5,
            sliding_window=config.layer_windows[0],
            fixed_split_size=self._keys_per_split,
            arrivals=kv.arrivals,
        ).view(-1, config.q_size)
        if self.settings.norm_before_residual:
            attended = linear(attended, self._o, few=True)
            hidden = ops.add_normed(state, self._state_norm, attended, eps=self._eps)
        else:
            hidden = linear(attended, self._o, residual=state, few=True)
        gated = linear.gated(hidden, self._gate_up, self._mlp_norm, config.activation, few=True)
        hidden = linear(gated, self._down, residual=hidden, few=True)
        if not self.settings.norm_output:
            return hidden
        return ops.add_normed(hidden, self._norm, self._zeros.expand_as(hidden), eps=self._eps)

    def _projected(
        self, state: Tensor, embedded: Tensor, rows: slice
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, not rotated: [num_rows, heads, head_dim] each.

        Args:
            state: [num_rows, hidden_size].
            embedded: [num_rows, hidden_size], the embedding of the next token.
            rows: the features to compute, of all heads' features.
        """
        of_token, of_state = (matrix.rows(rows) for matrix in self._qkv)
        features = self._linear(embedded, of_token, norm=self._token_norm)
        features = self._linear(state, of_state, norm=self._state_norm, residual=features)
        heads = features.view(len(features), -1, self.config.head_dim)
        keys = self.config.num_kv_heads
        q, k, v = heads.split_with_sizes((heads.shape[1] - 2 * keys, keys, keys), 1)
        return q, k, v

    def _append(
        self,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        kv: KVCache,
        batch: AttentionBatch,
    ) -> None:
        """Norm and rotate heads, and put keys and values into the cache."""
        q_norm, k_norm = self._head_norms
        ops.append_kv(
            q,
            k,
            v,
            *kv.layers[0],
            batch.slot_mapping,
            positions=batch.positions,
            cos_sin=self._ropes.reaching(kv.num_pages * kv.page_size)[0],
            q_norm_weight=None if q is None else q_norm,
            k_norm_weight=k_norm,
            eps=self._eps,
        )


def _beside(states: Sequence[Tensor]) -> Tensor:
    """States side by side, [num_rows, columns of all states]; a program may be recording."""
    rows, size = states[0].shape
    every = torch.from_numpy(np.arange(rows))
    if states[0].device.type != "cpu":
        every = torch.arange(rows, device=states[0].device)
    beside = states[0].new_empty(rows, len(states) * size)
    for i, state in enumerate(states):
        ops.embed_tokens(every, state, out=beside[:, i * size : (i + 1) * size])
    return beside
