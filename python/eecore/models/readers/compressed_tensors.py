"""Layers as compressed-tensors stores them: ``pack-quantized`` or ``int-quantized`` weights.

Packed: ``weight_packed`` int32 [out, in * bits / 32], numbers of neighbouring columns in a word,
the lowest first, each with half of their range added; ``weight_shape`` [out, in]; with zero points
``weight_zero_point`` int32 [out * bits / 32, groups], packed the same way down the rows. Plain:
``weight`` and ``weight_zero_point`` int8. ``weight_scale`` is [out, groups], [out, 1] for a scale a
row, or one number; ``weight_g_idx`` int32 [in] is the group of each column, ignored if it holds a
-1. Quantised activations are not supported.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eecore.models.readers.config_fields import ConfigFields
from eecore.models.readers.quantised_layout import (
    BITS,
    FLOATS,
    Layout,
    Shape,
    StoredModule,
    group_size,
    num_groups,
)
from eecore.models.readers.quantised_matrix import QuantisedMatrix, unpacked

PACKED, PLAIN = "pack-quantized", ("int-quantized", "naive-quantized")
STRATEGIES = ("group", "channel", "tensor")
MAX_SCHEMES = 64
PARTS = tuple(f"weight_{name}" for name in ("packed", "scale", "zero_point", "shape", "g_idx"))


def compressed_tensors(fields: ConfigFields) -> Layout:
    """The layout of a config.json's ``quantization_config``."""
    fields.choice("quantization_status", ("compressed",), "compressed")
    if "kv_cache_scheme" in fields:
        raise fields.unsupported("kv_cache_scheme", "null", "a quantised KV cache")
    sparsity, transforms = fields.inner("sparsity_config"), fields.inner("transform_config")
    if sparsity is not None:
        sparsity.choice("format", ("dense",), "dense")
    if transforms is not None and transforms.names:
        raise fields.unsupported("transform_config", "none", transforms.names)
    groups = fields.inner("config_groups")
    if groups is None or not 1 <= len(groups.names) <= MAX_SCHEMES:
        count = 0 if groups is None else len(groups.names)
        raise fields.wrong("config_groups", f"1 to {MAX_SCHEMES} groups", count)
    format = fields.text("format", PACKED)
    schemes: dict[_Scheme, None] = {}
    for name in groups.names:
        group = groups.inner(name)
        if group is None:
            raise groups.wrong(name, "an object", None)
        schemes[_Scheme.of(group, format)] = None
    return Layout("compressed-tensors", PARTS, list(schemes))


