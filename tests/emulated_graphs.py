"""Streams, graphs and conditional bodies of the emulator."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.utils._python_dispatch import TorchDispatchMode

import emulated
from eecore.decoding.capture import Capture, _Capturing
from eecore.decoding.control import Always, OnHost, Program

ON_CPU = DispatchKeySet(DispatchKey.CPU)
NULL = ctypes.c_void_p(None)


def call(name: str, *arguments: Any) -> Any:
    """Call a function of graph_calls.cpp that returns a pointer or nothing."""
    function = getattr(emulated.library(), f"eecore_emulator_{name}")
    function.restype = ctypes.c_void_p
    return function(*arguments)


def call_guarded(name: str, *arguments: Any) -> Any:
    """Call a function that may throw: RuntimeError with its message."""
    message = ctypes.create_string_buffer(1000)
    result = call(name, *arguments, message, len(message))
    if message.value:
        raise RuntimeError(message.value.decode())
    return result


@contextmanager
def new_stream() -> Iterator[ctypes.c_void_p]:
    """An emulated stream, which is current inside the block."""
    made = ctypes.c_void_p(call("new_stream"))
    call("use_stream", made)
    yield made
    call("use_stream", NULL)
    call("delete_stream", made)


class Graph:
    """A graph; its capture begins here."""

    def __init__(self, stream: ctypes.c_void_p) -> None:
        self._pointer: ctypes.c_void_p | None = None
        self._stream = stream
        self._pointer = ctypes.c_void_p(call_guarded("new_graph", stream))

    def end(self) -> None:
        call_guarded("end_graph", self._pointer)

    def launch(self, seed: int = 0) -> None:
        emulated.set_seed(seed)
        call_guarded("launch_graph", self._pointer, self._stream)

    def __del__(self) -> None:
        if self._pointer is not None:
            call("delete_graph", self._pointer)


class Body:
    """A conditional body that ops are captured into, for a flag or a condition."""

    def __init__(
        self, stream: ctypes.c_void_p, flag: Tensor, when: bool, condition: int | None = None
    ) -> None:
        self._pointer: ctypes.c_void_p | None = None
        if condition is None:
            made = call_guarded("new_body", stream, ctypes.c_void_p(flag.data_ptr()), int(when))
        else:
            made = call_guarded("new_body_of", stream, ctypes.c_ulonglong(condition))
        self._pointer = ctypes.c_void_p(made)

    def end(self) -> None:
        call_guarded("end_body", self._pointer)

    def __del__(self) -> None:
        if self._pointer is not None:
            call("delete_body", self._pointer)


@contextmanager
def only_when(
    stream: ctypes.c_void_p, flag: Tensor, when: bool, condition: int | None = None
) -> Iterator[None]:
    """``ops.captured_body``, on an emulated stream."""
    body = Body(stream, flag, when, condition)
    try:
        yield
        body.end()
    finally:
        del body  # before its stream, whatever has failed


def new_condition(stream: ctypes.c_void_p) -> int:
    """``ops.captured_condition``, on an emulated stream."""
    made: int = call_guarded("make_condition", stream)
    return made


def take_captured() -> list[str]:
    """The kernels that were captured since the last call, in order; "if" for an IF node."""
    text = ctypes.create_string_buffer(1 << 20)
    call("take_captured", text, len(text))
    return [name.partition("<")[0] for name in text.value.decode().splitlines()]


class InEmulatedGraph(OnHost):
    """Makes every decision an IF node of the emulated graph under capture."""

    def __init__(self, stream: ctypes.c_void_p) -> None:
        self._stream = stream

    def condition(self, flag: Tensor) -> int | None:  # noqa: ARG002
        return new_condition(self._stream)

    def unless(self, flag: Tensor, body: Callable[[], None], condition: int | None = None) -> None:
        with only_when(self._stream, flag, when=False, condition=condition):
            body()


class Allocated(TorchDispatchMode):
    """Keeps the memory that is allocated during a capture, as a pool of a GPU does."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "eecore_emulated":
            with self:  # also keeps what the op allocates
                return function.redispatch(ON_CPU, *args, **(kwargs or {}))
        result = function(*args, **(kwargs or {}))
        self.kept.append(result)
        return result


class EmulatedGraphs(_Capturing):
    """Runs programs, of whose calls all are eecore's, as emulated graphs, like ``Graphs``."""

    captures_chunks = True

    def __init__(self, stream: ctypes.c_void_p) -> None:
        super().__init__()
        self._stream = stream
        self.launched: list[Program] = []

    def __call__(self, program: Program) -> None:
        self.launched.append(program)
        super().__call__(program)

    def _capture(self, program: Program) -> Capture:
        program.run(Always())  # a capture loads no kernel
        program.send()
        graph = Graph(self._stream)
        with Allocated() as allocated:
            program.run(InEmulatedGraph(self._stream))
        graph.end()

        def launch() -> None:
            assert allocated.kept
            graph.launch()

        return Capture(launch, 0.0, 0)
