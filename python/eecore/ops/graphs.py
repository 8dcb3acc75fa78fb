"""What a CUDA stream is asked to do, captured: graphs, and bodies that run only if a flag says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from eecore.ops.registered import build_info, cuda_module

__all__ = ["CapturedGraph", "captured_body", "captured_condition"]


def _module(asked: str) -> Any:
    """eecore._cuda. RuntimeError without one."""
    if cuda_module is None:
        got = "no GPU" if build_info()["cuda"] else "a build without eecore._cuda"
        raise RuntimeError(f"{asked}: expected CUDA kernels and a GPU for them, got {got}")
    return cuda_module


class CapturedGraph:
    """What a CUDA stream is asked to do, captured once and launched many times.

    Unlike ``torch.cuda.graph`` this leaves memory to the caller: what the captured work reads and
    writes must live as long as the graph, and what it allocates should come from a pool of its own
    (``torch.cuda.use_mem_pool``). That goes for the bodies of :func:`captured_body` too, which are
    captured on the same stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph: Any = None

    @contextmanager
    def capture(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Capture what is asked of ``stream``, which is the current one inside.

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
            del graph  # ends the capture, however long what was raised is kept
            raise
        graph.end()
        self._graph = graph

    def launch(self) -> None:
        """Run it behind the work on the current stream; returns at once."""
        stream = torch.cuda.current_stream(self._device)
        self._graph.launch(stream.cuda_stream, stream.device_index)


def captured_condition(device: torch.device) -> int:
    """What a :func:`captured_body` that is to come is asked, for an op that decides it.

    The op (:func:`exit_rows` takes one) and the body follow on the same stream, in the same graph
    or body, in this order; each condition gets one body. The op spares the kernel that would look
    at the flag.

    Args:
        device: whose current stream is captured.

    Raises:
        RuntimeError: as of :func:`captured_body`.
    """
    module = _module("captured_condition")
    stream = torch.cuda.current_stream(device)
    condition: int = module.make_condition(stream.cuda_stream, stream.device_index)
    return condition


@contextmanager
def captured_body(flag: Tensor, when: bool, condition: int | None = None) -> Iterator[None]:
    """What is captured here is work that a CUDA graph does only if a flag says so by then.

    The current stream must be captured (:class:`CapturedGraph`), and stays current inside. The body
    may hold kernels, memory copies and further bodies.

    Args:
        flag: bool [1], on the device; kernels before may write it.
        when: the value with which the body runs.
        condition: of :func:`captured_condition`, set by an op that writes the flag: it decides, and
            the flag is not looked at.

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
        del body  # ends its capture, however long what was raised is kept
        raise
    body.end()
