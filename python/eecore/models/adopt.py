"""Weights that somebody else holds, made those of a model: the tensors become views of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from eecore.config import AnyModelConfig
from eecore.errors import ModelError
from eecore.models.checkpoint import (
    FLOAT_DTYPES,
    check_tensors,
    embeddings_name,
    empty_weights,
    with_stored_tying,
)
from eecore.models.load import choose_device, choose_model_dtype, network_of
from eecore.models.network import Network
from eecore.models.source import ModelSource
from eecore.models.weights import NewWeights, WeightView

__all__ = ["Adopted", "HeldTensors", "adopt"]


class HeldTensors:
    """Named tensors in memory, as a checkpoint's are told about.

    Args:
        tensors: by the names that a Hugging Face checkpoint gives them.
        owner: what errors call who holds them.
    """

    def __init__(self, tensors: Mapping[str, Tensor], owner: str) -> None:
        self._tensors = dict(tensors)
        self.place = Path(owner)

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def path_of(self, name: str) -> Path:  # noqa: ARG002
        return self.place

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """A ModelError when it is not one of floats."""
        dtype = self._tensors[name].dtype
        if dtype not in FLOAT_DTYPES.values():
            known = ", ".join(str(each) for each in FLOAT_DTYPES.values())
            raise ModelError(f"{self.place}: {name}: supported are {known}, got {dtype}")
        return dtype

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name].data

    def home(self, embeddings: str) -> tuple[torch.device, torch.dtype]:
        """The one device and dtype of all of them."""
        first = self._tensors[embeddings]
        for name, tensor in self._tensors.items():
            if tensor.device.type == "meta":
                raise ModelError(
                    f"{self.place}: {name}: expected weights in memory, got the meta device"
                )
            if tensor.device != first.device or tensor.dtype != first.dtype:
                raise ModelError(
                    f"{self.place}: {name}: expected {first.dtype} on {first.device} as "
                    f"{embeddings} is, got {tensor.dtype} on {tensor.device}"
                )
        return first.device, first.dtype


class Adopted:
    """A model over tensors that somebody else holds too.

    Attributes:
        network: the model.
    """

    def __init__(
        self, network: Network, tensors: Mapping[str, Tensor], views: Mapping[str, WeightView]
    ) -> None:
        self.network = network
        shared = (
            (tensors[name], view.weight)
            for name, view in views.items()
            if tensors[name].dtype == view.weight.dtype
        )
        self._shared = list(shared)

    @property
    def is_shared(self) -> bool:
        """Whether they are still the same memory: nobody has put others in their place."""
        return all(
            tensor.data_ptr() == view.data_ptr() and tensor.dtype == view.dtype
            for tensor, view in self._shared
        )


@torch.no_grad()
def adopt(
    config: AnyModelConfig, tensors: Mapping[str, Tensor], owner: str, source: ModelSource | None
) -> Adopted:
    """A model of tensors that stay where they are used: each becomes a view of the model's weights.

    What is written into them afterwards is the model's at once. Where a dtype differs, as for the
    position biases of a T5 in bfloat16, there is a copy.

    Args:
        config: of the model.
        tensors: parameters by the names of a Hugging Face checkpoint, on one device, in one dtype.
        owner: what errors call who holds them.
        source: which model it is, where that is known.

    Raises:
        ModelError: they are not those of the config, or there is no kernel for their dtype and
            device; nothing has changed then.
    """
    held = HeldTensors(tensors, owner)
    check_tensors(held, config)
    embeddings = embeddings_name(config, held)
    device, dtype = held.home(embeddings)
    choose_device(device)
    choose_model_dtype(dtype, device, dtype, config)
    config = with_stored_tying(config, held)
    weights, views = empty_weights(config, embeddings, NewWeights(device, dtype))
    for name, view in views.items():
        tensor = tensors[name]
        view.weight.copy_(tensor)
        if tensor.dtype == view.weight.dtype:
            tensor.data = view.weight
    return Adopted(network_of(config, weights, source), tensors, views)
