"""Times of calls on a GPU, and the ceilings to compare them with.

Several equal calls are captured into one CUDA graph, on inputs that take turns so that the L2 cache
does not hold them, and the graph is replayed: this measures only the kernels' own time. On the CPU
(``--device cpu``) the same code runs each call and reads a clock, to test the script; the times
mean nothing there.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

L2_TIMES = 3  # size of all inputs that take turns, as a multiple of the L2 cache
MIN_GRAPH_SECONDS = 300e-6
MAX_CALLS = 200


def sets_needed(device: torch.device, num_bytes: int) -> int:
    """The number of input sets of a size that must take turns so that L2 holds none of them."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(64, -(-L2_TIMES * cache // max(num_bytes, 1))))


def time_calls(device: torch.device, calls: Sequence[Call], rounds: int) -> float:
    """The seconds of one of several equal calls, each on inputs of its own: the median over rounds.

    Args:
        device: the device of the calls.
        calls: the calls, which take turns.
        rounds: the number of timed replays.
    """
    for call in calls:
        call()
    if device.type != "cuda":
        return _time_on_the_cpu(calls, rounds)
    return _time_on_cuda(calls, rounds)


def _time_on_the_cpu(calls: Sequence[Call], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for call in calls:
            call()
        seconds.append((time.perf_counter() - begin) / len(calls))
    return statistics.median(seconds)


def elapsed(device: torch.device, run: Call) -> float:
    """Seconds from the beginning of a call's work on a device to its end."""
    if device.type == "cuda":
        return _elapsed(run)
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _elapsed(run: Call) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _time_on_cuda(calls: Sequence[Call], rounds: int) -> float:
    torch.cuda.synchronize()
    once = min(_elapsed(lambda: [call() for call in calls]) for _ in range(3)) / len(calls)
    count = min(MAX_CALLS, max(len(calls), int(MIN_GRAPH_SECONDS / max(once, 1e-6)) + 1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    seconds = [_elapsed(graph.replay) / count for _ in range(rounds)]
    return statistics.median(seconds)


@functools.cache
def copy_rate(device: torch.device) -> float:
    """Bytes read and written a second by a large copy from device memory to device memory."""
    num_bytes = 4 << 30 if device.type == "cuda" else 16 << 20
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / time_calls(device, [lambda: target.copy_(source)], 10)


@functools.cache
def read_rate(device: torch.device) -> float:
    """Bytes read a second by a large sum, which can exceed the rate of a copy."""
    num_bytes = 4 << 30 if device.type == "cuda" else 16 << 20
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    return num_bytes / time_calls(device, [source.sum], 10)


@functools.cache
def matmul_rate(device: torch.device) -> float:
    """Operations a second of a large bfloat16 matrix product on random data."""
    size = 8192 if device.type == "cuda" else 128
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / time_calls(device, [lambda: a @ b], 10)
