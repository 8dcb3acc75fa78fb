"""torch's view of every op: its schema, its fake kernel, its place in a compiled graph."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import test_appended_heads
import test_decoder_layers
import test_kv_fill
import test_paged_attention
import torch
from test_exit_confidence_mlp import random_classifier
from test_exit_confidence_softmax import random_case

import op_calls
from eecore import ops


def plain(value: Any) -> Any:
    """Memory of its own without NaN, for torch's copies and comparisons."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.clone(memory_format=torch.contiguous_format)
    return value.nan_to_num() if value.is_floating_point() else value


@pytest.mark.parametrize("op", ops.OP_NAMES)
def test_opcheck(op: str) -> None:
    """With the one of some calls that has the most tensors."""
    calls = [op_calls.random_call(op, Random(seed)) for seed in range(30)]
    calls = [call for call in calls if all(map(torch.numel, call.tensors.values()))]
    float8 = torch.float8_e4m3fn  # torch multiplies none of these
    calls = [call for call in calls if float8 not in {t.dtype for t in call.tensors.values()}]
    call = max(calls, key=lambda call: len(call.tensors))
    given = {name: plain(value) for name, value in call.arguments.items()}
    torch.library.opcheck(op_calls.overload(op), (), given)


CPU = torch.device("cpu")


def appended() -> dict[str, Any]:
    case = test_appended_heads.HeadsCase(3)
    append = test_appended_heads.append_to(case, torch.float32, CPU)
    return {**test_appended_heads.product_call(case, torch.float32, CPU), "append": append}


COMPILED: dict[str, Any] = {
    "decoder_layers": lambda: test_decoder_layers.random_call(test_decoder_layers.ENCODED),
    "exit_confidence_mlp": lambda: {
        "hidden": torch.ones(3, 20),
        **random_classifier(20, 6, CPU),
    },
    "exit_confidence_softmax": lambda: {**random_case(3, 64, 101), "eps": 1e-5},
    "kv_fill": lambda: test_kv_fill.packed(test_kv_fill.random_call(test_kv_fill.SMALL)),
    "paged_attention": lambda: test_paged_attention.random_call(
        test_paged_attention.BIASED, torch.float32, CPU
    ),
    "skinny_linear": appended,
}


@pytest.mark.parametrize("op", COMPILED)
def test_a_wrapper_compiles_without_a_graph_break(op: str) -> None:
    compiled = torch.compile(getattr(ops, op), fullgraph=True, backend="aot_eager")
    got, expected = compiled(**COMPILED[op]()), getattr(ops, op)(**COMPILED[op]())
    for one, other in zip(leaves(got), leaves(expected), strict=True):
        assert torch.equal(one, other)


def leaves(result: Any) -> tuple[torch.Tensor, ...]:
    """The tensors that a wrapper gives, if it gives any."""
    return (result,) if isinstance(result, torch.Tensor) else tuple(result or ())
