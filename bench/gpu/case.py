"""Cases of the benchmark on GPUs: an op at one shape, its bytes, peers and targets.

A case makes its inputs on demand, so that only one case has tensors in memory at a time.
"""

from __future__ import annotations

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
    """One set of inputs: calls of the op and of its peers, and their results to compare."""

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
    of_copy: float | None = None  # target: a share of the measured copy bandwidth
    microseconds: float | None = None  # target: the longest time
    over_peer: float | None = None  # target: the speed-up over the best peer
    flops: float | None = None


@dataclass(frozen=True)
class Setting:
    """Settings of all inputs of a run; ``tiny`` shrinks every shape."""

    dtype: torch.dtype = torch.float32
    device: torch.device | None = None
    tiny: bool = False

    @property
    def hidden_size(self) -> int:
        """The hidden size of small ops, whose cost is their launch."""
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
    """Cases of an op of a few kilobytes, whose cost is its launch, at three batch sizes.

    Args:
        name: the cases' name, with ``{}`` for the batch size.
        row_bytes: bytes that it moves for each row.
        more_bytes: bytes that it moves once.
    """
    for b in (1, 8, 32):
        moved = b * row_bytes + more_bytes
        yield Case(op, name.format(b), moved, partial(make, b), microseconds=microseconds)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)
