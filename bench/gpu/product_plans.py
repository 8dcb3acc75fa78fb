"""The launches of ops with one pass over a weight: csrc/cuda/skinny_launch.cuh in short."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch
from torch import Tensor

from bench.gpu.calls import Call, Known, ceil_div, nbytes
from bench.gpu.devices import Device
from bench.gpu.launches import KernelLaunch
from eecore.ops.registered import cuda_tuning

WARPS = 8  # of a block
HEAD_M_TILES = 2
HEAD_TILES = 4  # tiles of 8 rows in a pass over the head
HEAD_TILE_ROWS = 16 * HEAD_M_TILES  # rows of the head for a warp
MANY_ROWS = 96  # rows in a pass over the head whose blocks share rows
MANY_STAGE_BYTES = MANY_ROWS * 192  # of the shared rows
MANY_STAGES = 3  # the fewest stages that pay
SUMMARY_WARPS = 4
SUMMARY_BYTES = 16
FEW_ROWS = 8
L1_BYTES = 64 << 10  # free beside the ring of a weight, about
MAX_FILL_SLICES = 4
MANY_ROWS_LATENCY = 1.2e-6  # seconds of a block that makes more than a few rows ready
MAX_ROWS_IN_BLOCKS = 32  # 16-bit rows that a block makes ready or whose heads it appends
STAGE_BYTES = 32 * WARPS * 64  # 16 rows of a weight for each warp
PACKED_STAGE_BYTES = WARPS * 4 * 608  # slots of 4 blocks for each warp
PACKED_CHUNK, BLOCK_COLUMNS = 128, 32
WARPGROUP_ROWS, MAX_WARPGROUP_SLICES, MAX_WARPGROUP_CLUSTER = 64, 2, 4
WIDE_TILES = 16  # tiles of 8 rows in a pass by warpgroups for more than 64 rows
CLUSTER_LATENCY = 1.0e-6  # seconds of two barriers of a cluster and a read between; an assumption


@dataclass(frozen=True)
class Rows:
    """Rows of x as a product reads them.

    Args:
        count: the number of rows.
        size: elements of a row.
        dtype: the dtype of the elements.
        packed: whether the weight is packed.
    """

    count: int
    size: int
    dtype: torch.dtype
    packed: bool = False

    @property
    def chunk(self) -> int:
        """Elements of a row that a warp takes at a time."""
        return PACKED_CHUNK if self.packed else 128 // self.dtype.itemsize

    @property
    def num_chunks(self) -> int:
        return ceil_div(self.size, self.chunk)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, with the padding of its last chunk or block of a packed weight."""
        step = BLOCK_COLUMNS if self.packed else self.chunk
        return ceil_div(self.size, step) * step * self.dtype.itemsize

    def tiles(self, most: int) -> int:
        """Tiles of 8 rows that a pass over the weight takes, at most ``most``."""
        if self.count <= 8:
            return 1
        if self.count <= 16 or self.dtype == torch.float32 or most == 2:
            return 2
        return 4 if self.count <= 32 or most == 4 else most


def rms_norm(rows: Rows, norm_bytes: int) -> KernelLaunch:
    """The kernel that makes rows ready in the workspace; each block reads the norm's weight."""
    return KernelLaunch(
        "rms_norm_kernel",
        (rows.count, 1),
        {"x": rows.count * rows.size * rows.dtype.itemsize, "norm_weight": norm_bytes},
        repeats={"norm_weight": (rows.count - 1) * norm_bytes},
        workspace=rows.count * rows.row_bytes,
    )


class Made(Enum):
    """Where rows of x are made ready for a product, if it cannot read x directly."""

    NOWHERE = auto()
    AHEAD = auto()
    IN_BLOCKS = auto()


def must_be_made(rows: Rows, x: Tensor, norm: Tensor | None) -> bool:
    """Whether a product cannot read x directly."""
    return (
        norm is not None
        or rows.row_bytes != rows.size * rows.dtype.itemsize
        or x.stride(0) * rows.dtype.itemsize % 16 != 0
    )


