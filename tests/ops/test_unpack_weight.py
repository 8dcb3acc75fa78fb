"""unpack_weight: any rows of a packed weight, as float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import reference
from eecore import ops
from packed_blocks import SCALES, block_sizes, random_blocks
from random_calls import Arguments, Checked, Maker, compare


def unpack_weight(blocks: Tensor, format: str, rows: Tensor) -> Tensor:
    """Some rows of the unpacked weight."""
    return reference.pack_weight(blocks, format)[rows]


@pytest.mark.parametrize("format", ops.BLOCK_FORMATS)
def test_matches_the_reference(format: str, device: torch.device) -> None:
    blocks = random_blocks(format, 100, 512).to(device)
    packed = ops.pack_weight(blocks, format)
    for rows in ([3], [99, 0, 50, 50], list(range(100)), list(range(20, 40))):
        index = torch.tensor(rows, device=device)
        got = ops.unpack_weight(packed.weight, packed.table[index])
        assert torch.equal(got, unpack_weight(blocks, format, index))


def place(offset: int, columns: int, format: int, lane: int) -> int:
    return lane | format << 4 | columns // 32 << 8 | offset // 64 << 32


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([0, -1], "expected places that pack_weight wrote, got -1"),
        ([place(0, 64, 13, 0)] * 2, "expected places that pack_weight wrote, got 720"),
        ([place(0, 64, 0, 0), place(0, 96, 0, 1)], "expected rows of 64 columns .*, got 96"),
        ([place(0, 64, 5, 0)] * 2, "expected rows of 64 columns in blocks of 256, got 64"),
        ([place(64, 64, 0, 0)] * 2, "expected rows within 576 packed bytes, got .* ends at 640"),
        ([place(0, 64, 0, 15), place(0, 64, 0, 15) + 1], "expected places that pack_weight wrote|"
         "expected rows of 64 columns"),
    ],
)  # fmt: skip
def test_tables_are_not_followed_out_of_memory(entries: list[int], message: str) -> None:
    packed = torch.zeros(576, dtype=torch.uint8)
    out = torch.full((2, 64), 9.0)
    table = torch.tensor(entries)
    if entries[0] == 0:  # of a good row
        table[0] = place(0, 64, 0, 0)
    bad = table.clone()
    if entries[-1] == place(0, 64, 0, 15) + 1:
        bad[1] = place(0, 64, 0, 15) + 16 * 9
    with pytest.raises(RuntimeError, match=f"unpack_weight: table: .*{message}"):
        ops.unpack_weight(packed, bad, out=out)
    assert (out == 9).all()


def fuzzed_call(m: Maker) -> Checked:
    format = m.one_of(*SCALES)
    rows, columns = m.size(40, 1), block_sizes(format)[0] * m.size(3, 1)
    blocks = random_blocks(format, rows, columns, seed=m.random.getrandbits(30))
    packed = ops.pack_weight(blocks, format)
    assert packed.table is not None
    some = m.shuffled(rows)[: m.size(rows)]
    given = {
        "packed": m.placed(packed.weight),
        "table": m.placed(packed.table[some]),
        "out": m.placed(m.normal(len(some), columns), 1),
    }

    def oracle(_: Arguments) -> dict[str, Tensor]:
        return {"out": unpack_weight(blocks, format, some)}

    return given, compare(oracle)
