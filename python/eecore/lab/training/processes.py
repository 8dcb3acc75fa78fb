"""The processes of torchrun, as one of them sees them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import Tensor, distributed


def num_processes() -> int:
    """The number of processes that torchrun has started; 1 without it."""
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if "RANK" in os.environ and size.isdecimal() else 1


def is_first() -> bool:
    """Whether this is the first of the processes, which writes."""
    return num_processes() == 1 or os.environ["RANK"] == "0"


@contextlib.contextmanager
def first_alone_speaks() -> Iterator[None]:
    """Processes other than the first print nothing in this context, at whose end they part."""
    with contextlib.ExitStack() as silenced:
        if not is_first():
            nowhere = silenced.enter_context(open(os.devnull, "r+"))
            silenced.enter_context(contextlib.redirect_stdout(nowhere))
            silenced.enter_context(contextlib.redirect_stderr(nowhere))
        try:
            yield
        finally:
            if distributed.is_available() and distributed.is_initialized():
                distributed.destroy_process_group()


def share(num_rows: int, place: int, places: int) -> tuple[list[int], bool]:
    """The rows of a batch that are computed in one of several places.

    A place without a row of its own gets the first one, which then does not count: every process
    takes part in every pass.

    Returns:
        The rows, and whether they count.
    """
    rows = list(range(place, num_rows, places))
    return (rows, True) if rows else ([0], False)


def total(numbers: Tensor) -> Tensor:
    """The sums of all processes' numbers."""
    if distributed.is_available() and distributed.is_initialized():
        numbers = numbers.detach().clone()
        distributed.all_reduce(numbers)
    return numbers


def any_of(flags: list[bool], device: torch.device) -> list[bool]:
    """For each flag, whether it is set in any process."""
    return (total(torch.tensor(flags, dtype=torch.float32, device=device)) > 0).tolist()
