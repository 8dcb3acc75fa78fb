"""Calls of all ops at all capabilities: right answers, or a refusal that has written nothing.

Half of the inputs are calls that have to succeed, held to the oracles of the ops' tests. In the
others something is changed: a dtype, a shape, strides, a device, memory that is shared, a number
beyond all bounds, an index, values that are not finite. Such a call is refused with a RuntimeError
and has changed no byte, or it runs and has written where it may and nowhere else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import torch
from torch import Tensor

import cases
import op_calls
from eecore import _C, ops
from op_calls import Arguments, Call

LIMIT_S = 60.0
SHARE = 400

EXTREMES = (-(2**63), -(2**31), -2, -1, 0, 1, 2**30, 2**31 - 1, 2**31, 2**62, 2**63 - 1)
NUMBERS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-45, 1e38, 1e300)
MAX_ELEMENTS = 1 << 20
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def one(random: Random) -> bool:
    """Try a call of a random op."""
    _C.set_cpu_capability(random.choice(cases.cpu_capabilities()))
    torch.set_num_threads(random.choice((1, 1, 2, 3)))
    call = op_calls.random_call(random.choice(ops.OP_NAMES), random)
    if random.random() < 0.5:
        memory = Memory(call.arguments.values())
        before = op_calls.copied(call.arguments)
        call.run()
        memory.assert_unchanged(but=_written(call.op, call.arguments))
        call.check(before, call.arguments)
        return True
    return changed_call_is_served(call, random)


def changed_call_is_served(call: Call, random: Random) -> bool:
    """Whether a changed call runs; a refusal must have written nothing."""
    changed = dataclasses.replace(call, arguments=dict(call.arguments))
    for _ in range(random.choice((1, 1, 2))):
        random.choice(CHANGES)(changed, random)
    arguments = changed.arguments
    memory = Memory(arguments.values())
    try:
        op_calls.run(call.op, arguments)
    except RuntimeError:
        memory.assert_unchanged()
        return False
    written = _written(call.op, arguments)
    memory.assert_unchanged(but=written)
    devices = {value.device for value in arguments.values() if isinstance(value, Tensor)}
    assert len(devices) <= 1, devices
    if devices == {torch.device("cpu")}:
        _assert_apart(written, arguments, call.op)
    return True


def _written(op: str, arguments: Arguments) -> list[Tensor]:
    tensors = (arguments.get(name) for name in op_calls.written(op))
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]


class Memory:
    """A copy of the memory of some tensors, to the bit."""

    def __init__(self, values: Iterable[Any]) -> None:
        storages = {
            value.untyped_storage().data_ptr(): value.untyped_storage()
            for value in values
            if isinstance(value, Tensor) and value.device.type == "cpu"
        }
        self._storages = [(storage, bytes_of(storage).clone()) for storage in storages.values()]

    def assert_unchanged(self, but: Iterable[Tensor] = ()) -> None:
        """All bytes have to be unchanged, except the bytes of the tensors ``but``."""
        may_change = list(but)
        for storage, before in self._storages:
            changed = bytes_of(storage) != before
            for tensor in may_change:
                if tensor.untyped_storage().data_ptr() == storage.data_ptr():
                    changed &= ~bytes_within(tensor)
            assert not changed.any(), f"{int(changed.sum())} bytes beside the outputs have changed"


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload, no-any-return]


def bytes_within(tensor: Tensor) -> Tensor:
    """A mask of the bytes of a tensor's storage that its elements use."""
    size = tensor.element_size()
    inside = torch.zeros(tensor.untyped_storage().nbytes() // size, dtype=torch.bool)
    if tensor.numel() > 0:
        inside.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    inside = inside.repeat_interleave(size)
    missing = tensor.untyped_storage().nbytes() - len(inside)
    return torch.cat((inside, torch.zeros(missing, dtype=torch.bool)))


def _assert_apart(written: list[Tensor], arguments: Arguments, op: str) -> None:
    """No byte that a call wrote may be written twice, or be one that it read."""
    for tensor in written:
        if tensor.numel() > MAX_ELEMENTS:
            continue
        inside = bytes_within(tensor)
        assert int(inside.sum()) == tensor.numel() * tensor.element_size(), "an overlap with itself"
        for name, other in arguments.items():
            if not isinstance(other, Tensor) or other is tensor or _is_same(tensor, other):
                continue
            if other.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                assert not (inside & bytes_within(other)).any(), f"{op}: an overlap with {name}"


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are one: residual streams may be updated in place."""
    return (
        tensor.data_ptr() == other.data_ptr()
        and tensor.shape == other.shape
        and tensor.dtype == other.dtype
        and all(
            a == b or size == 1
            for a, b, size in zip(tensor.stride(), other.stride(), tensor.shape, strict=True)
        )
    )


# What may be wrong with a call

Change = Callable[[Call, Random], None]


def _some_tensor(call: Call, random: Random) -> tuple[str, Tensor]:
    """A tensor with memory of its own, below MAX_ELEMENTS where there is one."""
    tensors = {n: t for n, t in call.tensors.items() if not t.is_meta and t.numel() < MAX_ELEMENTS}
    name = random.choice(list(tensors) or list(call.tensors))
    return name, tensors.get(name, torch.zeros(()))


def another_dtype(call: Call, random: Random) -> None:
    name, tensor = _some_tensor(call, random)
    finite = tensor.float() if tensor.dtype == torch.float8_e4m3fn else tensor
    call.arguments[name] = finite.nan_to_num().to(random.choice(DTYPES))


def another_rank(call: Call, random: Random) -> None:
    name, tensor = _some_tensor(call, random)
    changed = [tensor[None], tensor[..., None], tensor.flatten()]
    if tensor.numel() > 0:
        changed.append(tensor.flatten()[0])
    call.arguments[name] = random.choice(changed)


def another_size(call: Call, random: Random) -> None:
    name, tensor = _some_tensor(call, random)
    if tensor.dim() == 0:
        return
    axis = random.randrange(tensor.dim())
    size = random.choice((0, 1, tensor.shape[axis] - 1, tensor.shape[axis] + 1, 2**20, 2**31))
    if size <= tensor.shape[axis]:
        call.arguments[name] = tensor.narrow(axis, 0, max(size, 0))
        return
    before, after = tensor.shape[:axis], tensor.shape[axis + 1 :]
    made = torch.zeros([*before, size if size < 100 else 1, *after], dtype=tensor.dtype)
    call.arguments[name] = made.expand([*before, size, *after])


def other_strides(call: Call, random: Random) -> None:
    name, tensor = _some_tensor(call, random)
    if tensor.dim() == 0 or tensor.numel() == 0:
        return
    axis = random.randrange(tensor.dim())
    kind = random.choice(("stretched", "shared", "turned", "close"))
    if kind == "stretched":
        call.arguments[name] = tensor.repeat_interleave(2, axis)[
            (slice(None),) * axis + (slice(0, None, 2),)
        ]
    elif kind == "shared":
        call.arguments[name] = tensor.narrow(axis, 0, 1).expand(tensor.shape)
    elif kind == "turned":
        other = random.randrange(tensor.dim())
        call.arguments[name] = tensor.transpose(axis, other).contiguous().transpose(axis, other)
    else:  # rows that share some of their elements
        strides = list(tensor.stride())
        strides[axis] = random.randint(0, max(strides[axis], 1))
        call.arguments[name] = tensor.as_strided(tensor.shape, strides)


def another_device(call: Call, random: Random) -> None:
    share = random.choice((0.1, 0.5, 1.0))
    for name, value in call.arguments.items():
        if isinstance(value, Tensor) and random.random() < share:
            call.arguments[name] = value.to("meta")


def shared_memory(call: Call, random: Random) -> None:
    """Let a written tensor overlap another one, or lie close to it."""
    names = [
        name for name in op_calls.written(call.op) if isinstance(call.arguments.get(name), Tensor)
    ]
    if not names:
        return
    name = random.choice(names)
    tensor: Tensor = call.arguments[name]
    _, other = _some_tensor(call, random)
    memory = bytes_of(other.untyped_storage())
    size = tensor.element_size()
    start = other.storage_offset() * other.element_size() // size + random.randint(-2, 40)
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if other is tensor or start < 0 or (start + extent) * size > len(memory) or other.is_meta:
        return
    room = memory[: len(memory) // size * size].view(tensor.dtype)
    call.arguments[name] = room.as_strided(tensor.shape, tensor.stride(), start)


def a_number(call: Call, random: Random) -> None:
    names = [n for n, v in call.arguments.items() if isinstance(v, (int, float)) and v is not None]
    if not names:
        return
    name = random.choice(names)
    value = call.arguments[name]
    if isinstance(value, bool):
        call.arguments[name] = not value
    elif isinstance(value, int):
        call.arguments[name] = random.choice(EXTREMES)
    else:
        call.arguments[name] = random.choice(NUMBERS)


def nothing(call: Call, random: Random) -> None:
    name = random.choice(list(call.arguments))
    call.arguments[name] = None


def something(call: Call, random: Random) -> None:
    """Give a tensor where there was none."""
    names = [name for name, value in call.arguments.items() if value is None]
    if names:
        _, tensor = _some_tensor(call, random)
        call.arguments[random.choice(names)] = tensor.clone()


def indices(call: Call, random: Random) -> None:
    """Set integers to numbers far out of bounds."""
    name, tensor = _some_tensor(call, random)
    if tensor.is_floating_point() or tensor.dtype == torch.bool or tensor.numel() == 0:
        return
    limits = torch.iinfo(tensor.dtype)
    changed = tensor.clone(memory_format=torch.preserve_format)
    flat = changed.view(-1) if changed.is_contiguous() else changed[0]
    at = random.randrange(len(flat))
    flat[at] = max(limits.min, min(random.choice((*EXTREMES, 3, 7, 50)), limits.max))
    call.arguments[name] = changed


def a_bit(call: Call, random: Random) -> None:
    """Flip a bit of a tensor, such as of a packed row or of its offset."""
    tables = [name for name in call.tensors if name.endswith("table")]
    if tables and random.random() < 0.5:
        name = random.choice(tables)
        tensor = call.tensors[name]
    else:
        name, tensor = _some_tensor(call, random)
    if tensor.is_meta or tensor.dtype == torch.bool or not 0 < tensor.numel() <= MAX_ELEMENTS:
        return
    changed = tensor.clone(memory_format=torch.contiguous_format)
    data = changed.view(-1).view(torch.uint8)
    at = random.randrange(len(data))
    data[at] = int(data[at]) ^ (1 << random.randrange(8))
    call.arguments[name] = changed


def not_finite(call: Call, random: Random) -> None:
    name, tensor = _some_tensor(call, random)
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return
    changed = tensor.clone(memory_format=torch.preserve_format)
    place = tuple(random.randrange(size) for size in changed.shape)
    changed[place] = random.choice((math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-40, 0.0))
    call.arguments[name] = changed


CHANGES: tuple[Change, ...] = (
    another_dtype,
    another_rank,
    another_size,
    other_strides,
    another_device,
    shared_memory,
    a_number,
    nothing,
    something,
    indices,
    a_bit,
    not_finite,
)
