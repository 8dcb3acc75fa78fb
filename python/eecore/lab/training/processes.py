"""Several processes that train together, started by ``torchrun``, such as one for each GPU.

Each computes its share of a step's batch. Either all have the whole model and add up their
gradients, or each has a share of the weights (:mod:`eecore.lab.training.sharding`). torch's own
DistributedDataParallel expects one backward pass a step; the early-exit loss has one for each exit
and one through the layers.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn

from eecore.errors import TrainingError

SENT_TOGETHER = 1 << 24
"""Numbers of gradients that are sent in one message."""


@dataclass(frozen=True)
class Processes:
    """The processes of a run, as one of them sees them.

    Attributes:
        rank: this process's number; the first one, 0, writes logs and files.
        size: the number of processes.
    """

    rank: int = 0
    size: int = 1

    @staticmethod
    def current() -> Processes:
        """The processes of torch.distributed's default group; one alone where there is none."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return Processes()
        return Processes(distributed.get_rank(), distributed.get_world_size())

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """The device on which they exchange gradients: the GPU with NCCL, else the CPU."""
        by_nccl = self.size > 1 and "cuda:nccl" in distributed.get_backend_config()
        return torch.device("cuda", torch.cuda.current_device()) if by_nccl else torch.device("cpu")

    def wait(self) -> None:
        """Return once every process has called this."""
        if self.size > 1:
            distributed.barrier()

    def total(self, numbers: Tensor) -> Tensor:
        """The sums of all processes' numbers, on the CPU."""
        totals = numbers.detach().cpu()
        if self.size > 1:
            distributed.all_reduce(totals)
        return totals

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is set in any process."""
        return (self.total(torch.tensor(flags, dtype=torch.float64)) > 0).tolist()

    def share(self, num_rows: int, piece: int = 0, pieces: int = 1) -> tuple[list[int], bool]:
        """The rows of a batch that this process computes in a piece.

        A piece without a row of its own gets the first one, which then does not count: every
        process takes part in every pass.

        Returns:
            The rows, and whether they count.
        """
        rows = list(range(self.rank + piece * self.size, num_rows, self.size * pieces))
        return (rows, True) if rows else ([0], False)

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up all processes' gradients; a parameter without one in any of them keeps none."""
        if self.size == 1:
            return
        trained = [each for each in parameters if each.requires_grad]
        reached = self.any(*(each.grad is not None for each in trained))
        held: list[Tensor] = []
        for parameter in (each for each, has in zip(trained, reached, strict=True) if has):
            if parameter.grad is not None and is_divided(parameter.grad):
                parameter.grad.mul_(self.size)  # FSDP2 has made a mean
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            held.append(parameter.grad)
            if sum(map(Tensor.numel, held)) >= SENT_TOGETHER:
                _add_up(held)
                held = []
        if held:
            _add_up(held)

    def same_weights(self, module: nn.Module) -> None:
        """Give every process the first one's weights."""
        if self.size > 1:
            for tensor in (*module.parameters(), *module.buffers()):
                distributed.broadcast(tensor.detach(), 0)

    def gathered(self, numbers: Tensor) -> list[Tensor]:
        """The tensors of all processes, by rank; they are of one shape, on the CPU."""
        if self.size == 1:
            return [numbers]
        held = [torch.empty_like(numbers) for _ in range(self.size)]
        distributed.all_gather(held, numbers)
        return held


def _add_up(tensors: list[Tensor]) -> None:
    """Add up all processes' tensors, in one message."""
    together = torch.cat([tensor.flatten() for tensor in tensors])
    distributed.all_reduce(together)
    totals = torch.split(together, [tensor.numel() for tensor in tensors])
    for tensor, total in zip(tensors, totals, strict=True):
        tensor.copy_(total.view_as(tensor))


def is_divided(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, whose module takes half a second to import."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor of which each process may hold a part; all processes have to call
    this.
    """
    return tensor.full_tensor() if is_divided(tensor) else tensor  # type: ignore[attr-defined]


def is_launched() -> bool:
    """Whether torchrun has started this process."""
    size = os.environ.get("WORLD_SIZE", "1")
    return "RANK" in os.environ and size.isdecimal() and int(size) > 1


class _Nowhere(io.TextIOBase):
    """A stream that drops what is printed."""

    def write(self, text: str, /) -> int:
        return len(text)


@contextlib.contextmanager
def launched(device: str) -> Iterator[Processes]:
    """The processes that torchrun has started; one alone where it has not.

    All but the first print only errors meanwhile.

    Args:
        device: ``cuda``: each process takes a GPU of its own.

    Raises:
        TrainingError: a machine has more processes than GPUs.
    """
    if not is_launched():
        yield Processes()
        return
    if device == "cuda":
        place, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if place >= there:
            raise TrainingError(
                f"processes: expected at most {there} here, one a GPU, got {place + 1} or more"
            )
        torch.cuda.set_device(place)
    # Tensors on the CPU are exchanged by gloo, gradients on GPUs by NCCL.
    distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    try:
        processes = Processes.current()
        with contextlib.ExitStack() as silenced:
            if not processes.is_first:
                nowhere = _Nowhere()
                silenced.enter_context(contextlib.redirect_stdout(nowhere))
                silenced.enter_context(contextlib.redirect_stderr(nowhere))
            yield processes
    finally:
        distributed.destroy_process_group()
