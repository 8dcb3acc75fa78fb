"""What ops of one pass over a weight launch: csrc/cuda/skinny_launch.cuh and its ops in short."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from bench.gpu.calls import Call, Known, ceil_div, nbytes
from bench.gpu.devices import Device
from bench.gpu.launches import KernelLaunch

WARPS = 8  # of a block
HEAD_M_TILES = 2
SUMMARY_WARPS = 4
SUMMARY_BYTES = 16
MOST_SHARED_ROWS = 8  # that each block makes ready itself
L1_BYTES = 64 << 10  # that the ring of a weight leaves, about


@dataclass(frozen=True)
class Rows:
    """Rows of x as a product reads them.

    Args:
        count: how many.
        size: elements of each.
        dtype: of them.
    """

    count: int
    size: int
    dtype: torch.dtype

    @property
    def chunk(self) -> int:
        """Elements of the 128 bytes that a warp takes of a row."""
        return 128 // self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """With what fills up its last chunk."""
        return ceil_div(self.size, self.chunk) * 128

    def tiles(self, most: int) -> int:
        """Tiles of 8 rows that a pass over the weight takes, at most ``most``."""
        if self.count <= 8:
            return 1
        if self.count <= 16 or self.dtype == torch.float32 or most == 2:
            return 2
        return 4 if self.count <= 32 or most == 4 else most


def rms_norm(rows: Rows, norm_bytes: int) -> KernelLaunch:
    """Rows made ready in the workspace; each block reads the norm's weight."""
    return KernelLaunch(
        "rms_norm_kernel",
        (rows.count, 1),
        {"x": rows.count * rows.size * rows.dtype.itemsize, "norm_weight": norm_bytes},
        repeats={"norm_weight": (rows.count - 1) * norm_bytes},
        workspace=rows.count * rows.row_bytes,
    )


class Made(Enum):
    """Where rows of x are made ready for a product: not at all where it can read x as it is."""

    NOWHERE = auto()
    AHEAD = auto()
    IN_BLOCKS = auto()


def must_be_made(rows: Rows, x: Tensor, norm: Tensor | None) -> bool:
    """Whether a product cannot read x where it is."""
    return (
        norm is not None
        or rows.size % rows.chunk != 0
        or x.stride(0) * rows.dtype.itemsize % 16 != 0
    )


def blocks_make_rows(rows: Rows, m_tiles: int, slices: int, blocks: int, device: Device) -> bool:
    """Whether shared memory has room for them beside enough stages of the weight."""
    if rows.count > MOST_SHARED_ROWS:
        return False
    stage = 4 * m_tiles * 32 * WARPS * 16
    wanted = 1 + ceil_div((96 << 10) * device.num_multiprocessors, blocks * stage)
    exchange = 0 if slices == 1 else 2 * WARPS * m_tiles * 8 * 20 * 4
    shared_rows = (rows.count + 1) * (rows.row_bytes + 64)  # and the norm's weight
    room = device.shared_bytes // (2 if m_tiles == 1 else 1) - 1024 - exchange - shared_rows
    return room // stage >= min(wanted, 3)


