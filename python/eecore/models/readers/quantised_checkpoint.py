"""Checkpoints whose linear layers were quantised by GPTQ, AWQ or compressed-tensors.

The files decide which layers are quantised, not the lists in config.json: a layer has the tensors
of its method, or a weight in floats.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from eecore.config import ModelConfig
from eecore.errors import CheckpointError, ModelNotFoundError
from eecore.models.readers.awq import awq
from eecore.models.readers.checkpoint import Checkpoint, StoredTensors, expected_shapes
from eecore.models.readers.compressed_tensors import compressed_tensors
from eecore.models.readers.config_fields import ConfigFields
from eecore.models.readers.gptq import gptq
from eecore.models.readers.quantised_layout import FLOATS, Layout, Scheme, StoredModule
from eecore.models.readers.quantised_matrix import QuantisedMatrix
from eecore.models.readers.stored_weights import field_of, runs_as

METHODS: dict[str, Callable[[ConfigFields], Layout]] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed_tensors,
}
PACKED = ("qweight", "weight_packed")
"""Tensors that a layer has instead of a weight."""


def read_layout(directory: Path) -> Layout | None:
    """How a directory's layers are quantised, by its config.json; None if they are not.

    Raises:
        ModelError: the method, or one of its settings, is not supported.
    """
    fields = ConfigFields.read(directory / "config.json", CheckpointError, ModelNotFoundError)
    quantisation = fields.inner("quantization_config")
    if quantisation is None:
        return None
    method = quantisation.text("quant_method", quantisation.text("method", "none"))
    if method not in METHODS:
        raise fields.unsupported("quantization_config.quant_method", ", ".join(METHODS), method)
    return METHODS[method](quantisation)


def warn_of_floats(checkpoint: QuantisedCheckpoint, dtype: torch.dtype) -> None:
    """Warn which quantised layers will run as floats, and why."""
    forms = runs_as(checkpoint)
    for field in [field for field, form in forms.items() if form == "floats"]:
        names = [name for name in checkpoint.names if field_of(name) == field]
        if any(checkpoint.kind(name) not in FLOATS for name in names):
            name = next(name for name in names if checkpoint.not_in_blocks(name))
            warnings.warn(
                f"{checkpoint.place}: {name}: {checkpoint.not_in_blocks(name)}: all of {field} "
                f"runs as {str(dtype).removeprefix('torch.')}",
                stacklevel=4,
            )


@dataclass(frozen=True)
class _Layer:
    """A quantised layer."""

    module: StoredModule
    scheme: Scheme
    forms: tuple[str, ...]
    not_in_blocks: str | None


class QuantisedCheckpoint(StoredTensors):
    """The tensors of a directory under their names in a checkpoint of floats.

    Raises:
        ModelError: a layer's tensors are missing, have other dtypes or shapes, or do not fit
            together.
    """

    def __init__(self, files: Checkpoint, layout: Layout, config: ModelConfig) -> None:
        self._files, self.place = files, files.place
        self._layout = layout
        self.own_form = f"a directory of {layout.method}"
        untied = replace(config, tie_word_embeddings=False)
        self._shapes = expected_shapes(files, untied)
        modules = dict.fromkeys(
            module for module, _, part in map(_split, files.names) if part in layout.parts
        )
        self._layers: dict[str, _Layer] = {}
        for module in modules:
            if f"{module}.weight" in self._shapes:
                self._layers[f"{module}.weight"] = self._layer(module)
        own = {f"{module}.{part}" for module in modules for part in layout.parts}
        own = {name for name in own if f"{_split(name)[0]}.weight" in self._layers}
        others = [name for name in files.names if name not in own and name not in self._layers]
        self.names = [*self._layers, *(name for name in others if not self._is_padding(name))]

    @property
    def paths(self) -> list[Path]:
        return self._files.paths

    def path_of(self, name: str) -> Path:
        return self._files.path_of(name) if name not in self._layers else self.place

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name] if name in self._layers else self._files.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32 if name in self._layers else self._files.dtype(name)

    def kind(self, name: str) -> str:
        if name not in self._layers:
            return self._files.stored_dtype(name)
        return f"{self._layout.method} int{self._matrix(name).bits}"

    def forms(self, name: str) -> tuple[str, ...]:
        """The forms that hold a tensor exactly, except floats."""
        return self._layers[name].forms if name in self._layers else ()

    def not_in_blocks(self, name: str) -> str:
        """Why no block format holds a tensor exactly; empty if one does."""
        layer = self._layers.get(name)
        return "it is stored in floats" if layer is None else layer.not_in_blocks or ""

    def tensor(self, name: str) -> Tensor:
        """A tensor, dequantised to float32 if it is quantised."""
        if name in self._layers:
            return self._matrix(name).dequantised()
        return self._files.tensor(name)

    def blocks(self, name: str) -> Tensor:
        """uint8 [num_rows, row_bytes] in the block format of :meth:`forms`."""
        return self._matrix(name).blocks()

    def int8_rows(self, name: str) -> tuple[Tensor, Tensor]:
        """int8 [num_rows, num_columns] and float32 [num_rows]."""
        return self._matrix(name).int8_rows()

    def _layer(self, name: str) -> _Layer:
        shape = self._shapes[f"{name}.weight"]
        module = StoredModule(self._files, name, *shape)
        scheme = self._layout.scheme(module)
        scheme.check(module)
        packed = [part for part in PACKED if part in module]
        if packed and "weight" in module:
            raise module.wrong("weight", f"none beside {packed[0]}", "one")
        matrix = scheme.matrix(module)
        return _Layer(module, scheme, matrix.forms, matrix.not_in_blocks)

    def _matrix(self, name: str) -> QuantisedMatrix:
        layer = self._layers[name]
        return layer.scheme.matrix(layer.module)

    def _is_padding(self, name: str) -> bool:
        """Whether a tensor is a bias of zeros that a quantiser added to a layer without a bias."""
        module, _, part = _split(name)
        if part != "bias" or f"{module}.weight" not in self._layers or name in self._shapes:
            return False
        return not self._files.tensor(name).any()


def _split(name: str) -> tuple[str, str, str]:
    return name.rpartition(".")
