"""Products with int8 weights and a scale for each row: half of the bytes of 16-bit weights.

The peers are the same op and cuBLAS, with the dequantised weights in the states' dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.case import EPS, Case, Work
from eecore import ops
from eecore.models.int8 import dequantise_rows, quantise_rows
from tests.cases import LLAMA_1B, LLAMA_8B

BATCHES = (1, 8, 16)


def int8_weight(
    out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
) -> tuple[ops.Matrix, Tensor]:
    """A random int8 weight, and the same weight in floats."""
    floats = torch.randn(out_features, in_features, device=device) * in_features**-0.5
    whole, scale = quantise_rows(floats)
    return ops.Matrix(whole, None, scale), dequantise_rows(whole, scale, dtype)


def linear_work(
    num_tokens: int, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device
) -> Work:
    x = torch.randn(num_tokens, in_features, device=device).to(dtype)
    matrix, floats = int8_weight(out_features, in_features, dtype, device)
    peers: dict[str, Callable[[], Tensor]] = {
        "floats": lambda: ops.skinny_linear(x, floats, constant_weight=True),
        "cuBLAS, floats": lambda: functional.linear(x, floats),
    }

    def linear() -> Tensor:
        return ops.skinny_linear(x, matrix.weight, weight_scale=matrix.scale, constant_weight=True)

    return Work(linear, dict(peers), linear, lambda name: peers[name]())


def gated_work(
    num_tokens: int, in_features: int, inner_size: int, dtype: torch.dtype, device: torch.device
) -> Work:
    x = torch.randn(num_tokens, in_features, device=device).to(dtype)
    norm = torch.rand(in_features, device=device).to(dtype)
    matrix, floats = int8_weight(2 * inner_size, in_features, dtype, device)

    def gated(weight: Tensor, scale: Tensor | None = None) -> Tensor:
        return ops.skinny_gated_linear(x, weight, weight_scale=scale, norm_weight=norm, eps=EPS)

    return Work(
        lambda: gated(matrix.weight, matrix.scale),
        {"floats": lambda: gated(floats)},
        lambda: gated(matrix.weight, matrix.scale),
        lambda _: gated(floats),
    )


def head_work(
    num_seqs: int, hidden_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> Work:
    hidden = torch.randn(num_seqs, hidden_size, device=device).to(dtype)
    norm = torch.rand(hidden_size, device=device).to(dtype)
    matrix, floats = int8_weight(vocab_size, hidden_size, dtype, device)

    def confidence(weight: Tensor, scale: Tensor | None = None) -> ops.SoftmaxConfidence:
        return ops.exit_confidence_softmax(hidden, norm, weight, EPS, lm_head_scale=scale)

    return Work(
        lambda: confidence(matrix.weight, matrix.scale),
        {"floats": lambda: confidence(floats)},
        lambda: confidence(matrix.weight, matrix.scale).logsumexp,
        lambda _: confidence(floats).logsumexp,
    )


def int8_cases(dtype: torch.dtype, device: torch.device, tiny: bool) -> Iterator[Case]:
    """The products of a decoding step, which are bound by the bytes of their weights."""
    models = (LLAMA_8B, LLAMA_1B)
    layers = [(model.hidden_size, model.qkv_size) for model in models]
    mlps = [(model.hidden_size, model.inner_size) for model in models]
    heads = [model.lm_head for model in models]
    if tiny:
        layers, mlps, heads = [(64, 96)], [(64, 96)], [(64, 300)]
    for op, shapes, per_row, arrow, work in (
        ("skinny_linear", layers, 1, "->", linear_work),
        ("skinny_gated_linear", mlps, 2, "-> 2 x", gated_work),
        ("exit_confidence_softmax", heads, 1, "-> vocabulary of", head_work),
    ):
        for (k, n), b in itertools.product(shapes, BATCHES):
            yield Case(
                op,
                f"int8, {k} {arrow} {n}, B={b}",
                per_row * n * (k + 4) + b * k * dtype.itemsize,  # without the small result
                lambda b=b, k=k, n=n, work=work: work(b, k, n, dtype, device),
            )
