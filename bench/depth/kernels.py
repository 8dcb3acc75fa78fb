"""Times of the ops of a decoding step without an engine: layers, head, checks, filling.

Each op has random weights of the model's sizes, and nothing but the ops is called. The ops run in
turns, so that each finds the caches as it would in a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import eecore
from eecore import ops

PAGE_SIZE = 16
KEYS_PER_SPLIT = 512
PASSES = 6  # of each op in a round


class Kernels:
    """The ops of one model's step, for any number of rows.

    Args:
        config: the model's config.
        weights: "float32", "bfloat16", or "int8", with states in float32.
        max_rows: the largest number of rows to time.
    """

    def __init__(self, config: Any, weights: str, max_rows: int) -> None:
        self._config = config
        self._format = {"int8": "Q8_0"}.get(weights)
        self._dtype = torch.bfloat16 if weights == "bfloat16" else torch.float32
        layers, hidden, q_size = config.num_layers, config.hidden_size, config.q_size
        is_gated = getattr(config, "is_gated", True)
        norm = torch.ones(layers, hidden, dtype=self._dtype)
        self._weights = ops.DecoderWeights(
            attention_norm=norm,
            qkv=self._linear(layers, q_size + 2 * config.kv_size, hidden),
            q_norm=None,
            k_norm=None,
            o=self._linear(layers, hidden, q_size),
            mlp_norm=norm,
            gate_up=self._linear(layers, config.intermediate_size * (1 + is_gated), hidden),
            down=self._linear(layers, hidden, config.intermediate_size),
        )
        self._head = self._linear(config.vocab_size, hidden)
        self._classifier = torch.randn(2, hidden)
        self._states = torch.randn(max_rows, hidden).to(self._dtype)
        self._is_t5 = isinstance(config, eecore.T5Config)
        shapes = ((q_size, hidden), (hidden, q_size))
        self._cross = [self._linear(layers, *shape) for shape in shapes if self._is_t5]
        cache = (layers, 2 * max_rows, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        self._k, self._v = (torch.zeros(cache, dtype=self._dtype) for _ in range(2))
        self.milliseconds: dict[str, dict[int, float]] = {}
        """The minimum time of each op, by rows; filling is timed for one layer."""

    def _linear(self, *shape: int) -> ops.Matrix:
        weight = torch.randn(shape).mul_(shape[-1] ** -0.5)
        if self._format is None:
            return ops.Matrix(weight.to(self._dtype))
        blocks = ops.quantise_weight(weight.flatten(0, -2), self._format)
        packed = ops.pack_weight(blocks, self._format)
        assert packed.table is not None
        return packed._replace(table=packed.table.view(shape[:-1]))

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights that a step at full depth reads."""
        weights = self._weights
        matrices = (weights.qkv, weights.o, weights.gate_up, weights.down, *self._cross)
        norms = weights.attention_norm.nbytes + weights.mlp_norm.nbytes
        read = [tensor for matrix in matrices for tensor in matrix if tensor is not None]
        return sum(tensor.nbytes for tensor in read) + norms + self._head.weight.nbytes

    @torch.inference_mode()
    def round(self, rows: list[int]) -> None:
        """Run all ops a few times in turns, for each number of rows."""
        for count in rows:
            calls = self._calls(count)
            for _ in range(PASSES):
                for name, call in calls.items():
                    began = time.perf_counter()
                    call()
                    self._note(name, count, time.perf_counter() - began)

    def _note(self, name: str, rows: int, seconds: float) -> None:
        known = self.milliseconds.setdefault(name, {})
        milliseconds = seconds * 1e3 / (self._config.num_layers if name == "fill" else 1)
        known[rows] = min(known.get(rows, milliseconds), milliseconds)

    def _calls(self, rows: int) -> dict[str, Callable[[], Any]]:
        """The ops by name, in the order of a step."""
        config, states = self._config, self._states[:rows]
        calls: dict[str, Callable[[], Any]] = {}
        calls["layers"] = self._layers(rows)
        norm = self._weights.attention_norm[0]
        calls["head"] = lambda: ops.exit_confidence_softmax(
            states, norm, self._head.weight, config.rms_norm_eps, lm_head_table=self._head.table
        )
        calls["state"] = lambda: ops.exit_confidence_cosine(states, states)
        calls["classifier"] = lambda: ops.exit_confidence_mlp(states, self._classifier)
        calls["fill"] = self._fill(rows)
        return calls

    def _positions(self, rows: int) -> dict[str, Any]:
        """Arguments of the rotary embedding; none for a T5, which has no rotary embedding."""
        if self._is_t5:
            return {"positions": None, "cos_sin": None}
        rotary_dim = self._config.ropes[0].rotary_dim
        return {
            "positions": torch.full((rows,), PAGE_SIZE - 1),
            "cos_sin": torch.ones(PAGE_SIZE, rotary_dim),
        }

    def _slots(self, rows: int) -> Tensor:
        return torch.arange(rows) * PAGE_SIZE + PAGE_SIZE - 1

    def _layers(self, rows: int) -> Callable[[], Any]:
        config = self._config
        pages = torch.arange(2 * rows, dtype=torch.int32)[:, None]
        lengths = torch.full((rows,), PAGE_SIZE, dtype=torch.int32)
        arguments: dict[str, Any] = {"scale": config.head_dim**-0.5}
        if self._is_t5:
            norm = self._weights.attention_norm
            arguments = {
                "scale": 1.0,
                "cross": ops.CrossAttention(norm, *self._cross, pages[rows:], lengths),
                "position_bias": torch.randn(config.num_buckets, config.num_heads),
                "max_distance": config.max_distance,
                "activation": config.activation,
            }
        where = self._positions(rows)
        batch = (pages[:rows], lengths, torch.arange(rows + 1, dtype=torch.int32))
        return lambda: ops.decoder_layers(
            self._states[:rows],
            self._weights,
            self._k,
            self._v,
            self._slots(rows),
            where["positions"],
            where["cos_sin"],
            *batch,
            begin_layer=0,
            end_layer=config.num_layers,
            eps=config.rms_norm_eps,
            fixed_split_size=KEYS_PER_SPLIT,
            **arguments,
        )

    def _fill(self, rows: int) -> Callable[[], Any]:
        """A call that fills all layers of every row."""
        config, weights = self._config, self._weights
        kv = weights.qkv.rows(slice(config.q_size, None))
        arguments = self._positions(rows)
        first, slots = torch.zeros(rows, dtype=torch.int32), self._slots(rows)
        return lambda: ops.kv_fill(
            self._states[:rows],
            first,
            weights.attention_norm,
            kv,
            self._k,
            self._v,
            slots,
            eps=config.rms_norm_eps,
            **arguments,
        )
