"""Calls of ops that read a weight, with the weight in floats, int8 rows or the blocks of a format.

On the CPU x is rounded first, to 16 bits for int8 rows and to 8 bits for blocks; on CUDA it is not.
"""

from __future__ import annotations

from typing import Any

import torch

import emulated
from cases import TOLERANCES
from eecore import ops
from eecore.models.int8 import dequantise_rows, quantise_rows
from packed_blocks import block_sizes, random_blocks

Call = dict[str, Any]

FORMATS = ops.BLOCK_FORMATS
FORMS = ("floats", "int8", *FORMATS)
STEMS = {"weight": "weight", "lm_head": "lm_head", "kv_weight": "kv"}
"""The names of weights, and the prefixes of their scales' and tables' names."""


def whole_blocks(columns: int, form: str) -> int:
    """The least number of columns, not below this one, that blocks of the form fill."""
    per_block = block_sizes(form)[0] if form in FORMATS else 1
    return -(-columns // per_block) * per_block


def on_device(matrix: ops.Matrix, device: torch.device | None) -> ops.Matrix:
    """The matrix on a device; weights are packed on the CPU."""
    assert matrix.table is not None
    return matrix._replace(weight=matrix.weight.to(device), table=matrix.table.to(device))


def packed_rows(format: str, rows: int, columns: int, device: torch.device | None) -> ops.Matrix:
    """A packed matrix with every bit pattern of its quants."""
    blocks = random_blocks(format, rows, columns, columns**-0.5)
    return on_device(ops.pack_weight(blocks, format), device)


def coded(call: Call, form: str, name: str = "weight") -> Call:
    """The call with its weight in a form: int8 rows of its numbers, random blocks of its shape."""
    weight, stem = call[name], STEMS[name]
    if form == "floats":
        return call
    if form == "int8":
        whole, scales = quantise_rows(weight)
        return {**call, name: whole, f"{stem}_scale": scales}
    matrix = packed_rows(form, *weight.shape, weight.device)
    return {**call, name: matrix.weight, f"{stem}_table": matrix.table}


def floats_of(weight: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """A packed weight as float64 [..., in_features]."""
    rows = ops.unpack_weight(weight.cpu(), table.cpu().flatten())
    return rows.double().view(*table.shape, -1).to(weight.device)


def as_floats(call: Call) -> Call:
    """The call with the numbers that its weight stands for."""
    for name, stem in STEMS.items():
        scale, table = call.get(f"{stem}_scale"), call.get(f"{stem}_table")
        if scale is not None:
            call = {**call, name: dequantise_rows(call[name], scale, torch.float64)}
        if table is not None:
            call = {**call, name: floats_of(call[name], table)}
        call = {
            **call,
            **{each: None for each in (f"{stem}_scale", f"{stem}_table") if each in call},
        }
    return call


def oracle_of(call: Call, device: torch.device) -> Call:
    """The reference's arguments for a call: on CUDA with the numbers that its weight stands for."""
    return as_floats(call) if emulated.is_cuda_kernel(device) else call


def check_close(
    got: torch.Tensor,
    wanted: torch.Tensor,
    form: str,
    device: torch.device,
    *,
    is_normed: bool = True,
) -> None:
    """On the CPU, x may round to the next step where the norm's last bit differs."""
    step = {"floats": 0.0, "int8": 2e-4}.get(form, 3e-2)
    rounds = is_normed and not emulated.is_cuda_kernel(device)
    tolerance = TOLERANCES[got.dtype]
    atol = 2 * tolerance.atol + step * rounds
    torch.testing.assert_close(got, wanted, rtol=tolerance.rtol, atol=atol, equal_nan=True)
