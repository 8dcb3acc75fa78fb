"""The forward pass of all decoders without an encoder: Llama and the families like it.

The families differ by the switches of :class:`eecore.config.ModelConfig`. A looped model
(Ouro, Nanbeige) runs its stack of layers several times: layers are numbered through all loops,
layer l has the weights of layer ``l % stack_size`` of the stack and its own keys and values, and
the final norm is applied at the end of each loop.

Layers run in stretches: on the CPU a whole stretch is one op, elsewhere layer by layer. Weights of
all layers are stacked, and a layer works on views: ``kv_fill`` reads the K/V projections of all
layers at once from the memory that the layers use. No weight needs a gradient. Weights of linear
layers may be int8 with a scale per row, or packed; a cache may be in float8.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from eecore import ops
from eecore.config import DeltaConfig, ModelConfig
from eecore.models.attention import AttentionBatch, Texts
from eecore.models.decoder import Decoder, Multipliers
from eecore.models.kv_cache import KVCache
from eecore.models.prompt_attention import PromptAttention, Scores, prompt_attention_of
from eecore.models.rope import RopeTables
from eecore.models.source import ModelSource
from eecore.models.weights import NewWeights, WeightView, layer_views
from eecore.ops import Matrix

# Names in a checkpoint.
EMBEDDINGS = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
GATE = "model.early_exit_gate"


@dataclass(frozen=True)
class NormNames:
    """What a family calls the norms of its layers in a checkpoint, without ``.weight``."""

    attention: str = "input_layernorm"
    """Before attention."""
    mlp: str = "post_attention_layernorm"
    """Before the MLP."""
    attention_post: str = "post_attention_layernorm"
    """After attention."""
    mlp_post: str = "post_feedforward_layernorm"
    """After the MLP."""
    queries: str = "self_attn.q_norm"
    keys: str = "self_attn.k_norm"


GEMMA_NORMS = NormNames(mlp="pre_feedforward_layernorm")
LFM2_NORMS = NormNames(
    attention="operator_norm",
    mlp="ffn_norm",
    queries="self_attn.q_layernorm",
    keys="self_attn.k_layernorm",
)
OURO_NORMS = NormNames(attention_post="input_layernorm_2", mlp_post="post_attention_layernorm_2")
NORM_NAMES = {
    "Gemma2ForCausalLM": GEMMA_NORMS,
    "Gemma3ForCausalLM": GEMMA_NORMS,
    "Gemma3ForConditionalGeneration": GEMMA_NORMS,
    "Lfm2ForCausalLM": LFM2_NORMS,
    "OuroForCausalLM": OURO_NORMS,
}
"""The names of norms in architectures that do not have the defaults of :class:`NormNames`."""
WHOLE_MATRICES = {
    "Phi3ForCausalLM": {"self_attn.qkv_proj": "qkv", "mlp.gate_up_proj": "gate_up"},
    "GraniteMoeHybridForCausalLM": {
        "shared_mlp.input_linear": "gate_up",
        "shared_mlp.output_linear": "down",
    },
}
"""Tensors that fill a whole field of :class:`LlamaWeights`, by architecture; other architectures
store the field in parts, or under another name."""
PART_NAMES = {
    "Lfm2ForCausalLM": {
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
}
"""The names of parts of fields in architectures that do not have Llama's, by Llama's."""
FINAL_NORMS = {"Lfm2ForCausalLM": "model.embedding_norm.weight"}
"""The names of the norm before the LM head that are not :data:`NORM`."""


@dataclass(frozen=True)
class Convolutions:
    """The weights of short convolutions, each for all layers that have one."""

    first: Matrix
    """[num_convolutions, 3 * hidden_size, hidden_size]; rows of B, then of C, then of x."""
    last: Matrix
    """[num_convolutions, hidden_size, hidden_size]"""
    taps: Tensor
    """[num_convolutions, conv_taps, hidden_size], the oldest position first."""

    def by_checkpoint_name(self, block: str, layers: tuple[int, ...]) -> dict[str, WeightView]:
        """What the tensors of these layers fill; ``block``: the name of a layer."""
        matrices = {"conv.in_proj": self.first, "conv.out_proj": self.last}
        taps = {  # a checkpoint has the taps of each feature one after the other
            f"{block.format(layer)}.conv.conv.weight": WeightView(taps.t()[:, None])
            for layer, taps in zip(layers, self.taps, strict=True)
        }
        return taps | layer_views(block, matrices, {}, layers=layers)


@dataclass(frozen=True)
class Deltas:
    """The weights of gated delta rules, each for all layers that have one."""

    first: Matrix
    """[num_deltas, conv_size + value_size, hidden_size]; rows of queries, keys, values, then of the
    gates of the output."""
    gates: Matrix
    """[num_deltas, 2 * num_value_heads, hidden_size], floats; rows of beta, then of the decay."""
    last: Matrix
    """[num_deltas, hidden_size, value_size]"""
    taps: Tensor
    """[num_deltas, taps, conv_size], the oldest position first."""
    log_rate: Tensor
    """Float32 [num_deltas, num_value_heads], ``A_log``: decays are exp(-exp(log_rate) * ...)."""
    dt_bias: Tensor
    """Float32 [num_deltas, num_value_heads]"""
    norm: Tensor
    """[num_deltas, value_dim], of the output of a head."""

    @classmethod
    def empty(cls, config: DeltaConfig, hidden_size: int, new: NewWeights) -> Deltas:
        """Uninitialised weights of the config's sizes."""
        count, heads = len(config.layers), config.num_value_heads
        parts = (config.conv_size, config.value_size)
        gates = new.tensor(count, 2 * heads, hidden_size)
        return cls(
            first=new.matrix("delta_first", count, sum(parts), hidden_size, parts=parts),
            gates=Matrix(gates),
            last=new.matrix("delta_last", count, hidden_size, config.value_size),
            taps=new.tensor(count, config.taps, config.conv_size),
            log_rate=new.tensor(count, heads, dtype=torch.float32),
            dt_bias=new.tensor(count, heads, dtype=torch.float32),
            norm=new.tensor(count, config.value_dim),
        )

    def by_checkpoint_name(self, block: str, config: DeltaConfig) -> dict[str, WeightView]:
        """What the tensors of these layers fill; ``block``: the name of a layer."""
        size, heads = config.conv_size, config.num_value_heads
        matrices = {
            "in_proj_qkv": self.first.rows(slice(size)),
            "in_proj_z": self.first.rows(slice(size, None)),
            "in_proj_b": self.gates.rows(slice(heads)),
            "in_proj_a": self.gates.rows(slice(heads, None)),
            "out_proj": self.last,
        }
        block = f"{block}.linear_attn"
        others = {  # a checkpoint has the taps of each feature one after the other
            "conv1d.weight": self.taps.transpose(1, 2)[:, :, None],
            "A_log": self.log_rate,
            "dt_bias": self.dt_bias,
            "norm.weight": self.norm,
        }
        views = {
            f"{block.format(layer)}.{name}": WeightView(of_layer)
            for name, stacked in others.items()
            for layer, of_layer in zip(config.layers, stacked, strict=True)
        }
        return views | layer_views(block, matrices, {}, layers=config.layers)


