"""A Llama of fixed shapes: the forward pass of a serving engine without its host.

Its products are cuBLAS's (torch.mm); norms, rotary embedding, the cache and attention are
FlashInfer's kernels if it is installed, else torch's. No tensor moves, so that a pass can be
captured into one CUDA graph. A shape is a decoding step (one query a sequence), a verification (a
few queries) or a prompt (many). This module needs only torch, not eecore.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

EPS, THETA, PAGE_SIZE = 1e-5, 500000.0, 16


@dataclass(frozen=True)
class LlamaShape:
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def qkv_size(self) -> int:
        """Features of queries, keys and values together."""
        return (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim

    def weight_bytes(self, itemsize: int) -> int:
        """Bytes that a pass reads: all layers and the LM head."""
        layer = self.hidden_size * (self.qkv_size + self.num_q_heads * self.head_dim)
        layer += 3 * self.hidden_size * self.intermediate_size
        return (self.num_layers * layer + self.vocab_size * self.hidden_size) * itemsize


SHAPES = {
    "135m": LlamaShape(30, 576, 1536, 9, 3, 64, 49152),
    "1b": LlamaShape(16, 2048, 8192, 32, 8, 64, 128256),
    "8b": LlamaShape(32, 4096, 14336, 32, 8, 128, 128256),
    "tiny": LlamaShape(2, 64, 96, 4, 2, 16, 128),
}


class Layer(NamedTuple):
    """Weights of one layer, each [out_features, in_features]."""

    input_norm: Tensor
    qkv: Tensor
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    lm_head: Tensor

    @staticmethod
    def random(shape: LlamaShape, device: torch.device, dtype: torch.dtype) -> Weights:
        """Seeded random weights; the LM head is the embedding, which reads the same bytes."""
        generator = torch.Generator(device).manual_seed(0)

        def matrix(rows: int, columns: int) -> Tensor:
            made = torch.empty(rows, columns, device=device, dtype=dtype)
            return made.normal_(0.0, columns**-0.5, generator=generator)

        ones = torch.ones(shape.hidden_size, device=device, dtype=dtype)
        hidden, inner = shape.hidden_size, shape.intermediate_size
        layers = [
            Layer(
                ones,
                matrix(shape.qkv_size, hidden),
                matrix(hidden, shape.num_q_heads * shape.head_dim),
                ones,
                matrix(2 * inner, hidden),
                matrix(hidden, inner),
            )
            for _ in range(shape.num_layers)
        ]
        embedding = matrix(shape.vocab_size, hidden)
        return Weights(embedding, layers, ones, embedding)


@dataclass(frozen=True)
class Pass:
    """Sequences of equal length, and the number of last tokens that a pass computes."""

    batch: int
    num_queries: int
    num_keys: int

    @property
    def rows(self) -> int:
        return self.batch * self.num_queries


class TorchKernels:
    """torch's kernels; the keys of a sequence are contiguous."""

    name = "cuBLAS and torch, one graph"

    def __init__(
        self, shape: LlamaShape, work: Pass, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape, self.work = shape, work
        cache = (2, work.batch, work.num_keys, shape.num_kv_heads, shape.head_dim)
        self.caches = [torch.randn(cache, device=device).to(dtype) for _ in range(shape.num_layers)]
        first = work.num_keys - work.num_queries
        self.positions = torch.arange(first, work.num_keys, device=device).repeat(work.batch)
        half = torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim
        angles = torch.arange(work.num_keys, device=device).float()[:, None] * THETA**-half
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
        angles = self.cos_sin[self.positions][:, None].to(dtype)
        self._cos, self._sin = angles.chunk(2, dim=-1)
        several = work.num_queries > 1
        self._mask = causal_lower_right(work.num_queries, work.num_keys) if several else None

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, EPS)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The normed sum, and the sum."""
        residual = residual + x
        return self.norm(residual, weight), residual

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * self._cos - b * self._sin, b * self._cos + a * self._sin], dim=-1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of [rows, heads, head_dim] over the cache, after appending the new keys."""
        work, cache = self.work, self.caches[layer]
        q, k = self.rotated(q), self.rotated(k)
        new = (work.batch, work.num_queries, *k.shape[1:])
        cache[0, :, -work.num_queries :] = k.view(new)
        cache[1, :, -work.num_queries :] = v.reshape(new)
        queries = q.view(work.batch, work.num_queries, *q.shape[1:]).transpose(1, 2)
        keys, values = (each.transpose(1, 2) for each in cache)
        found = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=self._mask, enable_gqa=True
        )
        return found.transpose(1, 2).reshape(work.rows, -1)


