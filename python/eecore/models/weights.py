"""Weights before a checkpoint is read: their memory, and the places that its tensors fill."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from eecore import ops
from eecore.models.int8 import quantise_rows
from eecore.ops import Matrix

Form = Literal["floats", "int8", "blocks"]
"""What holds a matrix: floats of the model's dtype, int8 with a scale for each row, or packed
blocks of 4 to 8 bits."""
Coding = Literal["int8", "int4"]
"""How matrices may be quantised as they are read."""
Care = Literal["usual", "more", "most"]
"""What rounding a matrix costs: most the LM head and what makes values, more what makes keys."""
CARES: dict[str, Care] = {"k": "more", "k_proj": "more", "v": "most", "v_proj": "most"}
"""The care of matrices by the last part of their names; the usual of others."""
BLOCK_FORMATS: dict[Coding, dict[Care, str]] = {
    "int8": {"usual": "Q8_0", "more": "Q8_0", "most": "Q8_0"},
    "int4": {"usual": "Q4_1", "more": "Q5_1", "most": "Q8_0"},
}
"""Blocks of matrices whose rows they fill; others get a scale per row of int8."""
MAX_SMALL = 1 << 20
"""Elements of a tensor that is copied by one thread."""
PART = 1 << 14
"""Elements of a part of it: below the 32768 from which torch shares an element-wise loop."""
BLOCK_COLUMNS = 32
INT8_BLOCK_DEVICES = frozenset({"cpu"})
"""The types of devices on which int8 is in blocks; on others its rows have a scale each."""


@dataclass(frozen=True)
class NewMatrix:
    """A matrix of the weights before it has memory."""

    field: str
    """The field of the weights that it will be in: qkv, embed_tokens, ..."""
    shape: tuple[int, ...]
    """[..., out_features, in_features]"""
    parts: tuple[int, ...]
    """out_features of each tensor of a checkpoint that fills it."""
    is_head: bool
    """Whether it is the LM head, alone or the embeddings too."""
    cares: tuple[Care, ...]
    """The care of each of these tensors."""


class MatrixForms(Protocol):
    """The form of every matrix of a model."""

    def form(self, matrix: NewMatrix) -> Form: ...

    def packed_bytes(self, matrix: NewMatrix) -> int:
        """Bytes of a matrix in blocks, all of its layers together."""
        ...


@dataclass(frozen=True)
class CodedForms:
    """The forms that matrices are quantised to as they are read; None: all are floats."""

    coding: Coding | None
    int8_blocks: bool = True
    """Whether int8 is in blocks; else it has a scale for each row."""

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
    """The dtype of all that is not quantised."""
    forms: MatrixForms = ALL_FLOATS

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """In the weights' dtype, or the one given."""
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
        """[..., out_features, in_features] in its form, with a bias where wanted.

        Args:
            field: of the weights that it will be in.
            shape: of the weight.
            parts: out_features of each tensor of a checkpoint that fills it, if they are several.
            cares: what is to be taken of each of them where they are quantised; the usual when none
                are given, and the most of the LM head.
            bias: whether there is one.
            is_head: whether it is the LM head, alone or the embeddings too.
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
    """The place, in the tensor's shape; int8 where there is a scale."""
    scale: Tensor | None = None
    """float32, of that shape without its last axis."""
    table: Tensor | None = None
    """int64, of that shape too; the weight is packed bytes then."""
    care: Care = "usual"
    """Where it is quantised."""
    offset: float = 0.0
    """Added to what a checkpoint stores, in float32; of norms alone."""

    @classmethod
    def of(cls, matrix: Matrix, care: Care = "usual") -> WeightView:
        """The place of a matrix, whose bias is a tensor of its own."""
        return cls(matrix.weight, matrix.scale, matrix.table, care)

    def fill(self, stored: Tensor) -> None:
        """Copy a stored tensor, converted to the weight's dtype and device, or made int8."""
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
    """Copy a tensor; a small one in parts, each too small for torch to wake other threads, which
    takes them longer than the copy where the processors are busy."""
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
) -> dict[str, WeightView]:
    """What the tensors of a stack of layers fill, by their names in a checkpoint.

    Args:
        block: the name of a layer, with ``{}`` for its number.
        matrices: of all layers, by the rest of their names, the last part of which says whether
            they make keys or values.
        norms: of all layers likewise; None where there is none.
        norm_offset: added to each norm weight of the checkpoint.
    """
    by_layer: dict[str, list[WeightView]] = {}
    for name, matrix in matrices.items():
        care = CARES.get(name.split(".")[-1], "usual")
        by_layer[f"{name}.weight"] = [WeightView.of(part, care) for part in matrix.unbind()]
        if matrix.bias is not None:
            by_layer[f"{name}.bias"] = [WeightView(part) for part in matrix.bias]
    for name, norm in norms.items():
        if norm is not None:
            by_layer[f"{name}.weight"] = [WeightView(part, offset=norm_offset) for part in norm]
    num_layers = len(next(iter(by_layer.values())))
    return {
        f"{block.format(layer)}.{name}": views[layer]
        for layer in range(num_layers)
        for name, views in by_layer.items()
    }


class Filling:
    """Fills the places of a checkpoint's tensors, packed weights one tensor after the other.

    Args:
        coding: what floats are quantised to where a place is packed.
    """

    def __init__(self, coding: Coding | None = None) -> None:
        self._coding = coding
        self._filled: dict[int, int] = {}  # bytes of each packed weight, by its address

    def fill(self, view: WeightView, stored: Tensor) -> None:
        """With a tensor of floats, converted or quantised as its place wants it."""
        if view.table is None:
            view.fill(stored)
            return
        floats = stored if stored.dtype in (torch.float32, torch.bfloat16) else stored.float()
        assert self._coding is not None
        format = BLOCK_FORMATS[self._coding][view.care]
        self.pack(view, ops.quantise_weight(floats, format), format, stored.shape[-1])

    def pack(self, view: WeightView, blocks: Tensor, format: str, in_features: int) -> None:
        """With blocks as a file has them, uint8 [num_rows, row_bytes]."""
        address = view.weight.data_ptr()
        offset = self._filled.get(address, 0)
        end = offset + ops.packed_bytes(format, len(blocks), in_features)
        assert view.table is not None
        if view.weight.device.type == "cpu":
            ops.pack_weight(blocks, format, offset=offset, packed=view.weight, table=view.table)
        else:
            # Memory below the offset is not touched, and so not taken.
            packed = torch.empty(end, dtype=torch.uint8)
            matrix = ops.pack_weight(blocks, format, offset=offset, packed=packed)
            assert matrix.table is not None
            view.weight[offset:end].copy_(packed[offset:])
            view.table.copy_(matrix.table)
        self._filled[address] = end
