"""Captured work of a CUDA stream: graphs, and bodies that run only if a flag says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from eecore.ops.registered import build_info, cuda_module

__all__ = ["CapturedGraph", "captured_body", "captured_condition"]


def _module(asked: str) -> Any:
    """The module eecore._cuda; RuntimeError where it or a GPU is missing."""
    if cuda_module is None:
        got = "no GPU" if build_info()["cuda"] else "a build without eecore._cuda"
        raise RuntimeError(f"{asked}: expected CUDA kernels and a GPU for them, got {got}")
    return cuda_module


class CapturedGraph:
    """The work of a CUDA stream, captured once and launched many times.

    Unlike ``torch.cuda.graph`` this leaves memory to the caller: tensors that the captured work
    reads and writes must live as long as the graph, and its allocations should come from a pool of
    its own (``torch.cuda.use_mem_pool``). The same holds for the bodies of :func:`captured_body`,
    which are captured on the same stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph: Any = None

    @contextmanager
    def capture(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Capture the work of ``stream``, which is the current stream inside.

        Raises:
            RuntimeError: the stream is being captured, or the CUDA runtime refuses; there are no
                CUDA kernels.
        """
        module = _module("CapturedGraph.capture")
        graph = module.CapturedGraph(stream.cuda_stream, stream.device_index)
        try:
            with torch.cuda.stream(stream):
                yield
        except BaseException:
            del graph  # ends the capture even if the exception is kept
            raise
        graph.end()
        self._graph = graph

    def launch(self) -> None:
        """Run the graph after the work on the current stream; returns at once."""
        stream = torch.cuda.current_stream(self._device)
        self._graph.launch(stream.cuda_stream, stream.device_index)


def captured_condition(device: torch.device) -> int:
    """A condition for an op that decides whether a later :func:`captured_body` runs.

    The op (:func:`exit_rows` takes one) and the body follow on the same stream, in the same graph
    or body, in this order; each condition gets one body. This saves the kernel that would read
    the flag.

    Args:
        device: the device whose current stream is captured.

    Raises:
        RuntimeError: as :func:`captured_body`.
    """
    module = _module("captured_condition")
    stream = torch.cuda.current_stream(device)
    condition: int = module.make_condition(stream.cuda_stream, stream.device_index)
    return condition


@contextmanager
def captured_body(flag: Tensor, when: bool, condition: int | None = None) -> Iterator[None]:
    """Capture work that a CUDA graph runs only if a flag says so when the graph reaches it.

    The current stream must be captured (:class:`CapturedGraph`), and stays current inside. The body
    may hold kernels, memory copies and further bodies.

    Args:
        flag: bool [1], on the device; kernels before may write it.
        when: the value with which the body runs.
        condition: from :func:`captured_condition`, set by an op that writes the flag: it decides,
            and the flag is not read.

    Raises:
        RuntimeError: the current stream is not captured, or the CUDA runtime refuses; there are no
            CUDA kernels.
    """
    module = _module("captured_body")
    stream = torch.cuda.current_stream(flag.device)
    asks = (flag.data_ptr(), when) if condition is None else (condition,)
    body = module.ConditionalBody(stream.cuda_stream, stream.device_index, *asks)
    try:
        yield
    except BaseException:
        del body  # ends its capture even if the exception is kept
        raise
    body.end()
