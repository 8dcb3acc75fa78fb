"""Random calls of every op on every kernel: the reference's results, and no other byte changed.

Tensors have awkward sizes, gaps between their rows, strides in any order and odd places in memory,
with NaN around them; ``fuzzed_call`` of an op's tests makes them.
"""

from __future__ import annotations

from random import Random

import pytest
import torch

import emulated
import fuzz_ops
import op_calls
from coded_calls import as_floats
from eecore import _C, ops

# Calls of an op on the CPU, and in the emulator, where each takes longer.
NUM_CALLS, NUM_EMULATED = 60, 20


def is_for_the_cpu(call: op_calls.Call) -> bool:
    """Whether a call has a position bias and caches in float8, which CUDA has no kernel for."""
    is_float8 = any(tensor.dtype == torch.float8_e4m3fn for tensor in call.tensors.values())
    return is_float8 and "position_bias" in call.tensors


@pytest.mark.parametrize("op", ops.OP_NAMES)
def test_it_matches_the_reference(op: str, device: torch.device) -> None:
    on_cuda = emulated.is_cuda_kernel(device)
    if device.type == "cuda":
        pytest.skip("calls are made in memory of the CPU")
    run = getattr(torch.ops.eecore_emulated if on_cuda else torch.ops.eecore, op).default
    first = 1000 * len(_C.cpu_capability())  # others for each capability
    for seed in range(first, first + (NUM_EMULATED if on_cuda else NUM_CALLS)):
        call = op_calls.random_call(op, Random(seed))
        memory = fuzz_ops.Memory(call.arguments.values())
        before = op_calls.copied(call.arguments)
        if on_cuda and is_for_the_cpu(call):
            continue
        run(**call.arguments)
        written = (call.arguments.get(name) for name in op_calls.written(op))
        memory.assert_unchanged(but=[tensor for tensor in written if tensor is not None])
        # On the CPU x is rounded before it is multiplied with stored weights.
        rounds = not on_cuda or op == "embed_tokens"
        call.check(before if rounds else as_floats(before), call.arguments)
