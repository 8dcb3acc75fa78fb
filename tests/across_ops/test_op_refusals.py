"""What every op refuses alike: tensors of several devices or with gradients, and memory that it
writes shared.
"""

from __future__ import annotations

from functools import cache
from random import Random

import pytest
import torch
from torch.autograd import forward_ad

import fuzz_ops
import op_calls
from eecore import ops
from eecore.ops.registered import compiled
from op_calls import Call

WRITTEN = [(op, name) for op in ops.OP_NAMES for name in op_calls.written(op)]


@cache
def sizes(op: str) -> list[dict[str, int]]:
    """The numbers of elements of the tensors of some calls, by seed."""
    calls = (op_calls.random_call(op, Random(seed)) for seed in range(300))
    return [{name: tensor.numel() for name, tensor in call.tensors.items()} for call in calls]


def call_of(op: str, *needed: str) -> Call | None:
    """A call in which some arguments are tensors with elements; with one only if none has more."""
    for least in (2, 1):
        for seed, found in enumerate(sizes(op)):
            if all(found.get(name, 0) >= least for name in needed):
                return op_calls.random_call(op, Random(seed))
    return None


def assert_refused(call: Call, message: str) -> None:
    memory = fuzz_ops.Memory(call.arguments.values())
    with pytest.raises(RuntimeError, match=message):
        call.run()
    memory.assert_unchanged()


@pytest.mark.parametrize("op", ops.OP_NAMES)
def test_calls_of_random_sizes_are_right(op: str) -> None:
    for seed in range(20):
        call = op_calls.random_call(op, Random(seed))
        before = op_calls.copied(call.arguments)
        call.run()
        call.check(before, call.arguments)


@pytest.mark.parametrize("op", ops.OP_NAMES)
def test_tensors_of_several_devices_are_refused(op: str) -> None:
    names = [a.name for a in op_calls.overload(op)._schema.arguments]
    seen: set[str] = set()
    for seed in range(30):
        for name in [n for n in op_calls.random_call(op, Random(seed)).tensors if n not in seen]:
            call = op_calls.random_call(op, Random(seed))
            call.arguments[name] = call.arguments[name].to("meta")
            first = next(iter(call.tensors))
            where, other = ("meta", "cpu") if name == first else ("cpu", "meta")
            assert_refused(call, f"{op}: \\w+: expected a tensor on {where}, got one on {other}")
            seen.add(name)
    assert seen <= set(names)
    assert len(seen) > 1


@pytest.mark.parametrize("op", ops.OP_NAMES)
def test_tensors_with_gradients_are_refused(op: str) -> None:
    call = op_calls.random_call(op, Random(3))
    schema = op_calls.overload(op)._schema.arguments
    for name, tensor in call.tensors.items():
        if not tensor.is_floating_point():
            continue
        given = {**call.arguments, name: tensor.detach().requires_grad_()}
        arguments = [given.get(each.name, each.default_value) for each in schema]
        memory = fuzz_ops.Memory(call.arguments.values())
        with pytest.raises(RuntimeError, match=f"{op}: {name}: expected a tensor without gradient"):
            compiled(op)(*arguments)
        memory.assert_unchanged()
        with torch.no_grad():
            compiled(op)(*arguments)


@pytest.mark.parametrize("op", ops.OP_NAMES)
def test_tangents_of_forward_mode_are_refused(op: str) -> None:
    call = op_calls.random_call(op, Random(3))
    schema = op_calls.overload(op)._schema.arguments
    for name, tensor in call.tensors.items():
        if not tensor.is_floating_point():
            continue
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(tensor, torch.ones_like(tensor))
            given = {**call.arguments, name: dual}
            arguments = [given.get(each.name, each.default_value) for each in schema]
            with pytest.raises(RuntimeError, match=f"{op}: {name}: expected a tensor without a ta"):
                compiled(op)(*arguments)


def test_weights_to_train_are_refused() -> None:
    x, layer = torch.randn(3, 8), torch.nn.Linear(8, 4)
    with pytest.raises(RuntimeError, match="skinny_linear: weight: expected a tensor without gr"):
        ops.skinny_linear(x, layer.weight)
    with torch.no_grad():
        torch.testing.assert_close(ops.skinny_linear(x, layer.weight, bias=layer.bias), layer(x))


@pytest.mark.parametrize("op", ops.OP_NAMES)
def test_tensors_of_no_memory_at_all_are_served_by_nothing(op: str) -> None:
    call = op_calls.random_call(op, Random(3))
    for name, tensor in call.tensors.items():
        call.arguments[name] = tensor.to("meta")
    call.run()


@pytest.mark.parametrize(("op", "name"), WRITTEN)
def test_what_is_written_shares_no_memory_with_itself(op: str, name: str) -> None:
    call = call_of(op, name)
    assert call is not None
    tensor = call.tensors[name]
    axes = [axis for axis, size in enumerate(tensor.shape) if size > 1]
    if not axes:
        pytest.skip("one element")
    call.arguments[name] = tensor.narrow(axes[0], 0, 1).expand(tensor.shape)
    assert_refused(call, f"{op}: {name}: expected ")


@pytest.mark.parametrize(("op", "name"), WRITTEN)
def test_what_is_written_shares_no_memory_with_anything_else(op: str, name: str) -> None:
    tried = 0
    for other in sorted({other for found in sizes(op) for other in found} - {name}):
        call = call_of(op, name, other)
        if call is None:  # never both
            continue
        tensor, beside = call.tensors[name], call.tensors[other]
        # The tensor's memory; the other tensor begins at its last element.
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        size, other_size = tensor.element_size(), beside.element_size()
        last = (extent - 1) * size // other_size * other_size
        reach = 1 + sum((n - 1) * s for n, s in zip(beside.shape, beside.stride(), strict=True))
        memory = torch.zeros(last + reach * other_size + extent * size + 16, dtype=torch.uint8)
        values, beside_values = tensor.clone(), beside.clone()
        call.arguments[name] = placed(memory, 0, tensor)
        call.arguments[other] = placed(memory, last, beside)
        call.arguments[name].copy_(values)
        call.arguments[other].copy_(beside_values)
        assert_refused(call, f"{op}: \\w+: expected memory apart from \\w+(, or all of it)?, got")
        tried += 1
    assert tried > 0


def placed(memory: torch.Tensor, at: int, like: torch.Tensor) -> torch.Tensor:
    """A view of bytes with the dtype, sizes and strides of a tensor."""
    size = like.element_size()
    room = memory[: len(memory) // size * size].view(like.dtype)
    return room.as_strided(like.shape, like.stride(), at // size)
