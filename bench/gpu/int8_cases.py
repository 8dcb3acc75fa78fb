"""Products with int8 weights and a scale for each row: half of the bytes of 16-bit weights.

The peers are the same op and cuBLAS, with the dequantised weights in the states' dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.case import EPS, Case, Work
from eecore import ops
from eecore.models.int8 import dequantise_rows, quantise_rows
from tests.cases import LLAMA_1B, LLAMA_8B

BATCHES = (1, 8, 16)


def int8_work(
    op: str, rows: int, columns: int, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> Work:
    """An op with a random int8 weight [rows, columns], and with the same weight in floats."""
    x = torch.randn(num_tokens, columns, device=device).to(dtype)
    norm = torch.rand(columns, device=device).to(dtype)
    weight, scale = quantise_rows(torch.randn(rows, columns, device=device) * columns**-0.5)
    floats = dequantise_rows(weight, scale, dtype)
    normed = {"norm_weight": norm, "eps": EPS}
    calls: dict[str, Callable[[Tensor, Tensor | None], Any]] = {
        "skinny_linear": lambda w, s: ops.skinny_linear(x, w, weight_scale=s, constant_weight=True),
        "skinny_gated_linear": lambda w, s: ops.skinny_gated_linear(x, w, weight_scale=s, **normed),
        "exit_confidence_softmax": lambda w, s: (
            ops.exit_confidence_softmax(x, norm, w, EPS, lm_head_scale=s).logsumexp
        ),
    }
    own = partial(calls[op], weight, scale)
    peers: dict[str, Callable[[], Any]] = {"floats": partial(calls[op], floats, None)}
    if op == "skinny_linear":
        peers["cuBLAS, floats"] = lambda: functional.linear(x, floats)
    return Work(own, dict(peers), own, lambda name: peers[name]())


def int8_cases(dtype: torch.dtype, device: torch.device, tiny: bool) -> Iterator[Case]:
    """The products of a decoding step, which are bound by the bytes of their weights."""
    models = (LLAMA_8B, LLAMA_1B)
    layers = [(model.hidden_size, model.qkv_size) for model in models]
    mlps = [(model.hidden_size, model.inner_size) for model in models]
    heads = [model.lm_head for model in models]
    if tiny:
        layers, mlps, heads = [(64, 96)], [(64, 96)], [(64, 300)]
    for op, shapes, per_row, arrow in (
        ("skinny_linear", layers, 1, "->"),
        ("skinny_gated_linear", mlps, 2, "-> 2 x"),
        ("exit_confidence_softmax", heads, 1, "-> vocabulary of"),
    ):
        for (k, n), b in itertools.product(shapes, BATCHES):
            yield Case(
                op,
                f"int8, {k} {arrow} {n}, B={b}",
                per_row * n * (k + 4) + b * k * dtype.itemsize,  # without the small result
                partial(int8_work, op, per_row * n, k, b, dtype, device),
            )
