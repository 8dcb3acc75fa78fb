"""Models over another owner's tensors: the tensors become views of the model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from eecore.config import AnyModelConfig
from eecore.errors import ModelError
from eecore.models.hybrid import HybridModel
from eecore.models.llama import HEAD, LlamaWeights
from eecore.models.network import Network
from eecore.models.readers.checkpoint import (
    FLOAT_DTYPES,
    T5_EMBEDDINGS,
    StoredTensors,
    check_tensors,
    embeddings_name,
    empty_weights,
    expected_shapes,
)
from eecore.models.readers.load import choose_device, choose_dtype, network_of
from eecore.models.source import ModelSource
from eecore.models.t5 import T5Model
from eecore.models.t5_weights import T5Weights
from eecore.models.weights import NewWeights, WeightView


class HeldTensors(StoredTensors):
    """Named tensors in memory, read like a checkpoint.

    Args:
        tensors: by their names in a Hugging Face checkpoint; a tensor may have several names.
        owner: the name of the tensors' owner in errors.
    """

    def __init__(self, tensors: Mapping[str, Tensor], owner: str) -> None:
        self._tensors = dict(tensors)
        self.names, self.place = list(self._tensors), Path(owner)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor; a ModelError if it is not a float dtype."""
        dtype = self._tensors[name].dtype
        if dtype not in FLOAT_DTYPES.values():
            known = ", ".join(str(each) for each in FLOAT_DTYPES.values())
            raise ModelError(f"{self.place}: {name}: supported are {known}, got {dtype}")
        return dtype

    def home(self, embeddings: str) -> tuple[torch.device, torch.dtype]:
        """The device and dtype that all tensors share; a ModelError if they differ."""
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

    def is_tied(self, name: str, embeddings: str) -> bool:
        """Whether a tensor is absent or has the embeddings' memory."""
        if name not in self._tensors or embeddings not in self._tensors:
            return True
        return _layout(self._tensors[name]) == _layout(self._tensors[embeddings])

    def check_apart(self, names: list[str], embeddings: str) -> None:
        """Raise if tensors share memory that the model's weights do not share."""
        owners: dict[int, str] = {}
        for name in names:
            other = owners.setdefault(self._tensors[name].data_ptr(), name)
            if other != name:
                raise ModelError(
                    f"{self.place}: {name}: expected memory of its own, got that of {other}"
                )
        for name in T5_EMBEDDINGS:
            if not self.is_tied(name, embeddings):
                raise ModelError(
                    f"{self.place}: {name}: expected the memory of {embeddings}, got its own"
                )


class Adopted:
    """Weights of a model over tensors that another owner also uses.

    Each tensor gets the memory of its part of the weights, as a storage of its own size, so that
    writing into it changes them at once, and saving it writes no other weights. If the
    dtype differs, as for the position biases of a T5 in bfloat16, an offset is added, as to the
    norms of a Gemma, or the order of numbers differs, as for the taps of a convolution, there is a
    copy instead, which :meth:`refresh` brings up to date.

    Args:
        tensors: parameters by their names in a Hugging Face checkpoint, on one device, in one
            dtype. The LM head is tied if it is the embeddings' memory, whatever the config says.
        owner: the name of the tensors' owner in errors.
        before: earlier weights of the same owner, which are kept if all tensors are still their
            views.

    Raises:
        ModelError: the tensors do not fit the config, or there is no kernel for their dtype and
            device; nothing has changed then.
    """

    @torch.no_grad()
    def __init__(
        self,
        config: AnyModelConfig,
        tensors: Mapping[str, Tensor],
        owner: str,
        before: Adopted | None = None,
    ) -> None:
        held = HeldTensors(tensors, owner)
        embeddings = embeddings_name(config, held)
        self._is_tied = held.is_tied(HEAD, embeddings)
        config = replace(config, tie_word_embeddings=self._is_tied)
        check_tensors(held, config)
        device, dtype = held.home(embeddings)
        choose_device(device)
        choose_dtype(dtype, device, dtype, config)
        self._shapes = expected_shapes(held, config)
        held.check_apart(list(self._shapes), embeddings)
        self._weights: LlamaWeights | T5Weights
        self._views: dict[str, WeightView]
        if before is not None and before._shapes == self._shapes and not before.moved(tensors):
            self._weights, self._views = before._weights, before._views
        else:
            self._weights, views = empty_weights(config, embeddings, NewWeights(device, dtype))
            aliases = {HEAD, *T5_EMBEDDINGS} & set(tensors) - set(views)
            self._views = views | dict.fromkeys(aliases, views[embeddings])
            for name, view in self._views.items():
                view.fill(tensors[name])
            shared: dict[int, Tensor] = {}
            for name, view in self._views.items():
                if not _is_copy(view, tensors[name]):
                    place = view.weight.data_ptr()
                    tensors[name].data = shared.setdefault(place, _alone(view.weight))
        self._tensors: dict[str, Tensor] = {name: tensors[name] for name in self._views}
        self._layouts = {name: _layout(tensor) for name, tensor in self._tensors.items()}

    def network(self, config: AnyModelConfig, source: ModelSource | None) -> Network:
        """A model of these weights.

        Args:
            config: the config that the weights were made for, or one with the same shapes.
            source: which model this is; None: unknown.
        """
        config = replace(config, tie_word_embeddings=self._is_tied)
        return network_of(config, self._weights, source)

    def moved(self, tensors: Mapping[str, Tensor]) -> str | None:
        """The name of the first tensor that is no longer the adopted one, if any."""
        for name, mine in self._tensors.items():
            if tensors.get(name) is not mine or _layout(mine) != self._layouts[name]:
                return name
        return None

    @torch.no_grad()
    def refresh(self, network: Network) -> None:
        """Bring up to date copies of tensors, and what is computed from them."""
        for name, tensor in self._tensors.items():
            if _is_copy(self._views[name], tensor):
                self._views[name].fill(tensor)
        if isinstance(network, (T5Model, HybridModel)):
            network.refresh()


def _is_copy(view: WeightView, tensor: Tensor) -> bool:
    """Whether a view is a copy of its tensor, not the same memory."""
    return (
        view.offset != 0
        or tensor.dtype != view.weight.dtype
        or not view.weight.is_contiguous()  # files hold contiguous tensors
    )


def _alone(view: Tensor) -> Tensor:
    """The same memory as a view, in a storage that ends with it: ``torch.save`` writes storages."""
    return from_dlpack(view)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """The memory of a tensor: its address, dtype, shape and strides."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