class FlashInferKernels(TorchKernels):
    """FlashInfer's kernels; keys are in pages in any order; planned once, outside of the graph."""

    name = "cuBLAS and FlashInfer, one graph"

    def __init__(
        self, shape: LlamaShape, work: Pass, device: torch.device, dtype: torch.dtype
    ) -> None:
        import flashinfer

        super().__init__(shape, replace(work, batch=1, num_queries=1), device, dtype)
        self._lib, self.work = flashinfer, work
        first = work.num_keys - work.num_queries
        positions = torch.arange(first, work.num_keys, device=device)
        self.positions = positions.repeat(work.batch).int()
        pages = -(-work.num_keys // PAGE_SIZE)
        cache = (pages * work.batch, 2, PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
        self.caches = [torch.randn(cache, device=device).to(dtype) for _ in range(shape.num_layers)]

        def integers(values: Any) -> Tensor:
            return torch.as_tensor(values, device=device, dtype=torch.int32)

        self._sequences = integers(range(work.batch)).repeat_interleave(work.num_queries)
        self._pages = torch.randperm(pages * work.batch, device=device).int()
        self._page_starts = integers(range(work.batch + 1)) * pages
        self._last = integers([(work.num_keys - 1) % PAGE_SIZE + 1] * work.batch)
        heads = (shape.num_q_heads, shape.num_kv_heads, shape.head_dim, PAGE_SIZE)
        layout = (self._page_starts, self._pages, self._last, *heads)
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
        if work.num_queries == 1:
            self._attention: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=True, backend="fa2"
            )
            self._attention.plan(*layout, q_data_type=dtype, kv_data_type=dtype)
        else:
            starts = integers(range(work.batch + 1)) * work.num_queries
            self._attention = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace, "NHD", backend="fa2"
            )
            self._attention.plan(
                starts, *layout, causal=True, q_data_type=dtype, kv_data_type=dtype
            )

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        found: Tensor = self._lib.norm.rmsnorm(x, weight, EPS)
        return found

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """In place: the sum into the residual, its norm into x."""
        self._lib.norm.fused_add_rmsnorm(x, residual, weight, EPS)
        return x, residual

    def gate(self, gate_up: Tensor) -> Tensor:
        found: Tensor = self._lib.activation.silu_and_mul(gate_up)
        return found

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See the base class."""
        rows, size = len(q), self.shape.head_dim
        q, k = q.reshape(rows, -1), k.reshape(rows, -1)
        self._lib.rope.apply_rope_with_cos_sin_cache_inplace(
            self.positions, q, k, size, self.cos_sin, is_neox=True
        )
        cache = self.caches[layer]
        self._lib.page.append_paged_kv_cache(
            k.view(rows, -1, size),
            v,
            self._sequences,
            self.positions,
            cache,
            self._pages,
            self._page_starts,
            self._last,
        )
        found: Tensor = self._attention.run(q.view(rows, -1, size), cache)
        return found.reshape(rows, -1)


class FlashInferWithoutNorms(FlashInferKernels):
    """FlashInfer's kernels with torch's norms, if FlashInfer's norms were not built."""

    name = "cuBLAS and FlashInfer, torch's norms, one graph"
    norm, add_norm = TorchKernels.norm, TorchKernels.add_norm


def kernels_here(device: torch.device, dtype: torch.dtype) -> type[TorchKernels]:
    """FlashInfer's kernels if they run here, else torch's, with the reason on stderr."""
    if device.type != "cuda":
        return TorchKernels
    shape, work = LlamaShape(1, 128, 128, 2, 1, 64, 64), Pass(1, 1, PAGE_SIZE)
    tokens = torch.zeros(1, dtype=torch.int64, device=device)
    weights = Weights.random(shape, device, dtype)
    for kernels in (FlashInferKernels, FlashInferWithoutNorms):
        try:
            StaticLlama(shape, weights, kernels(shape, work, device, dtype), tokens)()
        except Exception as error:
            text = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            print(f"{kernels.name}: cannot be used: {text}", file=sys.stderr)
        else:
            return kernels
    return TorchKernels


class StaticLlama:
    """One pass of a model, repeated over the same tokens."""

    def __init__(
        self, shape: LlamaShape, weights: Weights, kernels: TorchKernels, tokens: Tensor
    ) -> None:
        self._shape, self._weights, self._kernels = shape, weights, kernels
        self._tokens = tokens
        queries = kernels.work.num_queries
        self._last_rows = torch.arange(queries - 1, len(tokens), queries, device=tokens.device)
        # A prompt needs the logits of its last token; verification needs all.
        self._all_rows = queries <= PAGE_SIZE

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        """The logits [rows, vocab_size]; of a prompt, only the last token's."""
        shape, weights, kernels = self._shape, self._weights, self._kernels
        residual = functional.embedding(self._tokens, weights.embedding)
        hidden = kernels.norm(residual, weights.layers[0].input_norm)
        norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.norm]
        sizes = [heads * shape.head_dim for heads in (shape.num_q_heads, *[shape.num_kv_heads] * 2)]
        for i, layer in enumerate(weights.layers):
            parts = torch.mm(hidden, layer.qkv.t()).split(sizes, dim=-1)
            q, k, v = (part.unflatten(-1, (-1, shape.head_dim)) for part in parts)
            found = torch.mm(kernels.attend(i, q, k, v), layer.o.t())
            hidden, residual = kernels.add_norm(found, residual, layer.post_norm)
            gated = kernels.gate(torch.mm(hidden, layer.gate_up.t()))
            found = torch.mm(gated, layer.down.t())
            hidden, residual = kernels.add_norm(found, residual, norms[i])
        if not self._all_rows:
            hidden = hidden[self._last_rows]
        return torch.mm(hidden, weights.lm_head.t())
