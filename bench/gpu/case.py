"""What a case of the benchmark on GPUs is: an op at one shape, its bytes, peers and targets.

A case makes its inputs on demand, so that only one case's tensors are in memory at a time.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.timing import Call
from tests.cases import LLAMA_8B

EPS = 1e-6
PAGE_SIZE = 16


@dataclass(frozen=True)
class Work:
    """One set of inputs: the op, its peers, and what each gives, to be compared."""

    call: Call
    peers: dict[str, Call] = field(default_factory=dict)
    result: Callable[[], Tensor] | None = None
    peer_result: Callable[[str], Tensor] | None = None


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    op: str
    name: str
    moved_bytes: int
    make: Callable[[], Work]
    of_copy: float | None = None  # target: share of the measured copy bandwidth
    microseconds: float | None = None  # target: at most
    over_peer: float | None = None  # target: times as fast as the best peer
    flops: float | None = None


@dataclass(frozen=True)
class Setting:
    """What the inputs of a run have in common; ``tiny`` shrinks every shape."""

    dtype: torch.dtype = torch.float32
    device: torch.device | None = None
    tiny: bool = False

    @property
    def hidden_size(self) -> int:
        """Of the ops whose launch is their cost."""
        return 64 if self.tiny else LLAMA_8B.hidden_size

    def states(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)


CPU = Setting()


def small_cases(
    op: str,
    name: str,
    row_bytes: int,
    make: Callable[[int], Work],
    *,
    more_bytes: int = 0,
    microseconds: float | None = 5,
) -> Iterator[Case]:
    """Those of an op of a few kilobytes, whose launch is its cost, at three batch sizes.

    Args:
        name: with ``{}`` where the batch size is.
        row_bytes: what it moves for each row, ``more_bytes`` beside that.
    """
    for b in (1, 8, 32):
        moved = b * row_bytes + more_bytes
        yield Case(op, name.format(b), moved, partial(make, b), microseconds=microseconds)


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)
