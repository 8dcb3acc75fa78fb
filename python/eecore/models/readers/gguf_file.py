"""GGUF files, of one part or several: metadata and tensors, with all counts and lengths checked
against the files' sizes.

No memory is allocated for a count before the file is known to hold that many bytes. (The reader of
the ``gguf`` package loops over as many items as a file claims, for hours in a file of 100 bytes.)
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eecore.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from eecore.files.json_fields import JsonFields
from eecore.files.readable import regular_file, shown_path
from eecore.models.source import part_files
from eecore.values import shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_FIELDS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_ITEMS = 1 << 24
"""Items of an array, at most."""
MAX_BYTES = 1 << 24
"""Bytes of a string, at most."""
MAX_DIMENSIONS = 4
MAX_PARTS = 99_999
STRING, ARRAY = 8, 9
SCALARS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
"""The ``struct`` format of the numbers of each type."""
KINDS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""The types of tensors by number: name, numbers in a block, bytes of a block."""


class _Wrong(ValueError):
    """A field or tensor of a GGUF file is wrong."""


class _Cursor:
    """Reads a file's bytes from a position on, and never beyond their end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at, self.end = 0, len(data)

    def take(self, size: int, what: str) -> int:
        """The position of the next ``size`` bytes, which are then skipped."""
        left = len(self._data) - self.at
        if size > left:
            raise _Wrong(f"{what}: expected at most the {left} bytes that are left, got {size}")
        start, self.at = self.at, self.at + size
        return start

    def number(self, form: str, what: str) -> Any:
        """The next number."""
        return self.numbers(form, 1, what)[0]

    def numbers(self, form: str, count: int, what: str) -> list[Any]:
        """The next ``count`` numbers."""
        start = self.take(struct.calcsize(f"<{form}") * count, what)
        return list(struct.unpack_from(f"<{count}{form}", self._data, start))

    def count(self, form: str, most: int, what: str, *, num_bytes: int) -> int:
        """The next number, a count of items that take at least ``num_bytes`` each."""
        count: int = self.number(form, what)
        possible = min(most, (len(self._data) - self.at) // num_bytes)
        if count > possible:
            raise _Wrong(f"{what}: expected at most {possible}, got {count}")
        return count

    def text(self, what: str) -> str:
        """The next string, stored after its length."""
        length = self.count("Q", MAX_BYTES, f"{what}: its length", num_bytes=1)
        start = self.take(length, what)
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise _Wrong(f"{what}: expected UTF-8 text, got: {error}") from None

    def texts(self, count: int, what: str) -> list[str]:
        """The next ``count`` strings, read in one loop: a vocabulary may have 262,144."""
        found: list[str] = []
        length, data, end = struct.Struct("<Q").unpack_from, self._data, self.end
        with suppress(struct.error, UnicodeDecodeError):
            for _ in range(count):
                start = self.at + 8
                stop = start + length(data, self.at)[0]
                if stop > end or stop - start > MAX_BYTES:
                    break
                found.append(data[start:stop].decode())
                self.at = stop
        # If a string is wrong, reading it again raises the error.
        return found + [self.text(f"{what}[{index}]") for index in range(len(found), count)]

    def value(self, kind: int, what: str) -> Any:
        """The next value, of a type of GGUF's; arrays of arrays are not supported."""
        if kind == STRING:
            return self.text(what)
        if kind in SCALARS:
            return self.number(SCALARS[kind], what)
        if kind != ARRAY:
            raise _Wrong(f"{what}: expected a type of 0..12, got {kind}")
        items = self.number("I", what)
        if items == STRING:
            count = self.count("Q", MAX_ITEMS, f"{what}: its length", num_bytes=8)
            return self.texts(count, what)
        if items not in SCALARS:
            raise _Wrong(f"{what}: expected an array of numbers or strings, got type {items}")
        size = struct.calcsize(SCALARS[items])
        count = self.count("Q", MAX_ITEMS, f"{what}: its length", num_bytes=size)
        return self.numbers(SCALARS[items], count, what)


