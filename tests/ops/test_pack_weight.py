"""pack_weight: a file's blocks in a new layout, without loss of a bit."""

from __future__ import annotations

import pytest
import torch

import reference
from eecore import ops
from packed_blocks import SCALES, block_sizes, random_blocks
from random_calls import EXACT, Arguments, Checked, Maker, assert_close

SHAPES = ((1, 256), (16, 512), (5, 768), (37, 256), (64, 1024))


@pytest.mark.parametrize("format", ops.BLOCK_FORMATS)
def test_matches_the_reference(format: str, device: torch.device) -> None:
    """The numbers are, bit for bit, those of the format's own package."""
    for num_rows, columns in SHAPES:
        blocks = random_blocks(format, num_rows, columns).to(device)
        packed = ops.pack_weight(blocks, format)
        got = ops.unpack_weight(packed.weight, packed.table)
        assert torch.equal(got, reference.pack_weight(blocks, format))


@pytest.mark.parametrize("format", ops.BLOCK_FORMATS)
def test_scales_of_every_kind(format: str, device: torch.device) -> None:
    """Every float16, zeros and infinities and the smallest among them; every exponent of MXFP4."""
    columns, num_bytes = block_sizes(format)
    blocks = random_blocks(format, 4096, columns).to(device)
    halves = torch.arange(0, 65536, 16, dtype=torch.int32).to(torch.int16).view(torch.uint8)
    first = SCALES[format][0]
    blocks[:, first : first + 2] = halves.view(-1, 2)
    if format == "MXFP4":
        blocks[:, 0] = torch.arange(4096) % 256
    assert blocks.shape[1] == num_bytes
    packed = ops.pack_weight(blocks, format)
    got = ops.unpack_weight(packed.weight, packed.table)
    torch.testing.assert_close(
        got, reference.pack_weight(blocks, format), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("format", ops.BLOCK_FORMATS)
def test_takes_few_bytes_more_than_the_file(format: str) -> None:
    blocks = random_blocks(format, 64, 2048)
    # Scales of Q3_K and MXFP4 take more bits than in the file.
    share = 1.06 if format in ("Q3_K", "MXFP4") else 1.03
    assert ops.pack_weight(blocks, format).weight.nbytes <= share * blocks.nbytes


def test_parts_of_several_formats_lie_in_one_weight(device: torch.device) -> None:
    parts = [
        (name, random_blocks(name, 21, 256, seed=i)) for i, name in enumerate(("Q4_K", "Q6_K"))
    ]
    sizes = [ops.packed_bytes(name, 21, 256) for name, _ in parts]
    packed = torch.full((sum(sizes) + 64,), 7, dtype=torch.uint8, device=device)
    table = torch.zeros(42, dtype=torch.int64, device=device)
    ops.pack_weight(parts[1][1], "Q6_K", offset=sizes[0], packed=packed, table=table[21:])
    ops.pack_weight(parts[0][1], "Q4_K", packed=packed, table=table[:21])
    expected = torch.cat([reference.pack_weight(blocks, name) for name, blocks in parts])
    assert torch.equal(ops.unpack_weight(packed, table), expected)
    assert (packed[-64:] == 7).all()


@pytest.mark.parametrize("num_bytes", [0, 7, 19, 35])
def test_bytes_that_are_no_whole_blocks_are_named(num_bytes: int) -> None:
    """Also if the call allocates the packed weight."""
    blocks = torch.zeros(3, num_bytes, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="blocks: expected rows of whole blocks of 20 bytes"):
        ops.pack_weight(blocks, "Q4_1")


def test_packed_bytes_says_what_is_wrong() -> None:
    assert ops.packed_bytes("Q4_0", 17, 64) == 2 * 576
    with pytest.raises(ValueError, match="format: expected a block format, got F16"):
        ops.packed_bytes("F16", 1, 32)
    with pytest.raises(ValueError, match="Q4_K: expected rows of whole blocks of 256 columns, got"):
        ops.packed_bytes("Q4_K", 1, 128)


def fuzzed_call(m: Maker) -> Checked:
    format = m.one_of(*SCALES)
    block = block_sizes(format)[0]
    rows, columns = m.size(40), block * m.size(3, 1)
    blocks = random_blocks(format, rows, columns, seed=m.random.getrandbits(30))
    offset = 64 * m.size(3)
    room = offset + ops.packed_bytes(format, rows, columns) + m.size(70)
    given = {
        "blocks": m.placed(blocks, 1),
        "format": format,
        "offset": offset,
        "packed": m.placed(m.whole(256, room).to(torch.uint8)),
        "table": m.placed(m.whole(9, rows)),
    }

    def check(before: Arguments, after: Arguments) -> None:
        assert torch.equal(before["packed"][:offset], after["packed"][:offset])
        if rows > 0:
            got = ops.unpack_weight(after["packed"], after["table"])
            assert_close(got, reference.pack_weight(before["blocks"], format), EXACT, "packed")

    return given, check