@dataclass(frozen=True)
class LlamaWeights:
    """Every parameter; Q rows come before K rows before V rows, gate rows before up rows.

    A matrix with a scale is int8, and each row times its scale is the checkpoint's row; a matrix
    with a table is packed, in blocks of 2 to 8 bits.
    """

    embed_tokens: Matrix
    """[vocab_size, hidden_size]; where floats are quantised as they are read, only the LM head is.
    """
    lm_head: Matrix
    """[vocab_size, hidden_size]; the same as embed_tokens when they are tied."""
    final_norm: Tensor
    """[hidden_size]"""
    attention_norm: Tensor | None
    """[num_layers, hidden_size], before attention."""
    mlp_norm: Tensor | None
    """[num_layers, hidden_size], before the MLP."""
    qkv: Matrix
    """[layers with attention, projected_q_size + 2 * kv_size, hidden_size]"""
    o: Matrix
    """[layers with attention, hidden_size, q_size]"""
    gate_up: Matrix
    """[num_layers, 2 * intermediate_size, hidden_size]"""
    down: Matrix
    """[num_layers, hidden_size, intermediate_size]"""
    q_norm: Tensor | None
    """[layers with attention, head_dim], or [num_layers, q_size]"""
    k_norm: Tensor | None
    """[layers with attention, head_dim], or [num_layers, kv_size]"""
    attention_post_norm: Tensor | None = None
    """[num_layers, hidden_size], after attention."""
    mlp_post_norm: Tensor | None = None
    """[num_layers, hidden_size], after the MLP."""
    gate: tuple[Tensor, Tensor] | None = None
    """The exit gate as a classifier of two classes, continue (whose logit is 0) and exit: weight
    float32 [2, hidden_size] and bias float32 [2]."""
    convolutions: Convolutions | None = None
    deltas: Deltas | None = None

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        new: NewWeights,
        shared: tuple[Matrix, Matrix] | None = None,
    ) -> LlamaWeights:
        """Uninitialised weights of the config's sizes.

        Args:
            shared: another model's embeddings and LM head; None: new ones.
        """
        layers, hidden, inner = config.stack_size, config.hidden_size, config.intermediate_size
        qkv = (config.projected_q_size, config.kv_size, config.kv_size)
        shape, tied = (config.vocab_size, hidden), config.tie_word_embeddings
        if shared is None:
            embeddings = new.matrix("embed_tokens", *shape, is_head=tied)
            lm_head = embeddings if tied else new.matrix("lm_head", *shape, is_head=True)
        else:
            embeddings, lm_head = shared

        def norms(are_there: bool) -> Tensor | None:
            return new.tensor(layers, hidden) if are_there else None

        q_norm, k_norm = config.qk_norm_sizes
        attending, convolutions = len(config.attention_layers), None
        if count := len(config.conv_layers):
            convolutions = Convolutions(
                first=new.matrix("conv_first", count, 3 * hidden, hidden),
                last=new.matrix("conv_last", count, hidden, hidden),
                taps=new.tensor(count, config.conv_taps, hidden),
            )
        deltas = None if config.delta is None else Deltas.empty(config.delta, hidden, new)
        gate = None
        if config.gate_threshold is not None:
            sizes = (2, hidden), (2,)
            gate = tuple(new.tensor(*size, dtype=torch.float32).zero_() for size in sizes)
        return cls(
            embed_tokens=embeddings,
            lm_head=lm_head,
            final_norm=new.tensor(hidden),
            attention_norm=norms(config.pre_norm),
            mlp_norm=norms(config.pre_norm),
            qkv=new.matrix(
                "qkv",
                attending,
                sum(qkv),
                hidden,
                parts=qkv,
                cares=("usual", "more", "most"),
                bias=config.attention_bias,
            ),
            o=new.matrix("o", attending, hidden, config.q_size, bias=config.output_bias),
            gate_up=new.matrix(
                "gate_up", layers, 2 * inner, hidden, parts=(inner, inner), bias=config.mlp_bias
            ),
            down=new.matrix("down", layers, hidden, inner, bias=config.mlp_bias),
            q_norm=new.tensor(attending, q_norm) if q_norm else None,
            k_norm=new.tensor(attending, k_norm) if k_norm else None,
            attention_post_norm=norms(config.post_norm),
            mlp_post_norm=norms(config.post_norm),
            gate=None if gate is None else (gate[0], gate[1]),
            convolutions=convolutions,
            deltas=deltas,
        )

    def stacked(self) -> ops.DecoderWeights:
        """The weights of the layers."""
        return ops.DecoderWeights(*(getattr(self, name) for name in ops.DecoderWeights._fields))

    def by_checkpoint_name(
        self, config: ModelConfig, embeddings: str = EMBEDDINGS
    ) -> dict[str, WeightView]:
        """What each tensor of a Hugging Face checkpoint fills, by the tensor's name."""
        q_size, kv_size = config.projected_q_size, config.kv_size
        inner = config.intermediate_size
        parts = {
            "qkv": {
                "self_attn.q_proj": self.qkv.rows(slice(q_size)),
                "self_attn.k_proj": self.qkv.rows(slice(q_size, q_size + kv_size)),
                "self_attn.v_proj": self.qkv.rows(slice(q_size + kv_size, None)),
            },
            "o": {"self_attn.o_proj": self.o},
            "gate_up": {
                "mlp.gate_proj": self.gate_up.rows(slice(inner)),
                "mlp.up_proj": self.gate_up.rows(slice(inner, None)),
            },
            "down": {"mlp.down_proj": self.down},
        }
        whole = WHOLE_MATRICES.get(config.architecture, {})
        for name, field in whole.items():
            parts[field] = {name: getattr(self, field)}
        own = PART_NAMES.get(config.architecture, {})
        attention, mlp = (
            {own.get(name, name): matrix for field in both for name, matrix in parts[field].items()}
            for both in (("qkv", "o"), ("gate_up", "down"))
        )
        rows = {"self_attn.qkv_proj": {"q": q_size, "k": kv_size, "v": kv_size}}
        names = NORM_NAMES.get(config.architecture, NormNames())
        of_heads = {names.queries: self.q_norm, names.keys: self.k_norm}
        norms: dict[str, Tensor | None] = {}
        if config.pre_norm:
            norms |= {names.attention: self.attention_norm, names.mlp: self.mlp_norm}
        if config.post_norm:
            norms[names.attention_post] = self.attention_post_norm
            norms[names.mlp_post] = self.mlp_post_norm
        views = {
            embeddings: WeightView.of(self.embed_tokens, "most"),
            final_norm_name(config): WeightView(self.final_norm, offset=config.norm_offset),
        }
        if not config.tie_word_embeddings:
            views[HEAD] = WeightView.of(self.lm_head, "most")
        if self.gate is not None:
            views |= {f"{GATE}.weight": WeightView(self.gate[0][1:])}
            views |= {f"{GATE}.bias": WeightView(self.gate[1][1:])}
        block, offset = "model.layers.{}", config.norm_offset
        if self.convolutions is None and self.deltas is None:
            each = {**attention, **mlp}
            return views | layer_views(block, each, {**of_heads, **norms}, offset, rows)
        views |= layer_views(block, attention, of_heads, offset, rows, config.attention_layers)
        views |= layer_views(block, mlp, norms, offset, rows)
        if self.convolutions is not None:
            views |= self.convolutions.by_checkpoint_name(block, config.conv_layers)
        if self.deltas is not None and config.delta is not None:
            views |= self.deltas.by_checkpoint_name(block, config.delta)
        return views


