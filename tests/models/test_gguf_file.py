"""GGUF files byte by byte: what a file claims is checked against what it holds."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from eecore.errors import CheckpointError, ModelError, UnsupportedModelError
from eecore.models import convert_gguf
from eecore.models.readers.gguf_file import KINDS, GGUFFile
from tiny_gguf import write_gguf
from tiny_models import write_model

STRING, ARRAY = 8, 9


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def field(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def file_of(
    path: Path,
    fields: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    data: int = 0,
    counts: tuple[int, int] | None = None,
    version: int = 3,
) -> Path:
    fields, tensors = fields or [], tensors or []
    head = struct.pack("<4sIQQ", b"GGUF", version, *(counts or (len(tensors), len(fields))))
    content = head + b"".join([*fields, *tensors])
    path.write_bytes(content + bytes(-len(content) % 32) + bytes(data))
    return path


def test_metadata_and_tensors_are_those_of_the_gguf_package(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", write_model(tmp_path / "o"))
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    assert ours.fields.names == [name for name in theirs.fields if not name.startswith("GGUF.")]
    for name in ours.fields.names:
        expected = theirs.fields[name].contents()
        got = ours.fields._values[name]
        assert got == expected, name
        assert type(got) is type(expected)
    assert ours.names == [tensor.name for tensor in theirs.tensors]
    for stored in theirs.tensors:
        assert ours.shape(stored.name) == tuple(reversed(stored.shape.tolist()))
        assert np.array_equal(ours.read(stored.name).numpy(), stored.data)


@pytest.mark.parametrize("form", "BbHhIifQqd")
def test_every_type_of_number_is_read(form: str, tmp_path: Path) -> None:
    kinds = dict(zip("BbHhIif?Qqd", (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), strict=True))
    values = [struct.pack(f"<{form}", number) for number in (1, 7, 100)]
    array = struct.pack("<IQ", kinds[form], 3) + b"".join(values)
    fields = [
        field("one", kinds[form], values[1]),
        field("many", ARRAY, array),
        field("flag", 7, b"\x01"),
        field("words", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text("é")),
    ]
    read = GGUFFile(file_of(tmp_path / "x.gguf", fields)).fields
    assert read.number("one") == 7
    assert read.numbers("many") == (1, 7, 100)
    assert read.flag("flag") is True
    assert read.texts("words") == ("a", "é")


HUGE = [2**20, 2**31, 2**40, 2**62, 2**63, 2**64 - 1]


@pytest.mark.parametrize("size", HUGE)
@pytest.mark.parametrize(
    "claim",
    ["tensors", "fields", "name", "string", "strings", "bytes", "doubles", "nested", "sizes"],
)
def test_a_count_that_the_file_does_not_hold(claim: str, size: int, tmp_path: Path) -> None:
    number = struct.pack("<Q", size)
    counts = {"tensors": (size, 0), "fields": (0, size)}.get(claim)
    arrays = {"strings": STRING, "bytes": 0, "doubles": 12, "nested": ARRAY}
    fields, tensors = [], []
    if claim == "name":
        fields = [number + b"name"]
    elif claim == "string":
        fields = [field("x", STRING, number + b"text")]
    elif claim in arrays:
        fields = [field("x", ARRAY, struct.pack("<I", arrays[claim]) + number + bytes(40))]
    elif claim == "sizes":
        tensors = [tensor("x", [size, size, size, size])]
    file = file_of(tmp_path / "x.gguf", fields, tensors, counts=counts, data=64)
    with pytest.raises(
        CheckpointError, match=r"x.gguf: expected a whole GGUF file, got \d+ bytes:"
    ):
        GGUFFile(file)


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ([field("a", 4, bytes(4))] * 2, [], "expected each field once, got 'a' twice"),
        ([field(b"\xff", 4, bytes(4))], [], "the name of field 0: expected UTF-8 text"),
        ([field("a", 13, bytes(4))], [], "'a': expected a type of 0..12, got 13"),
        ([field("a", ARRAY, bytes([99, 0, 0, 0]) + bytes(8))], [], "array of numbers or strings"),
        ([field("general.alignment", 4, bytes(4))], [], "general.alignment: expected a power of"),
        ([field("general.alignment", STRING, text("x"))], [], "alignment: expected a power of"),
        ([], [tensor("a", [8])] * 2, "expected each tensor once, got 'a' twice"),
        ([], [tensor("a", [])], "'a': expected sizes of 1 or more"),
        ([], [tensor("a", [0])], "'a': expected sizes of 1 or more"),
        ([], [tensor("a", [1] * 5)], "'a': its dimensions: expected at most 4, got 5"),
        ([], [tensor("a", [8], kind=99)], "'a': expected a type of tensors, got 99"),
        ([], [tensor("a", [33], kind=2)], "'a': expected sizes of 1 or more, rows of 32"),
        ([], [tensor("a", [8], offset=1)], "'a': expected 32 bytes"),
        ([], [tensor("a", [8], offset=64)], "'a': expected 32 bytes"),
        ([], [tensor("a", [8], offset=2**63)], "'a': expected 32 bytes"),
        ([], [tensor("a", [8]), tensor("b", [8])], "'b': expected 32 bytes"),
        ([], [tensor("a", [16]), tensor("b", [8], offset=32)], "'b': expected 32 bytes"),
    ],
)
def test_a_header_that_cannot_be(
    fields: list[bytes], tensors: list[bytes], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(file_of(tmp_path / "x.gguf", fields, tensors, data=64))


@pytest.mark.parametrize("version", [0, 1, 4, 3 << 24])
def test_other_versions_are_refused(version: int, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="version: supported are little-endian 2 and 3"):
        GGUFFile(file_of(tmp_path / "x.gguf", version=version))


# Fields of a model


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Path]:
    """A place for a directory; after the test nothing is there or beside it."""
    place = tmp_path / "place"
    place.mkdir()
    yield place / "model"
    assert list(place.iterdir()) == []


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path, empty: Path) -> None:
    original = write_model(tmp_path / "o")
    extra = {"blk.0.attn_q.bias": np.ones(3, dtype=np.float32)}
    file = write_gguf(tmp_path / "t.gguf", original, extra=extra)
    with pytest.raises(CheckpointError, match=r"q_proj.bias: expected \[256\]|missing"):
        convert_gguf(file, empty)
    extra = {"rope_freqs.weight": np.ones(3, dtype=np.float32)}
    file = write_gguf(tmp_path / "t.gguf", original, extra=extra)
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight: expected \[32\], got \[3\]"):
        convert_gguf(file, empty)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_divisors_that_cannot_be(value: float, tmp_path: Path, empty: Path) -> None:
    extra = {"rope_freqs.weight": np.full(32, value, dtype=np.float32)}
    file = write_gguf(tmp_path / "t.gguf", write_model(tmp_path / "o"), extra=extra)
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight: expected divisors up to 1e"):
        convert_gguf(file, empty)


def test_a_file_and_a_place_that_cannot_be(tmp_path: Path, empty: Path) -> None:
    file = write_gguf(tmp_path / "t.gguf", write_model(tmp_path / "o"))
    for name in ("a" * 300, "a\0b"):
        with pytest.raises(ModelError, match="expected a GGUF file"):
            convert_gguf(tmp_path / name, empty)
        with pytest.raises(ModelError, match="expected a new or empty directory"):
            convert_gguf(file, tmp_path / name)
    with pytest.raises(ModelError, match="expected a GGUF file, got a directory"):
        convert_gguf(tmp_path, empty)
    with pytest.raises(ModelError, match="expected a new or empty directory, got a file"):
        convert_gguf(file, file)


def test_the_types_of_tensors_are_those_of_gguf() -> None:
    sizes = {kind.value: (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    shared = KINDS.keys() & sizes.keys()
    assert len(shared) > 30
    assert {number: KINDS[number] for number in shared} == {n: sizes[n] for n in shared}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_floats_are_read_as_gguf_reads_them(
    kind: str, tmp_path: Path, tiny_directory: Path
) -> None:
    stored = gguf.GGMLQuantizationType[kind]
    file = GGUFFile(write_gguf(tmp_path / "tiny.gguf", tiny_directory, quantization=stored))
    name = "token_embd.weight"
    assert file.kind(name) == kind
    expected = gguf.quants.dequantize(file.blocks(name).numpy(), stored)
    assert file.read(name).numpy().tobytes() == expected.astype("float32").tobytes()