def choose_slices(num_rows: int, num_chunks: int, device: Device) -> int:
    """Warps that share 16 rows of a weight."""
    slices = 1
    while (
        slices < WARPS
        and 2 * slices <= num_chunks
        and ceil_div(num_rows, 16 * WARPS // slices) < 2 * device.num_multiprocessors
    ):
        slices *= 2
    return slices


def product(
    kernel: str,
    rows: Rows,
    weight_rows: int,
    weight_bytes: int,
    tiles: int,
    tile_rows: int,
    blocks: int,
    n_tiles: int,
    *,
    made: Made,
    norm_bytes: int = 0,
    reads: Mapping[str, float] | None = None,
    writes: float = 0.0,
    workspace: float = 0.0,
) -> KernelLaunch:
    """A pass over the weight for each group of rows, all of which every tile reads.

    The last tile reads the last row of the weight in place of those that it lacks. L1 keeps rows of
    x from one tile of a block to the next where there is room for them.
    """
    groups = ceil_div(rows.count, 8 * n_tiles)
    read_rows = tiles * tile_rows
    x, norm = rows.count * rows.row_bytes, 0
    readers = blocks if min(rows.count, 8 * n_tiles) * rows.row_bytes <= L1_BYTES else tiles
    if made is Made.IN_BLOCKS:
        x, norm, readers = rows.count * rows.size * rows.dtype.itemsize, norm_bytes, blocks
    workspace += x if made is Made.AHEAD else 0
    return KernelLaunch(
        kernel,
        (blocks, groups),
        {
            "weight": weight_bytes,
            "x": 0 if made is Made.AHEAD else x,
            "norm_weight": norm,
            **(reads or {}),
        },
        repeats={
            "weight": groups * read_rows * weight_bytes / weight_rows - weight_bytes,
            "x": (readers - 1) * x,
            "norm_weight": (blocks - 1) * norm,
        },
        writes=writes,
        workspace=workspace,
        flops=2.0 * groups * 8 * n_tiles * read_rows * rows.size,
    )


def weight_bytes_of(call: Call, rows: int) -> int:
    """Of a matrix of so many rows, with its scales and tables."""
    weight, scale, table = (call[name] for name in ("weight", "weight_scale", "weight_table"))
    if scale is not None or table is not None:
        raise NotImplementedError(f"{call.op}: no plan of quantised weights")
    return rows * weight.shape[-1] * weight.element_size()


def made_rows(
    rows: Rows,
    x: Tensor,
    norm: Tensor | None,
    m_tiles: int,
    slices: int,
    blocks: int,
    device: Device,
) -> Made:
    if not must_be_made(rows, x, norm):
        return Made.NOWHERE
    in_blocks = blocks_make_rows(rows, m_tiles, slices, blocks, device)
    return Made.IN_BLOCKS if in_blocks else Made.AHEAD


def skinny_linear(call: Call, device: Device, _: Known) -> list[KernelLaunch]:
    x, weight, out = call["x"], call["weight"], call["out"]
    rows = Rows(x.shape[0], x.shape[1], x.dtype)
    out_features = weight.shape[0]
    if rows.count == 0 or out_features == 0:
        return []
    slices = choose_slices(out_features, ceil_div(rows.size, rows.chunk), device)
    n_tiles = rows.tiles(8)

    def tile_rows(m_tiles: int) -> int:
        return 16 * m_tiles * (WARPS // slices)

    is_wide = n_tiles >= 4 or (x.dtype == torch.float32 and n_tiles == 2)
    fills_device = 10 * ceil_div(out_features, tile_rows(2)) >= 9 * device.num_multiprocessors
    m_tiles = 2 if is_wide or fills_device else 1
    tiles = ceil_div(out_features, tile_rows(m_tiles))
    blocks = min(tiles, (2 if m_tiles == 1 else 1) * device.num_multiprocessors)
    made = made_rows(rows, x, call["norm_weight"], m_tiles, slices, blocks, device)
    norm_bytes = call.bytes_of("norm_weight")
    launches = [rms_norm(rows, norm_bytes)] if made is Made.AHEAD else []
    launches.append(
        product(
            "skinny_linear_kernel",
            rows,
            out_features,
            weight_bytes_of(call, out_features),
            tiles,
            tile_rows(m_tiles),
            blocks,
            n_tiles,
            made=made,
            norm_bytes=norm_bytes,
            reads={"bias": call.bytes_of("bias"), "residual": call.bytes_of("residual")},
            writes=nbytes(out),
        )
    )
    return launches


def skinny_gated_linear(call: Call, device: Device, _: Known) -> list[KernelLaunch]:
    x, out = call["x"], call["out"]
    rows = Rows(x.shape[0], x.shape[1], x.dtype)
    inner = out.shape[1]
    if rows.count == 0 or inner == 0:
        return []
    slices = choose_slices(inner, ceil_div(rows.size, rows.chunk), device)
    tiles = ceil_div(inner, 16 * (WARPS // slices))
    blocks = min(tiles, device.num_multiprocessors)
    made = made_rows(rows, x, call["norm_weight"], 2, slices, blocks, device)
    norm_bytes = call.bytes_of("norm_weight")
    launches = [rms_norm(rows, norm_bytes)] if made is Made.AHEAD else []
    launches.append(
        product(
            "skinny_gated_linear_kernel",
            rows,
            2 * inner,
            weight_bytes_of(call, 2 * inner),
            tiles,
            2 * 16 * (WARPS // slices),
            blocks,
            rows.tiles(8),
            made=made,
            norm_bytes=norm_bytes,
            reads={"bias": call.bytes_of("bias")},
            writes=nbytes(out),
        )
    )
    return launches


def exit_confidence_softmax(call: Call, device: Device, _: Known) -> list[KernelLaunch]:
    hidden, head = call["hidden"], call["lm_head"]
    rows = Rows(hidden.shape[0], hidden.shape[1], hidden.dtype)
    if rows.count == 0:
        return []
    launches = []
    made_rows = must_be_made(rows, hidden, call["norm_weight"])
    if made_rows:
        launches.append(rms_norm(rows, call.bytes_of("norm_weight")))
    tiles = ceil_div(head.shape[0], 16 * HEAD_M_TILES * WARPS)
    blocks = min(tiles, device.num_multiprocessors)
    summaries = rows.count * blocks * SUMMARY_BYTES
    launches.append(
        product(
            "exit_confidence_softmax_kernel",
            rows,
            head.shape[0],
            nbytes(head),
            tiles,
            16 * HEAD_M_TILES * WARPS,
            blocks,
            rows.tiles(8),
            made=Made.AHEAD if made_rows else Made.NOWHERE,
            workspace=summaries,
        )
    )
    out = call.bytes_of("confidence", "token", "logsumexp", "top_logit")
    grid = (ceil_div(rows.count, SUMMARY_WARPS), 1)
    launches.append(KernelLaunch("logit_summary_kernel", grid, writes=out, workspace=summaries))
    return launches


def kv_fill(call: Call, device: Device, known: Known) -> list[KernelLaunch]:
    hidden, weight, cache = call["hidden"], call["kv_weight"], call["k_cache"]
    rows = Rows(hidden.shape[0], hidden.shape[1], hidden.dtype)
    num_layers, kv_size = weight.shape[0], weight.shape[1]
    num_heads, head_dim = 2 * cache.shape[3], cache.shape[4]
    if rows.count == 0 or num_layers == 0:
        return []
    exits = known.exit_layers or (0,) * rows.count
    needed = [num_layers - min(max(layer, 0), num_layers) for layer in exits]
    filled, deepest = sum(needed), max(needed)  # pairs of a row and a layer, layers
    item = rows.dtype.itemsize
    row = rows.size * item
    order = KernelLaunch(
        "kv_fill_rows_kernel",
        (rows.count, num_layers),
        {"x": sum(n > 0 for n in needed) * row, "norm_weight": deepest * row},
        repeats={"x": filled * 2 * row, "norm_weight": (filled - deepest) * row},
        workspace=filled * rows.row_bytes,
    )
    # A head is cut into tiles of 16 rows; where a tile has fewer than 8 warps, they share it.
    n_tiles = 1 if rows.dtype == torch.float32 else rows.tiles(4)
    groups = ceil_div(rows.count, 8 * n_tiles)
    blocks = min(num_layers * num_heads, 2 * device.num_multiprocessors)
    weights = deepest * kv_size * row
    passes = sum(
        max(sorted(needed, reverse=True)[group * 8 * n_tiles], 0) for group in range(groups)
    )
    angles = rows.count * call["cos_sin"].shape[1] * 4 if call["cos_sin"] is not None else 0
    fill = KernelLaunch(
        "kv_fill_kernel",
        (blocks, groups),
        {"weight": weights, "cos_sin": angles},
        repeats={
            "weight": (passes - deepest) * kv_size * row,
            "x": filled * rows.row_bytes * (num_heads - 1),
        },
        writes=filled * num_heads * head_dim * cache.element_size(),
        workspace=filled * rows.row_bytes,
        flops=2.0 * passes * 8 * n_tiles * kv_size * rows.size,
    )
    return [order, fill]