def final_norm_name(config: ModelConfig) -> str:
    """The name of the final norm in a checkpoint."""
    return FINAL_NORMS.get(config.architecture, NORM)


class LlamaModel(Decoder):
    """A decoder with rotary embedding, grouped-query attention and a gated MLP."""

    _attending: Tensor | None = None
    """Int32, the numbers of the layers with attention; None: all of them."""
    _fill_norm: Tensor | None = None
    """The attention norms of these layers; None: those of the weights."""
    _runs_stretches = True
    """Whether one op can run a stretch of the layers on a CPU."""

    def __init__(
        self, config: ModelConfig, weights: LlamaWeights, source: ModelSource | None = None
    ) -> None:
        head = weights.embed_tokens, weights.lm_head, weights.final_norm
        multipliers = Multipliers(
            config.embedding_multiplier,
            config.residual_multiplier,
            1 / config.logits_divisor,
            config.logits_soft_cap or 0.0,
        )
        super().__init__(config, source, *head, config.activation, multipliers)
        self.config, self.weights = config, weights
        self._ropes = RopeTables(config, self.device)
        self.attention_scale = (
            config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        )
        """Multiplies the scores of attention."""
        self._soft_cap = config.attention_soft_cap or 0.0
        self.prompt_attention: PromptAttention | None = prompt_attention_of(self.device, self.dtype)
        """The attention of long chunks of prompts; None: eecore's kernels."""
        self._stacked = weights.stacked()
        self._layers = self._by_layer()
        windows = torch.tensor(config.layer_windows, dtype=torch.int32)
        self._windows = windows if windows.any() else None
        self._kv = weights.qkv.rows(slice(config.projected_q_size, None))

    def _by_layer(self) -> list[ops.DecoderWeights]:
        """The weights of each layer of the stack, as views."""
        return self._stacked.unbind()

    def prepare(self, kv: KVCache, num_more: int = 0) -> None:
        """Compute the tables that recorded programs need for a cache; unrecorded calls do so
        themselves.

        ``num_more``: positions beyond the cache's slots, for rows without a slot.
        """
        self._ropes.reaching(kv.num_pages * kv.page_size + num_more)

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

        Skipped attention also writes no keys or values. ``hidden`` [num_tokens, hidden_size] is not
        changed (and may be returned itself if everything is skipped). On the CPU a row's result is
        bit for bit the same whichever rows run with it.
        """
        size, skipped = self.config.stack_size, (skip_attention, skip_mlp)
        if not self._is_looped:
            return self._stretch(0, range(begin, end), hidden, kv, batch, *skipped)
        for first in range(begin // size * size, end, size):
            some = range(max(begin - first, 0), min(end - first, size))
            hidden = self._stretch(first, some, hidden, kv, batch, *skipped)
            if some.stop == size:
                hidden = ops.add_normed(hidden, self._head_norm, eps=self._eps)
        return hidden

    def next_loop(
        self, hidden: Tensor, kv: KVCache, batch: AttentionBatch, *, out: Tensor | None = None
    ) -> Tensor:
        """The residual stream after one more loop of a looped model, in which each row may be in
        another loop: the pages and slots in ``batch`` are those of the row's own loop.

        ``out``: [num_tokens, hidden_size], written and returned; None: a new tensor.
        """
        hidden = self._stretch(None, range(self.config.stack_size), hidden, kv, batch)
        return ops.add_normed(hidden, self._head_norm, eps=self._eps, out=out)

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
        """The residual stream after some layers of the stack, in the loop that begins with layer
        ``first``; None: of rows each of which is in a loop of its own."""
        if self._runs_stretches and not self.calls_single_ops:
            cos_sin, layer_ropes = self.tables(kv)
            k, v = (kv.k, kv.v) if first is None else kv.loop(first // self.config.stack_size)
            return ops.decoder_layers(
                hidden,
                self._stacked,
                k,
                v,
                batch.slot_mapping,
                batch.positions,
                cos_sin,
                batch.page_table,
                batch.seq_lens,
                batch.query_start_loc,
                begin_layer=layers.start,
                end_layer=layers.stop,
                scale=self.attention_scale,
                eps=self.config.rms_norm_eps,
                sliding_window=self._windows,
                activation=self.config.activation,
                residual_multiplier=self.config.residual_multiplier,
                soft_cap=self._soft_cap,
                layer_ropes=layer_ropes,
                skip_attention=self._skipped(first, skip_attention),
                skip_mlp=self._skipped(first, skip_mlp),
                fixed_split_size=self._keys_per_split,
                key_scales=kv.key_scales,
                value_scales=kv.value_scales,
                causal=batch.causal,
            )
        for index in layers:
            number = index if first is None else first + index
            if number not in skip_attention:
                if first is None:
                    cache = kv.k[index], kv.v[index]
                else:
                    cache = kv.layers[number % len(kv.layers)]
                # An exit check or the begin of a round may still write slots and positions, so the
                # first layer of the stretch does not read them early.
                places = index > layers.start
                hidden = self._attention(number, hidden, kv, cache, batch, places=places)
            if number not in skip_mlp:
                hidden = self._mlp(self._layers[index], hidden)
        return hidden

    def _skipped(self, first: int | None, layers: frozenset[int]) -> Tensor | None:
        """Flags of the stack's layers, in the loop that begins with layer ``first``."""
        if first and layers:
            layers = frozenset(layer - first for layer in layers)
        return self._flags.of(layers)

    def whole_text(self, length: int) -> AttentionBatch:
        """The batch of a single text that lies whole in the first page of a cache."""
        positions = torch.arange(length, device=self.device)

        def numbers(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        return AttentionBatch(
            positions,
            positions,
            numbers(0)[None],
            numbers(length),
            numbers(0, length),
            states=numbers(0, 0)[None],
        )

    def queries(self, layer: int, hidden: Tensor) -> Tensor:
        """A layer's queries, not rotated, from the state before the layer: [num_rows, num_q_heads,
        head_dim]. Layers count from 0."""
        config, weights = self.config, self._layers[layer % self.config.stack_size]
        rows = self.linear(hidden, weights.qkv, norm=weights.attention_norm)
        q, norm = rows[:, : config.projected_q_size], weights.q_norm
        if config.attention_gate:
            q = q.view(len(rows), -1, 2, config.head_dim)[:, :, 0].reshape(len(rows), -1)
        if norm is not None and config.qk_norm == "projection":
            q = self.linear.normed(q, norm)
        q = q.reshape(len(rows), -1, config.head_dim)
        if norm is not None and config.qk_norm == "head":
            q = self.linear.normed(q, norm)
        return q

    def cos_sin(self, num_positions: int, layer: int) -> Tensor:
        """The rotary table of a layer's queries: float32 [num_positions or more, rotary_dim], as
        :func:`append_kv` takes it. Layers count from 0."""
        return self._ropes.reaching(num_positions)[self._places(layer)[0]]

    def rotate_alike(self, layers: Iterable[int]) -> bool:
        """Whether the queries of all these layers have the same rotary embedding."""
        return len({self._places(layer)[0] for layer in layers}) <= 1

    def no_keys(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Keys for :meth:`rotate` that are not stored: the keys, and slots of -1."""
        keys = self.weights.final_norm.new_zeros(num_rows, 1, self.config.head_dim)
        return keys, torch.full((num_rows,), -1, device=self.device)

    def rotate(
        self,
        q: Tensor,
        layer: int,
        positions: Tensor,
        kv: KVCache,
        no_keys: tuple[Tensor, Tensor],
    ) -> None:
        """Give queries the rotary embedding of a layer, in place.

        Args:
            q: [num_rows, num_heads, head_dim].
            layer: the layer's number, from 0.
            positions: int64 [num_rows].
            kv: the cache that the queries will read; nothing is written to it.
            no_keys: the result of :meth:`no_keys` for as many rows.
        """
        k_cache, v_cache = (cache[:, :, :1] for cache in kv.layers[0])
        scales = [None if s is None else s[:1] for s in kv.layer_scales[0]]
        keys, slots = no_keys
        ops.append_kv(
            q,
            keys,
            keys,
            k_cache,
            v_cache,
            slots,
            positions=positions,
            cos_sin=self._tables(kv)[self._places(layer)[0]],
            key_scales=scales[0],
            value_scales=scales[1],
        )

    def attend(
        self, q: Tensor, layer: int, heads: slice, kv: KVCache, texts: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        """Attention of queries to keys of a layer: [num_rows, num_heads, head_dim].

        Args:
            q: [num_rows, num_heads, head_dim], rotated.
            layer: the number, from 0, of a layer without a window.
            heads: the layer's key heads to attend to, each by an equal number of query heads.
            texts: the page table, and the number of keys and the first query of each text, as in
                :class:`AttentionBatch`.
        """
        k_cache, v_cache = (cache[:, :, heads] for cache in kv.layers[layer])
        scales = [None if s is None else s[heads] for s in kv.layer_scales[layer]]
        return ops.paged_attention(
            q,
            k_cache,
            v_cache,
            *texts,
            scale=self.attention_scale,
            soft_cap=self._soft_cap,
            fixed_split_size=self._keys_per_split,
            arrivals=kv.arrivals,
            key_scales=scales[0],
            value_scales=scales[1],
        )

    def fill_kv(
        self,
        hidden: Tensor,
        exit_layer: Tensor,
        kv: KVCache,
        positions: Tensor,
        slot_mapping: Tensor,
        texts: Texts | None = None,  # noqa: ARG002
    ) -> None:
        """Write keys and values of the layers that each row skipped, from its exit state.

        Row t fills layers ``exit_layer[t]..num_layers-1`` (int32) at ``slot_mapping[t]``, each with
        the layer's own norm, projection and rotary embedding. (Early-exit framework §3.2.) Rows of
        a looped model exit at the ends of loops, and the loops that a row skipped all get the same
        keys and values, which are computed once. There ``exit_layer`` counts from the loop that the
        slot is in. ``texts``: of a model with states, the fields of :class:`AttentionBatch` that
        say whose rows they are.
        """
        cos_sin, layer_ropes = self.tables(kv)
        ops.kv_fill(
            hidden,
            exit_layer,
            self.weights.attention_norm if self._fill_norm is None else self._fill_norm,
            self._kv,
            kv.k,
            kv.v,
            slot_mapping,
            k_norm_weight=self.weights.k_norm,
            positions=positions,
            cos_sin=cos_sin,
            eps=self.config.rms_norm_eps,
            key_scales=kv.key_scales,
            value_scales=kv.value_scales,
            layer_ropes=layer_ropes,
            loop_slots=kv.loop_slots,
            layer_numbers=self._attending,
        )

    @property
    def gate(self) -> ops.MlpMeasure | None:
        """The measure of a looped model's exit gate: the probability that a row exits after a loop,
        from its state there, if it has not exited before. None: the model has no gate."""
        found = self.weights.gate
        return None if found is None else ops.MlpMeasure(*found)

    def _places(self, layer: int) -> tuple[int, int]:
        """The numbers of the rotary tables of a layer's queries and keys."""
        return self._ropes.places[layer % self.config.stack_size]

    def _tables(self, kv: KVCache) -> Tensor:
        """The rotary tables for all positions that a sequence in the cache can be at."""
        return self._ropes.reaching(kv.num_pages * kv.page_size)

    def tables(self, kv: KVCache) -> tuple[Tensor, Tensor | None]:
        """The rotary embeddings as ops over several layers take them: ``cos_sin`` and
        ``layer_ropes``."""
        tables, by_layer = self._tables(kv), self._ropes.by_layer
        return (tables[0] if by_layer is None else tables), by_layer

    def _attention(
        self,
        index: int,
        hidden: Tensor,
        kv: KVCache,
        cache: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        places: bool,
    ) -> Tensor:
        """The residual stream after attention of a layer, whose keys and values are ``cache``.

        ``places``: no kernel in flight writes slots or positions. The page table and lengths are
        always written before the kernel that appends keys begins.
        """
        config, of_stack = self.config, index % self.config.stack_size
        layer = self._layers[of_stack]
        k_cache, v_cache = cache
        key_scales, value_scales = kv.layer_scales[index % len(kv.layers)]
        tables, (of_queries, of_keys) = self._tables(kv), self._places(index)
        append = ops.AppendKv(
            k_cache,
            v_cache,
            batch.slot_mapping,
            batch.positions,
            tables[of_keys],
            layer.q_norm,
            layer.k_norm,
            key_scales,
            value_scales,
            None if of_queries == of_keys else tables[of_queries],
            places,
        )
        q, gate = self._into_cache(hidden, layer, append)
        for_prompts = self.prompt_attention
        scores = Scores(self.attention_scale, config.layer_windows[of_stack], self._soft_cap)
        own_dtype = k_cache.dtype == q.dtype
        if for_prompts is not None and batch.chunks and own_dtype and for_prompts.takes(scores):
            attended = for_prompts(q, k_cache, v_cache, batch.page_table, batch.chunks, scores)
        else:
            attended = ops.paged_attention(
                q,
                k_cache,
                v_cache,
                batch.page_table,
                batch.seq_lens,
                batch.query_start_loc,
                scale=self.attention_scale,
                soft_cap=self._soft_cap,
                causal=batch.causal,
                sliding_window=config.layer_windows[of_stack],
                fixed_split_size=self._keys_per_split,
                arrivals=kv.arrivals,
                key_scales=key_scales,
                value_scales=value_scales,
                constant_places=True,
            )
        if gate is not None:
            attended = ops.sigmoid_gate(attended.contiguous(), gate)
        return self._projected(attended, layer.o, hidden, layer.attention_post_norm)

    def _into_cache(
        self, hidden: Tensor, layer: ops.DecoderWeights, append: ops.AppendKv
    ) -> tuple[Tensor, Tensor | None]:
        """Queries of rows, [num_rows, num_q_heads, head_dim], and the gates of attention's output,
        if there are any; keys and values go to the cache."""
        config = self.config
        if not config.attention_gate:
            return self.linear.into_cache(hidden, layer.qkv, layer.attention_norm, append), None
        rows = self.linear(hidden, layer.qkv, norm=layer.attention_norm)
        sizes = (config.projected_q_size, config.kv_size, config.kv_size)
        q, k, v = (
            each.view(len(rows), -1, config.head_dim) for each in rows.split_with_sizes(sizes, 1)
        )
        q, gate = q.view(len(rows), -1, 2, config.head_dim).unbind(2)
        ops.append_kv(q, k, v, **append._asdict(), eps=self._eps)
        return q, gate
