"""A GGUF file: its metadata and tensors, all counts and lengths checked against the file's size.

Nothing is allocated for a number that the file claims before it holds as many bytes.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eecore.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from eecore.json_fields import JsonFields
from eecore.readable import regular_file, shown_path
from eecore.values import shown

__all__ = ["GGUFFile"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_FIELDS = 1 << 16
MOST_TENSORS = 1 << 17
MOST_ITEMS = 1 << 24
"""Of an array."""
MOST_BYTES = 1 << 24
"""Of a string."""
MOST_DIMENSIONS = 4
STRING, ARRAY = 8, 9
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


class _Wrong(ValueError):
    """What a GGUF file does not hold."""


class _Cursor:
    """Reads on from a place in a file's bytes, and never beyond their end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def take(self, size: int, what: str) -> int:
        """Where the next ``size`` bytes are; goes behind them."""
        left = len(self._data) - self.at
        if size > left:
            raise _Wrong(f"{what}: expected at most the {left} bytes that are left, got {size}")
        start, self.at = self.at, self.at + size
        return start

    def number(self, form: str, what: str) -> Any:
        """One number."""
        start = self.take(struct.calcsize(f"<{form}"), what)
        return struct.unpack_from(f"<{form}", self._data, start)[0]

    def numbers(self, form: str, count: int, what: str) -> list[Any]:
        """As many numbers one after the other."""
        start = self.take(struct.calcsize(f"<{form}") * count, what)
        return list(struct.unpack_from(f"<{count}{form}", self._data, start))

    def count(self, form: str, most: int, what: str, *, num_bytes: int) -> int:
        """A number of things that take ``num_bytes`` each at least."""
        count: int = self.number(form, what)
        possible = min(most, (len(self._data) - self.at) // num_bytes)
        if count > possible:
            raise _Wrong(f"{what}: expected at most {possible}, got {count}")
        return count

    def text(self, what: str) -> str:
        """A string with its length before it."""
        length = self.count("Q", MOST_BYTES, f"{what}: its length", num_bytes=1)
        start = self.take(length, what)
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise _Wrong(f"{what}: expected UTF-8 text, got: {error}") from None

    def value(self, kind: int, what: str) -> Any:
        """A value of a type of GGUF's; arrays of arrays are not known to anybody."""
        if kind == STRING:
            return self.text(what)
        if kind in SCALARS:
            return self.number(SCALARS[kind], what)
        if kind != ARRAY:
            raise _Wrong(f"{what}: expected a type of 0..12, got {kind}")
        items = self.number("I", what)
        if items == STRING:
            count = self.count("Q", MOST_ITEMS, f"{what}: its length", num_bytes=8)
            return [self.text(f"{what}[{index}]") for index in range(count)]
        if items not in SCALARS:
            raise _Wrong(f"{what}: expected an array of numbers or strings, got type {items}")
        form = SCALARS[items]
        size = struct.calcsize(f"<{form}")
        count = self.count("Q", MOST_ITEMS, f"{what}: its length", num_bytes=size)
        return self.numbers(form, count, what)


@dataclass(frozen=True)
class _StoredTensor:
    """Where a tensor is."""

    kind: int
    shape: tuple[int, ...]
    offset: int
    """Of its bytes, in the part of the file that tensors are in; then in the file."""
    num_bytes: int


class GGUFFile:
    """Metadata and tensors of a GGUF file, mapped, with errors that name the file.

    Attributes:
        path: of the file.
        fields: its metadata.
        architecture: what kind of model it is.
    """

    def __init__(self, path: Path) -> None:
        import gguf  # here: it takes 0.1 s, which other models need not wait for

        self.path = regular_file(path, CheckpointError, ModelNotFoundError, "a GGUF file")
        self._quants = gguf.quants
        self._type = gguf.GGMLQuantizationType
        self._sizes = gguf.constants.GGML_QUANT_SIZES
        self._data = self._mapped()
        try:
            metadata, self._tensors = self._read(_Cursor(self._data))
        except _Wrong as error:
            raise CheckpointError(
                f"{shown_path(path)}: expected a whole GGUF file, got {len(self._data)} bytes: "
                f"{error}"
            ) from None
        self.fields = JsonFields(metadata, shown_path(path), CheckpointError)
        self.architecture: str = self.fields.text("general.architecture", "nothing")

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, as torch counts dimensions: the one that changes fastest comes last."""
        return self._tensors[name].shape

    def kind(self, name: str) -> str:
        """What a tensor is stored in, "Q4_0" or "F16" for one."""
        return str(self._type(self._tensors[name].kind).name)

    def num_bytes(self, name: str) -> int:
        """That a tensor takes."""
        return self._tensors[name].num_bytes

    def blocks(self, name: str) -> Tensor:
        """uint8 [..., row_bytes]: a tensor as it is stored, in the file's own memory."""
        stored = self._tensors[name]
        flat = np.frombuffer(self._data, np.uint8, stored.num_bytes, stored.offset)
        return torch.from_numpy(flat.reshape(*stored.shape[:-1], -1))

    def read(self, name: str) -> Tensor:
        """A tensor, dequantised to float32."""
        stored = self._tensors[name]
        kind = self._type(stored.kind)
        try:
            with np.errstate(all="ignore"):
                values = self._quants.dequantize(self.blocks(name).numpy(), kind)
        except NotImplementedError:
            raise UnsupportedModelError(
                f"{self.path}: {name}: expected a type that gguf dequantises, got {kind.name}"
            ) from None
        return torch.from_numpy(values.astype("float32")).reshape(stored.shape)

    def _mapped(self) -> mmap.mmap:
        try:
            with self.path.open("rb") as file:
                magic = file.read(len(MAGIC))
                if magic != MAGIC:
                    raise CheckpointError(
                        f"{self.path}: expected a GGUF file (magic GGUF), got {magic!r}"
                    )
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}") from None

    def _read(self, cursor: _Cursor) -> tuple[dict[str, Any], dict[str, _StoredTensor]]:
        cursor.take(len(MAGIC), "magic")
        version = cursor.number("I", "version")
        if version not in VERSIONS:
            raise UnsupportedModelError(
                f"{self.path}: version: supported are little-endian 2 and 3, got {version}"
            )
        num_tensors = cursor.count("Q", MOST_TENSORS, "the number of tensors", num_bytes=24)
        num_fields = cursor.count("Q", MOST_FIELDS, "the number of fields", num_bytes=13)
        metadata: dict[str, Any] = {}
        for index in range(num_fields):
            name = cursor.text(f"the name of field {index}")
            if name in metadata:
                raise _Wrong(f"expected each field once, got {shown(name)} twice")
            metadata[name] = cursor.value(cursor.number("I", shown(name)), shown(name))
        tensors: dict[str, _StoredTensor] = {}
        for index in range(num_tensors):
            name = cursor.text(f"the name of tensor {index}")
            if name in tensors:
                raise _Wrong(f"expected each tensor once, got {shown(name)} twice")
            tensors[name] = self._stored_tensor(cursor, shown(name))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment not in (1 << power for power in range(21)):
            raise _Wrong(f"general.alignment: expected a power of two, got {shown(alignment)}")
        begin = -(-cursor.at // alignment) * alignment
        return metadata, _placed(tensors, begin, alignment, len(self._data))

    def _stored_tensor(self, cursor: _Cursor, name: str) -> _StoredTensor:
        count = cursor.count("I", MOST_DIMENSIONS, f"{name}: its dimensions", num_bytes=8)
        shape = tuple(reversed(cursor.numbers("Q", count, name)))
        kind = cursor.number("I", name)
        offset = cursor.number("Q", name)
        try:
            block, num_bytes = self._sizes[self._type(kind)]
        except ValueError:
            raise _Wrong(f"{name}: expected a type of tensors, got {kind}") from None
        if not shape or min(shape) < 1 or shape[-1] % block:
            raise _Wrong(f"{name}: expected sizes of 1 or more, rows of {block}, got {shape}")
        return _StoredTensor(kind, shape, offset, math.prod(shape) // block * num_bytes)


def _placed(
    tensors: dict[str, _StoredTensor], begin: int, alignment: int, end: int
) -> dict[str, _StoredTensor]:
    """The tensors with their offsets in the file, where they neither overlap nor end behind it."""
    placed = {}
    reached = begin
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        start = begin + tensor.offset
        if start % alignment or not reached <= start <= end - tensor.num_bytes:
            raise _Wrong(
                f"{shown(name)}: expected {tensor.num_bytes} bytes of {reached}..{end}, got them "
                f"at {start}"
            )
        reached = start + tensor.num_bytes
        placed[name] = _StoredTensor(tensor.kind, tensor.shape, start, tensor.num_bytes)
    return {name: placed[name] for name in tensors}
