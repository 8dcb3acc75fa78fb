"""A model whose weights are divided among the processes of a run (FSDP2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from eecore.lab.training.exit_model import ExitModel
from eecore.lab.training.processes import Processes, whole


class _States(nn.Module):
    """The states of a model as one module, which FSDP2 gathers and divides around."""

    def __init__(self, exits: ExitModel) -> None:
        super().__init__()
        self.model = exits.model
        self._exits = exits

    def forward(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        return self._exits.states(inputs)


@dataclass(frozen=True, eq=False)
class ShardedExitModel(ExitModel):
    """An :class:`ExitModel` whose weights are DTensors, gathered layer by layer for use.

    Embeddings, final norm and head stay gathered from their first use in a step until the backward
    pass, since every exit uses them.

    Attributes:
        root: its forward pass gives the states.
    """

    root: Any = field(repr=False)

    @staticmethod
    def divide(exits: ExitModel, device: torch.device) -> ShardedExitModel:
        """Divide a model among all processes, in place, on their devices.

        Args:
            exits: equal in every process.
        """
        mesh = init_device_mesh(device.type, (Processes.current().size,))
        for layer in (*exits.encoder_layers, *exits.layers):
            fully_shard(layer, mesh=mesh)
        root = _States(exits)
        fully_shard(root, mesh=mesh)
        return ShardedExitModel(exits.model, exits.base, exits.layers, exits.encoder_layers, root)

    def states(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        states: list[Tensor] = self.root(inputs)
        return states

    def release(self) -> None:
        """Free the weights that a pass without gradients has gathered."""
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def gather(self, keep: bool) -> None:
        """Gather every weight on the CPU; the model can then be saved, but not run.

        Args:
            keep: whether this process keeps them; otherwise they are empty.
        """
        made: dict[nn.Parameter, nn.Parameter] = {}
        for module in self.model.modules():
            own = module.named_parameters(recurse=False, remove_duplicate=False)
            for name, parameter in list(own):
                if parameter not in made:  # tied weights stay tied
                    value = whole(parameter.detach())
                    value = value.cpu() if keep else torch.empty(0)
                    made[parameter] = nn.Parameter(value, parameter.requires_grad)
                module.register_parameter(name, made[parameter])
