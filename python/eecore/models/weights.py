"""Weights before a checkpoint is read: their memory, and where the checkpoint's tensors go."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from eecore import ops
from eecore.models.int8 import quantise_rows
from eecore.ops import Matrix

Form = Literal["floats", "int8", "blocks"]
"""How a matrix is stored: floats of the model's dtype, int8 with a scale for each row, or packed
blocks of 2 to 8 bits."""
Coding = Literal["int8", "int4"]
"""How matrices may be quantised as they are read."""
Care = Literal["usual", "more", "most"]
"""How finely a matrix is quantised, by what its rounding costs: most for the LM head and value
projections, more for key projections."""
CARES: dict[str, Care] = {"k": "more", "k_proj": "more", "v": "most", "v_proj": "most"}
"""The care of matrices by the last part of their names; "usual" for all other matrices."""
BLOCK_FORMATS: dict[Coding, dict[Care, str]] = {
    "int8": {"usual": "Q8_0", "more": "Q8_0", "most": "Q8_0"},
    "int4": {"usual": "Q4_1", "more": "Q5_1", "most": "Q8_0"},
}
"""Block formats of matrices whose rows are whole blocks; other matrices become int8 with a scale
for each row."""
MAX_SMALL = 1 << 20
"""Elements, at most, of a tensor that one thread copies."""
PART = 1 << 14
"""Elements that one call copies: below the 32768 from which torch shares a loop among threads."""
BLOCK_COLUMNS = 32
INT8_BLOCK_DEVICES = frozenset({"cpu"})
"""The types of devices on which int8 is in blocks; on other devices each row has a scale."""


@dataclass(frozen=True)
class NewMatrix:
    """A matrix of the weights before it has memory."""

    field: str
    """The field of the weights that will hold it: qkv, embed_tokens, ..."""
    shape: tuple[int, ...]
    """[..., out_features, in_features]"""
    parts: tuple[int, ...]
    """out_features of each tensor of a checkpoint that fills it."""
    is_head: bool
    """Whether the matrix is the LM head, tied to the embeddings or not."""
    cares: tuple[Care, ...]
    """The care of each of these tensors."""


class MatrixForms(Protocol):
    """The form of every matrix of a model."""

    def form(self, matrix: NewMatrix) -> Form: ...

    def packed_bytes(self, matrix: NewMatrix) -> int:
        """Bytes of a matrix in blocks, in all layers together."""
        ...


@dataclass(frozen=True)
class CodedForms:
    """Forms of matrices that are quantised as they are read; without a coding all are floats."""

    coding: Coding | None
    int8_blocks: bool = True
    """Whether int8 is in blocks; otherwise each row has a scale."""

    def form(self, matrix: NewMatrix) -> Form:
        is_table = matrix.field == "embed_tokens" and not matrix.is_head
        if self.coding is None or is_table:
            return "floats"
        fills = matrix.shape[-1] % BLOCK_COLUMNS == 0
        return "blocks" if fills and (self.coding != "int8" or self.int8_blocks) else "int8"

    def packed_bytes(self, matrix: NewMatrix) -> int:
        assert self.coding is not None
        *layers, _, in_features = matrix.shape
        formats = BLOCK_FORMATS[self.coding]
        each = (
            ops.packed_bytes(formats[care], out_features, in_features)
            for out_features, care in zip(matrix.parts, matrix.cares, strict=True)
        )
        return math.prod(layers) * sum(each)


ALL_FLOATS = CodedForms(None)


@dataclass(frozen=True)
class NewWeights:
    """Makes uninitialised weights; on device "meta" they take no memory."""

    device: torch.device | str
    dtype: torch.dtype
    """The dtype of weights that are not quantised."""
    forms: MatrixForms = ALL_FLOATS

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor in the weights' dtype, or in a given one."""
        made = torch.empty(shape, device=self.device, dtype=dtype or self.dtype)
        return ops.in_huge_pages(made) if made.device.type == "cpu" else made

    def matrix(
        self,
        field: str,
        *shape: int,
        parts: Sequence[int] = (),
        cares: Sequence[Care] = (),
        bias: bool = False,
        is_head: bool = False,
    ) -> Matrix:
        """An uninitialised matrix [..., out_features, in_features] in its form.

        Args:
            field: the field of the weights that will hold it.
            parts: out_features of each tensor of a checkpoint that fills it, if there are several.
            cares: the care of each of these tensors if they are quantised; by default "usual", and
                "most" for the LM head.
            is_head: whether it is the LM head, tied to the embeddings or not.
        """
        sizes = tuple(parts) or shape[-2:-1]
        usual: Care = "most" if is_head else "usual"
        matrix = NewMatrix(field, shape, sizes, is_head, tuple(cares) or (usual,) * len(sizes))
        rows, form = shape[:-1], self.forms.form(matrix)
        given = self.tensor(*rows) if bias else None
        if form == "floats":
            return Matrix(self.tensor(*shape), given)
        if form == "int8":
            scale = self.tensor(*rows, dtype=torch.float32)
            return Matrix(self.tensor(*shape, dtype=torch.int8), given, scale)
        packed = self.tensor(self.forms.packed_bytes(matrix), dtype=torch.uint8)
        return Matrix(packed, given, None, self.tensor(*rows, dtype=torch.int64))