def blocks_make_rows(
    rows: Rows, m_tiles: int, slices: int, blocks: int, device: Device, own_bytes: int
) -> bool:
    """Whether shared memory has room for the rows and for enough stages of the weight."""
    if rows.count > (FEW_ROWS if rows.packed else most_in_blocks(rows)):
        return False
    stage = m_tiles * (PACKED_STAGE_BYTES if rows.packed else STAGE_BYTES)
    wanted = 1 + ceil_div((96 << 10) * device.num_multiprocessors, blocks * stage)
    exchange = own_bytes + (0 if slices == 1 else 2 * WARPS * m_tiles * 8 * 20 * 4)
    gap = 16 if rows.packed and rows.dtype == torch.float32 else 64
    row = rows.num_chunks * rows.chunk * rows.dtype.itemsize + gap
    shared_rows = (rows.count + 1) * row  # and the norm's weight
    room = device.shared_bytes // (2 if m_tiles == 1 else 1) - 1024 - exchange - shared_rows
    return room // stage >= min(wanted, 3 if rows.count <= FEW_ROWS else 2)


def most_in_blocks(rows: Rows) -> int:
    """The largest number of rows that blocks make ready or append, for an unpacked weight."""
    return FEW_ROWS if rows.dtype == torch.float32 else MAX_ROWS_IN_BLOCKS


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
    side_by_side: int = 1,
    cluster: int = 1,
    norm_bytes: int = 0,
    reads: Mapping[str, float] | None = None,
    writes: float = 0.0,
    workspace: float = 0.0,
) -> KernelLaunch:
    """The kernel with a pass over the weight for each group of rows; every tile reads the group.

    The last tile reads the weight's last row in place of missing rows. L1 keeps rows of x from one
    tile of a block to the next if they fit, and for tiles that are multiplied side by side. Each of
    the blocks of a cluster reads its share of the rows of x.
    """
    groups = ceil_div(rows.count, 8 * n_tiles)
    read_rows = tiles * tile_rows
    x, norm = rows.count * rows.row_bytes, 0
    readers = (
        blocks
        if min(rows.count, 8 * n_tiles) * rows.row_bytes <= L1_BYTES
        else ceil_div(tiles, side_by_side)
    )
    if made is Made.IN_BLOCKS:
        x, norm, readers = rows.count * rows.size * rows.dtype.itemsize, norm_bytes, blocks
    readers = ceil_div(readers, cluster)
    workspace += x if made is Made.AHEAD else 0
    latency = CLUSTER_LATENCY if cluster > 1 else 0.0
    if made is Made.IN_BLOCKS and rows.count > FEW_ROWS:
        latency += MANY_ROWS_LATENCY
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
        latency=latency,
    )


def has_warpgroups(rows: Rows, device: Device) -> bool:
    """Whether a setting has warpgroups multiply where they can."""
    is_asked = bool(cuda_tuning()["wgmma"])
    return is_asked and device.capability == 90 and rows.dtype.itemsize == 2