@dataclass(frozen=True)
class _StoredTensor:
    """The type, shape and position of a tensor."""

    kind: int
    shape: tuple[int, ...]
    offset: int
    """Where the tensor's bytes begin: as read, in the file's tensor data; after :func:`_placed`, in
    the file."""
    num_bytes: int


@dataclass(frozen=True)
class _Part:
    """One of the files that hold a model."""

    path: Path
    data: mmap.mmap
    fields: JsonFields
    tensors: dict[str, _StoredTensor]


class GGUFFile:
    """Metadata and tensors of a GGUF file, mapped, with errors that name the file.

    Args:
        path: the file, or the first of several parts (``NAME-00001-of-0000N.gguf``) in a directory.

    Attributes:
        path: the file's path.
        fields: the file's metadata.
        architecture: the model's architecture.
        paths: the paths of all parts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        first = self._part(path)
        self.fields = first.fields
        self.architecture: str = self.fields.text("general.architecture", "nothing")
        parts = [first, *self._other_parts()]
        self.paths = [part.path for part in parts]
        self._part_of = {name: part for part in parts for name in part.tensors}
        count = sum(len(part.tensors) for part in parts)
        if count != len(self._part_of):
            raise CheckpointError(f"{shown_path(path)}: expected each tensor in one part, got two")
        if len(parts) > 1:
            self.fields.integer("split.tensors.count", count, count)

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._part_of)

    def path_of(self, name: str) -> Path:
        """The file that a tensor is in."""
        return self._part_of[name].path

    def fields_under(self, prefix: str) -> JsonFields:
        """The fields whose names begin with a prefix, under their names without the prefix."""
        values = self.fields.values
        under = {name[len(prefix) :]: values[name] for name in values if name.startswith(prefix)}
        return JsonFields(under, shown_path(self.path), CheckpointError, prefix)

    def unsupported(self, name: str, supported: str, got: Any) -> UnsupportedModelError:
        """The error of an unsupported field; ``supported``: "are llama, qwen2", for example."""
        return UnsupportedModelError(f"{self.path}: {name}: supported {supported}, got {got}")

    def unread(self, prefix: str, known: Collection[str]) -> dict[str, Any]:
        """The fields under a prefix that are neither known nor switched off (0, false, empty)."""
        values = self.fields_under(prefix).values
        return {prefix + n: values[n] for n in sorted(values) if values[n] and n not in known}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor in torch's order: the dimension that changes fastest comes last."""
        return self._stored(name).shape

    def kind(self, name: str) -> str:
        """How a tensor is stored: "Q4_0", "F16", ..."""
        return KINDS[self._stored(name).kind][0]

    def block_columns(self, name: str) -> int:
        """Numbers in a block of a tensor."""
        return KINDS[self._stored(name).kind][1]

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor."""
        return self._stored(name).num_bytes

    def blocks(self, name: str) -> Tensor:
        """uint8 [..., row_bytes]: a tensor as stored, in the file's mapped memory."""
        stored = self._stored(name)
        data = self._part_of[name].data
        flat = np.frombuffer(data, np.uint8, stored.num_bytes, stored.offset)
        return torch.from_numpy(flat.reshape(*stored.shape[:-1], -1))

    def read(self, name: str) -> Tensor:
        """A tensor, dequantised to float32."""
        blocks, kind = self.blocks(name).numpy(), self.kind(name)
        with np.errstate(all="ignore"):
            if kind in ("F32", "F16"):
                values = blocks.view(f"<f{KINDS[self._stored(name).kind][2]}").astype("float32")
            elif kind == "BF16":
                values = (blocks.view("<u2").astype("uint32") << 16).view("float32")
            else:
                values = self._dequantised(name, blocks, kind)
        return torch.from_numpy(values).reshape(self.shape(name))

    def release(self, name: str) -> None:
        """Give back the memory of a tensor; reading it again reads the file again."""
        stored = self._stored(name)
        begin = -(-stored.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (stored.offset + stored.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            self._part_of[name].data.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _dequantised(self, name: str, blocks: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
        from gguf import GGMLQuantizationType, quants  # seldom needed; its import takes some 0.04 s

        try:
            values = quants.dequantize(blocks, GGMLQuantizationType[kind])
        except (NotImplementedError, KeyError):  # KeyError: the type is newer than this gguf
            raise UnsupportedModelError(
                f"{self.path_of(name)}: {name}: expected a type that gguf dequantises, got {kind}"
            ) from None
        return values.astype("float32")

    def _stored(self, name: str) -> _StoredTensor:
        return self._part_of[name].tensors[name]

    def _other_parts(self) -> list[_Part]:
        """The parts after the first, if ``split.count`` says that there are several."""
        count = self.fields.integer("split.count", 0, MAX_PARTS, 0)
        if count < 2:
            return []
        files = part_files(self.path)
        if len(files) != count:
            raise CheckpointError(
                f"{shown_path(self.path)}: split.count: expected a name NAME-00001-of-{count:05}"
                f".gguf for a model in {count} files, got {self.path.name}"
            )
        number = self.fields.integer("split.no", 0, count - 1)
        if number != 0 or files[0] != self.path:
            raise CheckpointError(
                f"{shown_path(self.path)}: split.no: expected the first of {count} files, "
                f"{files[0].name}, got number {number + 1}"
            )
        parts = []
        for number, file in enumerate(files[1:], start=1):
            parts.append(self._part(file))
            parts[-1].fields.integer("split.no", number, number)
            parts[-1].fields.integer("split.count", count, count)
        return parts

    def _part(self, path: Path) -> _Part:
        data = _mapped(regular_file(path, CheckpointError, ModelNotFoundError, "a GGUF file"))
        try:
            metadata, tensors = self._read(path, _Cursor(data))
        except _Wrong as error:
            raise CheckpointError(
                f"{shown_path(path)}: expected a whole GGUF file, got {len(data)} bytes: {error}"
            ) from None
        return _Part(path, data, JsonFields(metadata, shown_path(path), CheckpointError), tensors)

    def _read(self, path: Path, cursor: _Cursor) -> tuple[dict[str, Any], dict[str, _StoredTensor]]:
        cursor.take(len(MAGIC), "magic")
        version = cursor.number("I", "version")
        if version not in VERSIONS:
            raise UnsupportedModelError(
                f"{path}: version: supported are little-endian 2 and 3, got {version}"
            )
        num_tensors = cursor.count("Q", MAX_TENSORS, "the number of tensors", num_bytes=24)
        num_fields = cursor.count("Q", MAX_FIELDS, "the number of fields", num_bytes=13)
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
        return metadata, _placed(tensors, begin, alignment, cursor.end)

    def _stored_tensor(self, cursor: _Cursor, name: str) -> _StoredTensor:
        count = cursor.count("I", MAX_DIMENSIONS, f"{name}: its dimensions", num_bytes=8)
        shape = tuple(reversed(cursor.numbers("Q", count, name)))
        kind = cursor.number("I", name)
        offset = cursor.number("Q", name)
        if kind not in KINDS:
            raise _Wrong(f"{name}: expected a type of tensors, got {kind}")
        _, block, num_bytes = KINDS[kind]
        if not shape or min(shape) < 1 or shape[-1] % block:
            raise _Wrong(f"{name}: expected sizes of 1 or more, rows of {block}, got {shape}")
        return _StoredTensor(kind, shape, offset, math.prod(shape) // block * num_bytes)


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
            if magic != MAGIC:
                raise CheckpointError(f"{path}: expected a GGUF file (magic GGUF), got {magic!r}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None


def _placed(
    tensors: dict[str, _StoredTensor], begin: int, alignment: int, end: int
) -> dict[str, _StoredTensor]:
    """The tensors with their offsets in the file; an error if they overlap or reach beyond it."""
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
        placed[name] = replace(tensor, offset=start)
    return {name: placed[name] for name in tensors}