@dataclass(frozen=True)
class WeightView:
    """Where one tensor of a checkpoint goes."""

    weight: Tensor
    """The memory to fill, in the tensor's shape; int8 if there is a scale."""
    scale: Tensor | None = None
    """float32, in the tensor's shape without the last axis."""
    table: Tensor | None = None
    """int64, in the tensor's shape without the last axis; the weight is packed bytes then."""
    care: Care = "usual"
    """How finely the tensor is quantised, if it is."""
    offset: float = 0.0
    """Added in float32 to what a checkpoint stores; only for norms."""
    cares: tuple[tuple[int, Care], ...] = ()
    """Row counts, from the first row on, each with its care; empty: ``care`` for all rows."""

    @classmethod
    def of(cls, matrix: Matrix, care: Care = "usual") -> WeightView:
        """The view of a matrix without its bias, which has a view of its own."""
        return cls(matrix.weight, matrix.scale, matrix.table, care)

    def fill(self, stored: Tensor) -> None:
        """Copy a stored tensor, converted to the weight's dtype and device or quantised to int8."""
        if self.scale is None:
            _copy(self.weight, stored.float() + self.offset if self.offset else stored)
            return
        self.fill_int8(*quantise_rows(stored))

    def fill_int8(self, whole: Tensor, scale: Tensor) -> None:
        """Copy int8 rows and the scale of each."""
        assert self.scale is not None
        self.weight.copy_(whole)
        self.scale.copy_(scale)


def _copy(place: Tensor, stored: Tensor) -> None:
    """Copy a tensor; a small one in parts, each too small for torch to wake other threads: waking
    them takes longer than the copy when the processors are busy."""
    is_near = place.device.type == "cpu" and place.is_contiguous()
    if stored.numel() > MAX_SMALL or not is_near:
        place.copy_(stored)
        return
    parts = zip(
        torch.split(place.view(-1), PART), torch.split(stored.reshape(-1), PART), strict=True
    )
    for part, given in parts:
        part.copy_(given)


def layer_views(
    block: str,
    matrices: Mapping[str, Matrix],
    norms: Mapping[str, Tensor | None],
    norm_offset: float = 0.0,
    rows: Mapping[str, Mapping[str, int]] | None = None,
    layers: Sequence[int] | None = None,
) -> dict[str, WeightView]:
    """What the tensors of a stack of layers fill, by their names in a checkpoint.

    Args:
        block: the name of a layer, with ``{}`` for its number.
        matrices: matrices of all layers, by the rest of their names, whose last part says whether
            they project to keys or values.
        norms: norms of all layers, by the rest of their names; None: there is no such norm.
        norm_offset: added to each norm weight of the checkpoint.
        rows: for a matrix that holds several projections, the number of rows of each, by the last
            part of the name that the projection would have alone.
        layers: the numbers of the layers; None: 0, 1, ...
    """
    by_layer: dict[str, list[WeightView]] = {}
    for name, matrix in matrices.items():
        care = CARES.get(name.split(".")[-1], "usual")
        held = (rows or {}).get(name, {})
        cares = tuple((count, CARES.get(each, "usual")) for each, count in held.items())
        views = [WeightView.of(part, care) for part in matrix.unbind()]
        by_layer[f"{name}.weight"] = [replace(view, cares=cares) for view in views]
        if matrix.bias is not None:
            by_layer[f"{name}.bias"] = [WeightView(part) for part in matrix.bias]
    for name, norm in norms.items():
        if norm is not None:
            by_layer[f"{name}.weight"] = [WeightView(part, offset=norm_offset) for part in norm]
    numbers = range(len(next(iter(by_layer.values())))) if layers is None else layers
    return {
        f"{block.format(layer)}.{name}": views[index]
        for index, layer in enumerate(numbers)
        for name, views in by_layer.items()
    }


class Filling:
    """Fills weights with a checkpoint's tensors, packed weights one tensor after the other.

    Args:
        coding: what floats are quantised to if their weight is packed.
    """

    def __init__(self, coding: Coding | None = None) -> None:
        self._coding = coding
        self._filled: dict[int, int] = {}  # bytes of each packed weight, by its address

    def fill(self, view: WeightView, stored: Tensor) -> None:
        """Fill a view with a tensor of floats, converted or quantised to the view's form."""
        if view.table is None:
            view.fill(stored)
            return
        if view.cares:
            begin = 0
            for count, care in view.cares:
                some = slice(begin, begin + count)
                part = replace(view, table=view.table[some], care=care, cares=())
                self.fill(part, stored[some])
                begin += count
            return
        floats = stored if stored.dtype in (torch.float32, torch.bfloat16) else stored.float()
        assert self._coding is not None
        format = BLOCK_FORMATS[self._coding][view.care]
        self.pack(view, ops.quantise_weight(floats, format), format, stored.shape[-1])

    def pack(self, view: WeightView, blocks: Tensor, format: str, in_features: int) -> None:
        """Fill a packed view with blocks as a file stores them, uint8 [num_rows, row_bytes]."""
        address = view.weight.data_ptr()
        offset = self._filled.get(address, 0)
        end = offset + ops.packed_bytes(format, len(blocks), in_features)
        assert view.table is not None
        if view.weight.device.type == "cpu":
            ops.pack_weight(blocks, format, offset=offset, packed=view.weight, table=view.table)
        else:
            # Memory below the offset is never touched, and so takes no pages.
            packed = torch.empty(end, dtype=torch.uint8)
            matrix = ops.pack_weight(blocks, format, offset=offset, packed=packed)
            assert matrix.table is not None
            view.weight[offset:end].copy_(packed[offset:])
            view.table.copy_(matrix.table)
        self._filled[address] = end