def warpgroup_cluster(rows: Rows, weight_rows: int, device: Device) -> int:
    """Blocks that share a tile of the weight if warpgroups multiply it, or 0."""
    if not has_warpgroups(rows, device):
        return 0
    tiles, cluster = ceil_div(weight_rows, WARPGROUP_ROWS), 1
    while 10 * cluster * tiles < 9 * device.num_multiprocessors:
        cluster *= 2
        if cluster > min(MAX_WARPGROUP_CLUSTER, rows.num_chunks // MAX_WARPGROUP_SLICES):
            return 0
    return cluster


def by_warpgroups(
    kernel: str,
    call: Call,
    rows: Rows,
    m_tiles: int,
    cluster: int,
    device: Device,
    reads: Mapping[str, float],
    cached: float = 0.0,
) -> list[KernelLaunch]:
    """A product of ``m_tiles`` times as many rows of a weight as ``out`` has columns.

    ``cached``: bytes that its blocks append.
    """
    weight_rows = call["out"].shape[1]
    n_tiles = WIDE_TILES if is_wide(rows) else rows.tiles(8)
    groups = ceil_div(rows.count, 8 * n_tiles)
    slices = min(choose_slices(weight_rows, rows.num_chunks, device), MAX_WARPGROUP_SLICES)
    tile_rows = WARPGROUP_ROWS if cluster > 1 else 16 * (WARPS // slices)
    tiles = ceil_div(weight_rows, tile_rows)
    is_alone = m_tiles == 2 or rows.packed or is_wide(rows)
    resident = (1 if is_alone else 2) * device.num_multiprocessors
    clusters = tiles if cluster > 1 else min(tiles, max(resident // groups, 1))
    must = must_be_made(rows, call["x"], call["norm_weight"])
    launch = product(
        kernel,
        rows,
        m_tiles * weight_rows,
        weight_bytes_of(call, m_tiles * weight_rows),
        tiles,
        m_tiles * tile_rows,
        cluster * clusters,
        n_tiles,
        made=Made.AHEAD if must else Made.NOWHERE,
        cluster=cluster,
        reads=reads,
        writes=nbytes(call["out"]) + cached,
    )
    launch = replace(launch, grid=(groups * cluster, clusters))
    return [rms_norm(rows, call.bytes_of("norm_weight")), launch] if must else [launch]


def is_wide(rows: Rows) -> bool:
    """Whether a pass by warpgroups has more than 64 rows."""
    return rows.count > 64 and not rows.packed


def weight_bytes_of(call: Call, rows: int) -> int:
    """Bytes of a matrix of ``rows`` rows; all bytes of a packed one."""
    weight, scale, table = (call[name] for name in ("weight", "weight_scale", "weight_table"))
    if scale is not None:
        raise NotImplementedError(f"{call.op}: no plan of int8 weights")
    if table is not None:
        return nbytes(weight)
    return rows * weight.shape[-1] * weight.element_size()


def made_rows(
    rows: Rows,
    x: Tensor,
    norm: Tensor | None,
    m_tiles: int,
    slices: int,
    blocks: int,
    device: Device,
    own_bytes: int = 0,
) -> Made:
    if not must_be_made(rows, x, norm):
        return Made.NOWHERE
    in_blocks = blocks_make_rows(rows, m_tiles, slices, blocks, device, own_bytes)
    return Made.IN_BLOCKS if in_blocks else Made.AHEAD


def append_kv(call: Call, _: Device, __: Known) -> list[KernelLaunch]:
    heads = call["q"].shape[1] if call["q"] is not None else 0
    k = call["k"]
    return [append_launch(call, *k.shape[:2], heads, k.element_size())]


def append_launch(
    call: Call, num_tokens: int, num_kv_heads: int, num_q_heads: int, item: int
) -> KernelLaunch:
    """append_kv as a kernel of its own, for heads of ``item`` bytes a number."""
    cache, cos_sin = call["k_cache"], call["cos_sin"]
    head_dim, is_float8 = cache.shape[3], cache.dtype == torch.float8_e4m3fn
    rotary = 0 if cos_sin is None else cos_sin.shape[1]
    pack = 16 // item
    rest = ceil_div(ceil_div(head_dim - rotary, 2), pack)
    items = ceil_div(rotary // 2, pack) + rest
    lanes = 4
    while lanes < 32 and lanes < items:
        lanes *= 2
    heads = num_q_heads + 2 * num_kv_heads
    moved = num_tokens * heads * head_dim * item
    reads = {
        "q, k, v": moved,
        "weights": call.bytes_of("q_norm_weight", "k_norm_weight"),
        **append_reads(call, num_tokens),
    }
    grid = (num_tokens, ceil_div(heads, 128 // lanes))
    narrower = num_tokens * 2 * num_kv_heads * head_dim * (item - cache.element_size())
    name = "append_kv_float8_kernel" if is_float8 else "append_kv_kernel"
    return KernelLaunch(name, grid, reads, writes=moved - narrower)


def append_reads(call: Call, num_tokens: int) -> dict[str, float]:
    """Bytes of the rotary angles and of the slots."""
    cos_sin = call["cos_sin"]
    return {
        "cos_sin": 0 if cos_sin is None else num_tokens * cos_sin.shape[1] * 4,
        "slots": call.bytes_of("slot_mapping", "positions"),
    }


def blocks_append(call: Call, rows: Rows, most_rows: int) -> bool:
    """Whether the product's blocks also append up to ``most_rows``, so that no kernel follows."""
    cos_sin = call["cos_sin"]
    return (
        rows.count <= most_rows
        and not rows.packed
        and call["k_cache"].dtype == rows.dtype
        and call["q_norm_weight"] is None
        and call["k_norm_weight"] is None
        and call["k_cache"].shape[3] % 16 == 0
        and (cos_sin is None or cos_sin.shape[1] % 16 == 0)
    )


def skinny_linear(call: Call, device: Device, _: Known) -> list[KernelLaunch]:
    x, out = call["x"], call["out"]
    rows = Rows(x.shape[0], x.shape[1], x.dtype, call["weight_table"] is not None)
    out_features = out.shape[1]
    if rows.count == 0 or out_features == 0:
        return []
    appends = call["slot_mapping"] is not None
    _, _, kv_heads, head_dim = call["k_cache"].shape if appends else (0, 0, 0, 1)
    reads = {"bias": call.bytes_of("bias"), "residual": call.bytes_of("residual")}

    def separate_append() -> KernelLaunch:
        heads = out_features // head_dim - 2 * kv_heads
        return append_launch(call, rows.count, kv_heads, heads, rows.dtype.itemsize)

    cluster = warpgroup_cluster(rows, out_features, device)
    most_rows = rows.count if cluster > 0 else most_in_blocks(rows)
    in_blocks = appends and blocks_append(call, rows, most_rows)
    cached = rows.count * 2 * kv_heads * head_dim * out.element_size() if in_blocks else 0
    if in_blocks:
        reads |= append_reads(call, rows.count)
    if cluster > 0:
        kernel = f"skinny_warpgroup_{'append' if in_blocks else 'linear'}_kernel"
        launches = by_warpgroups(kernel, call, rows, 1, cluster, device, reads, cached)
        return launches if in_blocks or not appends else [*launches, separate_append()]
    slices = choose_slices(out_features, rows.num_chunks, device)
    n_tiles = rows.tiles(8)

    def tile_rows(m_tiles: int) -> int:
        return 16 * m_tiles * (WARPS // slices)

    is_wide = x.dtype == torch.float32 and n_tiles == 2
    fills_device = 10 * ceil_div(out_features, tile_rows(2)) >= 9 * device.num_multiprocessors

    def blocks_of(m_tiles: int) -> int:
        resident = (2 if m_tiles == 1 else 1) * device.num_multiprocessors
        return min(ceil_div(out_features, tile_rows(m_tiles)), resident)

    def made_by(m_tiles: int) -> Made:
        norm = call["norm_weight"]
        return made_rows(rows, x, norm, m_tiles, slices, blocks_of(m_tiles), device)

    has_room = rows.count > FEW_ROWS and (made_by(1), made_by(2)) == (Made.AHEAD, Made.IN_BLOCKS)
    m_tiles = 2 if is_wide or fills_device or has_room else 1
    tiles, blocks, made = (
        ceil_div(out_features, tile_rows(m_tiles)),
        blocks_of(m_tiles),
        made_by(m_tiles),
    )
    norm_bytes = call.bytes_of("norm_weight")
    launches = [rms_norm(rows, norm_bytes)] if made is Made.AHEAD else []
    launches.append(
        product(
            "skinny_append_kernel" if in_blocks else "skinny_linear_kernel",
            rows,
            out_features,
            weight_bytes_of(call, out_features),
            tiles,
            tile_rows(m_tiles),
            blocks,
            n_tiles,
            made=made,
            norm_bytes=norm_bytes,
            reads=reads,
            writes=nbytes(out) + cached,
        )
    )
    if appends and not in_blocks:
        launches.append(separate_append())
    return launches


def skinny_gated_linear(call: Call, device: Device, _: Known) -> list[KernelLaunch]:
    x, out = call["x"], call["out"]
    rows = Rows(x.shape[0], x.shape[1], x.dtype, call["weight_table"] is not None)
    inner = out.shape[1]
    if rows.count == 0 or inner == 0:
        return []
    reads = {"bias": call.bytes_of("bias")}
    cluster = warpgroup_cluster(rows, inner, device)
    if cluster > 0:
        kernel = "skinny_warpgroup_gated_kernel"
        return by_warpgroups(kernel, call, rows, 2, cluster, device, reads)
    slices = choose_slices(inner, rows.num_chunks, device)
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
            reads=reads,
            writes=nbytes(out),
        )
    )
    return launches


def exit_confidence_softmax(call: Call, device: Device, _: Known) -> list[KernelLaunch]:
    hidden, head, table = call["hidden"], call["lm_head"], call["lm_head_table"]
    rows = Rows(hidden.shape[0], hidden.shape[1], hidden.dtype, table is not None)
    vocab_size = (head if table is None else table).shape[0]
    if rows.count == 0:
        return []
    tiles = ceil_div(vocab_size, HEAD_TILE_ROWS)
    blocks = min(ceil_div(vocab_size, HEAD_TILE_ROWS * WARPS), device.num_multiprocessors)
    summaries = rows.count * blocks * SUMMARY_BYTES
    own_bytes = WARPS * 8 * rows.tiles(HEAD_TILES) * SUMMARY_BYTES
    norm_bytes = call.bytes_of("norm_weight")
    by_warpgroups = has_warpgroups(rows, device)
    if by_warpgroups:
        must = must_be_made(rows, hidden, call["norm_weight"])
        made = Made.AHEAD if must else Made.NOWHERE
    else:
        norm = call["norm_weight"]
        made = made_rows(rows, hidden, norm, HEAD_M_TILES, 1, blocks, device, own_bytes)
    launches = [rms_norm(rows, norm_bytes)] if made is Made.AHEAD else []
    if by_warpgroups or is_many(rows, device):
        ready = rows.count * rows.row_bytes
        columns = MANY_ROWS
        if by_warpgroups:
            columns = 8 * (WIDE_TILES if is_wide(rows) else warpgroup_tiles(rows))
        groups = ceil_div(rows.count, columns)
        turns = sum(ceil_div(ceil_div(tiles - block, blocks), WARPS) for block in range(blocks))
        x_rows = rows.count if by_warpgroups else groups * columns
        # Warps without a tile in the last turn only multiply with warpgroups.
        read_tiles = turns * WARPS if by_warpgroups else tiles
        launches.append(
            KernelLaunch(
                f"exit_confidence_softmax_{'warpgroup' if by_warpgroups else 'many'}_kernel",
                (groups, blocks),
                {"weight": nbytes(head), "x": 0 if made is Made.AHEAD else ready},
                repeats={
                    "weight": (groups * read_tiles * HEAD_TILE_ROWS / vocab_size - 1)
                    * nbytes(head),
                    "x": turns * x_rows * rows.row_bytes - ready,
                },
                workspace=summaries + (ready if made is Made.AHEAD else 0),
                flops=2.0 * groups * columns * read_tiles * HEAD_TILE_ROWS * rows.size,
            )
        )
    else:
        launches.append(
            product(
                "exit_confidence_softmax_kernel",
                rows,
                vocab_size,
                nbytes(head),
                tiles,
                HEAD_TILE_ROWS,
                blocks,
                rows.tiles(HEAD_TILES),
                made=made,
                norm_bytes=norm_bytes,
                side_by_side=WARPS,
                workspace=summaries,
            )
        )
    out = call.bytes_of("confidence", "token", "logsumexp", "top_logit")
    grid = (ceil_div(rows.count, SUMMARY_WARPS), 1)
    launches.append(KernelLaunch("logit_summary_kernel", grid, writes=out, workspace=summaries))
    return launches


def warpgroup_tiles(rows: Rows) -> int:
    """Tiles of up to 64 rows, 8 each, in a pass over the head, or over a layer to fill."""
    return 1 if rows.count <= 8 else 4 if rows.count <= 32 else 8


def is_many(rows: Rows, device: Device) -> bool:
    """Whether blocks share rows of x in shared memory, with enough chunks in flight."""
    if rows.count <= 8 * HEAD_TILES or rows.packed or rows.dtype == torch.float32:
        return False
    room = device.shared_bytes - 512 - WARPS * MANY_ROWS * SUMMARY_BYTES
    return room // (HEAD_M_TILES * STAGE_BYTES + MANY_STAGE_BYTES) >= MANY_STAGES


def kv_fill(call: Call, device: Device, known: Known) -> list[KernelLaunch]:
    hidden, weight, cache = call["hidden"], call["kv_weight"], call["k_cache"]
    table = call["kv_table"]
    rows = Rows(hidden.shape[0], hidden.shape[1], hidden.dtype, table is not None)
    num_layers, kv_size = (weight if table is None else table).shape[:2]
    num_heads, head_dim = 2 * cache.shape[3], cache.shape[4]
    if rows.count == 0 or num_layers == 0:
        return []
    exits = known.exit_layers or (0,) * rows.count
    first = call["first_layer"]
    needed = [num_layers - min(max(layer - first, 0), num_layers) for layer in exits]
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
    by_warpgroups = has_warpgroups(rows, device)
    n_tiles = 1 if rows.dtype == torch.float32 else rows.tiles(4)
    if by_warpgroups:
        n_tiles = warpgroup_tiles(rows)
    groups = ceil_div(rows.count, 8 * n_tiles)
    cos_sin = call["cos_sin"]
    rotary = 0 if cos_sin is None else cos_sin.shape[1]
    # Units of work of a layer, and the rows of the weight that they read: some rows, or heads.
    in_pairs = call["k_norm_weight"] is None and head_dim % 16 == 0 and rotary % 16 == 0
    in_pairs = in_pairs and table is None and not by_warpgroups
    m_tiles = 2 if in_pairs and n_tiles > 2 else 1
    units, read_rows = num_heads, kv_size
    if in_pairs:
        slices = choose_slices(kv_size, rows.num_chunks, device)
        slices = min(slices, MAX_FILL_SLICES)
        units = ceil_div(kv_size, 16 * m_tiles * (WARPS // slices))
        read_rows = units * 16 * m_tiles * (WARPS // slices)
    elif by_warpgroups:  # 64 rows at a time in two slices, or 128
        tile = WARPGROUP_ROWS if head_dim <= WARPGROUP_ROWS and rows.num_chunks > 1 else 128
        read_rows = num_heads * ceil_div(head_dim, tile) * tile
    is_alone = m_tiles == 2 or (by_warpgroups and (rows.packed or n_tiles > 4))
    blocks = min(num_layers * units, (1 if is_alone else 2) * device.num_multiprocessors)
    weight_row = row if table is None else nbytes(weight) / (num_layers * kv_size)
    weights = deepest * kv_size * weight_row
    passes = sum(
        max(sorted(needed, reverse=True)[group * 8 * n_tiles], 0) for group in range(groups)
    )
    fill = KernelLaunch(
        f"kv_fill_{'warpgroup_' * by_warpgroups}{'pairs_' * in_pairs}kernel",
        (blocks, groups),
        {"weight": weights, "cos_sin": rows.count * rotary * 4},
        repeats={
            "weight": (passes * read_rows - deepest * kv_size) * weight_row,
            "x": filled * rows.row_bytes * (units - 1),
        },
        writes=filled * num_heads * head_dim * cache.element_size(),
        workspace=filled * rows.row_bytes,
        flops=2.0 * passes * 8 * n_tiles * read_rows * rows.size,
        at_work=groups * min(blocks, deepest * units),
    )
    return [order, fill]
