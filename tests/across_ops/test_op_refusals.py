"""What every op refuses alike, made from its schema: each tensor in another dtype, with other sizes
or strides, on another device or with a gradient, and shared memory that the op writes.

``test_refused_values.py`` has what no schema says: ranges of values, and arguments that belong
together.
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


# Sizes that nothing else in a call has to match: the arguments, and their axes.
FREE = {
    ("append_drafts", "stop_tokens"): (1,),
    ("append_kv", "cos_sin"): (0,),
    ("begin_round", "page_table"): (1,),
    ("compact_rows", "done"): (0,),
    ("compact_rows", "page_table"): (1,),
    ("compact_rows", "cross_page_table"): (1,),
    ("compact_rows", "hidden"): (1,),
    ("decoder_layers", "cos_sin"): (0, 1),
    ("decoder_layers", "page_table"): (1,),
    ("decoder_layers", "cross_page_table"): (1,),
    ("decoder_layers", "position_bias"): (0,),
    ("embed_tokens", "weight"): (0,),
    ("embed_tokens", "previous"): (0,),
    ("embed_tokens", "table"): (0,),
    ("exit_confidence_softmax", "lm_head_table"): (0,),
    ("exit_rows", "lm_head"): (0,),
    ("exit_rows", "lm_head_table"): (0,),
    ("gated_delta", "rows"): (1,),
    ("gated_delta", "taps"): (0,),
    ("gather_states", "states"): (1,),
    ("kv_fill", "cos_sin"): (0, 1),
    ("pack_weight", "packed"): (0,),
    ("paged_attention", "page_table"): (1,),
    ("paged_attention", "position_bias"): (0,),
    ("paged_attention", "arrivals"): (0,),
    ("sample_tokens", "logits"): (1,),
    ("sample_tokens", "seen"): (1,),
    ("sample_tokens", "generated"): (1,),
    ("sample_tokens", "round_tokens"): (1,),
    ("sample_tokens", "probs"): (0,),
    ("select_rows", "accepted"): (0,),
    ("short_conv", "state"): (0, 1),
    ("short_conv", "weight"): (0,),
    ("short_conv", "page_table"): (1,),
    ("skinny_linear", "cos_sin"): (0,),
    ("unpack_weight", "packed"): (0,),
}


def tensors_of(op: str) -> list[str]:
    """The tensors of a schema that some call has."""
    arguments = (argument.name for argument in op_calls.overload(op)._schema.arguments)
    return [name for name in arguments if call_of(op, name) is not None]


@pytest.mark.parametrize("op", ops.OP_NAMES)
def test_each_tensor_has_a_dtype_a_rank_and_contiguous_rows(op: str) -> None:
    for name in tensors_of(op):
        call = call_of(op, name)
        assert call is not None
        tensor = call.tensors[name]
        changes = [tensor[None], tensor.to(torch.float16), tensor.to(torch.float64)]
        if tensor.shape[-1] > 1:
            changes.append(tensor.repeat_interleave(2, -1)[..., ::2])
        for changed in changes:
            call.arguments[name] = changed
            assert_refused(call, f"^{op}: {name}: expected .*, got ")


@pytest.mark.parametrize("op", ops.OP_NAMES)
def test_each_size_matches_the_others(op: str) -> None:
    for name in tensors_of(op):
        call = call_of(op, name)
        assert call is not None
        tensor = call.tensors[name]
        for axis in {*range(tensor.dim())} - {*FREE.get((op, name), ())}:
            call.arguments[name] = torch.cat((tensor, tensor.narrow(axis, 0, 1)), axis)
            assert_refused(call, f"^{op}: \\w+: expected .*, got ")


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
def test_gradients_and_tangents_are_refused(op: str) -> None:
    call = op_calls.random_call(op, Random(3))
    schema = op_calls.overload(op)._schema.arguments
    memory = fuzz_ops.Memory(call.arguments.values())

    def run(**changed: torch.Tensor) -> None:
        given = {**call.arguments, **changed}
        compiled(op)(*(given.get(each.name, each.default_value) for each in schema))

    for name, tensor in call.tensors.items():
        if not tensor.is_floating_point():
            continue
        with pytest.raises(RuntimeError, match=f"{op}: {name}: expected a tensor without gradient"):
            run(**{name: tensor.detach().requires_grad_()})
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(tensor, torch.ones_like(tensor))
            with pytest.raises(RuntimeError, match=f"{op}: {name}: expected a tensor without a ta"):
                run(**{name: dual})
    memory.assert_unchanged()
    with torch.no_grad():
        run(
            **{
                n: t.detach().requires_grad_()
                for n, t in call.tensors.items()
                if t.is_floating_point()
            }
        )


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