@dataclass(frozen=True)
class _Scheme:
    """The number format of the layers of one group of a config."""

    packed: bool
    bits: int
    group_size: int
    """Columns that share a scale; -1: all columns of a row."""
    whole: bool
    """Whether the whole matrix has one scale."""
    symmetric: bool

    @classmethod
    def of(cls, group: ConfigFields, default_format: str) -> _Scheme:
        """The scheme of one of ``config_groups``."""
        for name in ("input_activations", "output_activations"):
            if name in group:
                raise group.unsupported(name, "null (weights alone)", "quantised activations")
        format = group.choice("format", (PACKED, *PLAIN), default_format)
        weights = group.inner("weights")
        if weights is None:
            raise group.wrong("weights", "an object", None)
        weights.choice("type", ("int",), "int")
        possible = BITS if format == PACKED else (8,)
        if (bits := weights.integer("num_bits", default=8)) not in possible:
            raise weights.unsupported("num_bits", " and ".join(map(str, possible)), bits)
        strategy, size = _strategy(weights)
        symmetric = weights.flag("symmetric", True)
        return cls(format == PACKED, bits, size, strategy == "tensor", symmetric)

    @property
    def weight(self) -> str:
        """The tensor that holds the numbers."""
        return "weight_packed" if self.packed else "weight"

    def fits(self, module: StoredModule) -> bool:
        return (
            self.weight in module
            and "weight_scale" in module
            and self.symmetric == ("weight_zero_point" not in module)
            and module.shape(self.weight) == self._weight_shape(module)
            and module.shape("weight_scale") in self._scale_shapes(module)
        )

    def check(self, module: StoredModule) -> None:
        count = num_groups(module, self.group_size)
        kind = "I32" if self.packed else "I8"
        module.check(self.weight, (kind,), self._weight_shape(module))
        module.check("weight_scale", FLOATS, *self._scale_shapes(module))
        if "weight_shape" in module:
            _check_shape(module)
        if not self.symmetric or "weight_zero_point" in module:
            self._check_zeros(module)
        if "weight_g_idx" in module:
            module.check("weight_g_idx", ("I32", "I64"), (module.num_columns,))
            _groups(module, count)

    def matrix(self, module: StoredModule) -> QuantisedMatrix:
        stored, scales = module.tensor(self.weight), module.tensor("weight_scale")
        scales = scales.reshape(1, 1) if self.whole else scales
        count = scales.shape[1]

        def quants(begin: int, end: int) -> Tensor:
            rows = stored[begin:end]
            if not self.packed:
                return (rows ^ -128).view(torch.uint8)
            return unpacked(rows, self.bits)[:, : module.num_columns].contiguous()

        return QuantisedMatrix(
            self.bits,
            quants,
            scales.expand(module.num_rows, count),
            self._zeros(module, count),
            _groups(module, count),
        )

    def _zeros(self, module: StoredModule, count: int) -> Tensor:
        """uint8 [num_rows, count], with half of the numbers' range added."""
        half = 1 << self.bits - 1
        if "weight_zero_point" not in module:
            return torch.full((module.num_rows, count), half, dtype=torch.uint8)
        stored = module.tensor("weight_zero_point")
        if stored.dtype == torch.int32:
            return unpacked(stored.T, self.bits)[:, : module.num_rows].T
        zeros = (stored.to(torch.int16) + half).to(torch.uint8)
        return zeros.expand(module.num_rows, count)

    def _check_zeros(self, module: StoredModule) -> None:
        words = -(-module.num_rows * self.bits // 32)
        part, shapes = "weight_zero_point", self._scale_shapes(module)
        if part in module and module.dtype(part) == "I32" and self.packed and not self.whole:
            module.check(part, ("I32",), (words, shapes[0][1]))
            return
        module.check(part, ("I8",), *shapes)
        zeros, half = module.tensor(part), 1 << self.bits - 1
        if int(zeros.min()) < -half or int(zeros.max()) >= half:
            got = f"{int(zeros.min())}..{int(zeros.max())}"
            raise module.wrong(part, f"numbers of {-half}..{half - 1}", got)

    def _weight_shape(self, module: StoredModule) -> Shape:
        columns = module.num_columns
        return module.num_rows, -(-columns * self.bits // 32) if self.packed else columns

    def _scale_shapes(self, module: StoredModule) -> tuple[Shape, ...]:
        if self.whole:
            return (1,), (), (1, 1)
        count = 1 if self.group_size == -1 else module.num_columns // self.group_size
        return ((module.num_rows, count),)


def _strategy(weights: ConfigFields) -> tuple[str, int]:
    """The strategy, and the number of columns that share a scale; -1: all columns of a row."""
    size = group_size(weights, None)
    by_size = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.choice("strategy", STRATEGIES, by_size)
    if (strategy == "group") != (size is not None and size > 0):
        raise weights.wrong("group_size", f"one of strategy {strategy}", size)
    return strategy, size if strategy == "group" else -1


def _check_shape(module: StoredModule) -> None:
    module.check("weight_shape", ("I64", "I32"), (2,))
    expected, got = [module.num_rows, module.num_columns], module.tensor("weight_shape").tolist()
    if got != expected:
        raise module.wrong("weight_shape", str(expected), str(got))


def _groups(module: StoredModule, count: int) -> Tensor:
    """int64 [num_columns]: the group of each column."""
    if "weight_g_idx" in module and not (module.tensor("weight_g_idx") == -1).any():
        return module.groups("weight_g_idx", count)
    return module.groups_in_order(count)
