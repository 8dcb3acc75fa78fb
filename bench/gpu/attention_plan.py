"""The launches of paged_attention: the splits of csrc/cuda/paged_attention.cu in short."""

from __future__ import annotations

import torch

from bench.gpu.calls import Call, Known, ceil_div, nbytes
from bench.gpu.devices import Device
from bench.gpu.launches import KernelLaunch
from eecore.models.prompt_attention import MAX_WARPGROUP_HEAD
from eecore.ops.registered import cuda_tuning

WARPS = 4  # of a block
MAX_REPEATED_QUERIES = 32  # queries of a sequence up to which splits have a fixed size
MERGED_SIZE = 4  # elements that a thread merges
MAX_MERGED_BYTES = 16 << 10  # bytes that the last block of a tile merges
MAX_WIDE_HEAD = 128  # head dimension up to which a warp can have two bands of rows
MIN_WARPGROUP_ROWS = 64  # rows of a sequence from which on warpgroups attend
PROMPT_ROWS = 128  # of a tile of warpgroups
STEP_KEYS = 128  # that warpgroups take at a time


def nearly_busy(units: int, resident: int, least: int, most: int) -> int:
    """The fewest blocks of a unit that keep nearly the largest share of resident blocks busy."""
    most = min(most, max(4 * resident // units, 1))
    least = min(least, most)

    def busy(blocks: int) -> float:
        return units * blocks / (ceil_div(units * blocks, resident) * resident)

    best = max(busy(blocks) for blocks in range(least, most + 1))
    return next(n for n in range(least, most + 1) if busy(n) >= 0.95 * best)


def is_for_warpgroups(call: Call, device: Device) -> bool:
    """Whether warpgroups attend to the call; its tensors are taken to be aligned."""
    q, cache = call["q"], call["k_cache"]
    queries = ceil_div(q.shape[0], call["page_table"].shape[0])
    page_size = cache.shape[1]
    return (
        bool(cuda_tuning()["wgmma_attention"])
        and device.capability == 90
        and q.element_size() == 2
        and call["position_bias"] is None
        and q.shape[2] <= MAX_WARPGROUP_HEAD
        and queries * q.shape[1] // cache.shape[2] >= MIN_WARPGROUP_ROWS
        and (call["fixed_split_size"] == 0 or queries > MAX_REPEATED_QUERIES)
        and page_size % 8 == 0
        and (page_size % STEP_KEYS == 0 or STEP_KEYS % page_size == 0)
    )


def by_warpgroups(call: Call, known: Known) -> KernelLaunch:
    """The launch of the kernel for many queries."""
    q, cache, table = call["q"], call["k_cache"], call["page_table"]
    num_seqs, num_kv_heads, head_dim = table.shape[0], cache.shape[2], q.shape[2]
    group = q.shape[1] // num_kv_heads
    queries = ceil_div(q.shape[0], num_seqs)
    max_keys = table.shape[1] * cache.shape[1]
    keys = min(known.seq_len or max_keys, max_keys)
    window, first = call["sliding_window"], keys - queries
    tiles = ceil_div(queries * group, PROMPT_ROWS)
    steps = 0  # of all tiles of a sequence
    for tile in range(tiles):
        last = min((tile + 1) * PROMPT_ROWS, queries * group) - 1
        end = first + last // group + 1 if call["causal"] else keys
        begin = max(first + tile * PROMPT_ROWS // group + 1 - window, 0) if window > 0 else 0
        steps += ceil_div(end - begin // STEP_KEYS * STEP_KEYS, STEP_KEYS)
    used = min(keys, window + queries - 1) if window > 0 else keys
    of_key = 2 * num_seqs * num_kv_heads * head_dim * cache.element_size()
    width = 64 if head_dim <= 64 else 128
    return KernelLaunch(
        "paged_attention_prompt_kernel",
        ((q.shape[0] * group // PROMPT_ROWS + num_seqs) * num_kv_heads, 1),
        {
            "k_cache, v_cache": of_key * used,
            "q": nbytes(q),
            "page_table": num_seqs * ceil_div(keys, cache.shape[1]) * 4,
        },
        repeats={"k_cache, v_cache": of_key * max(steps * STEP_KEYS - used, 0)},
        writes=nbytes(q),
        flops=4.0 * num_seqs * num_kv_heads * steps * STEP_KEYS * PROMPT_ROWS * width,
    )


def paged_attention(call: Call, device: Device, known: Known) -> list[KernelLaunch]:
    launches = by_warps(call, device, known)
    if not launches or not is_for_warpgroups(call, device):
        return launches
    # Sequences of few queries, which are the other kernels' under fixed splits, are taken to be
    # missing.
    may_have_few = call["fixed_split_size"] > 0 and call["page_table"].shape[0] > 1
    idle = [KernelLaunch(each.kernel, each.grid, at_work=0) for each in launches]
    return [by_warpgroups(call, known), *(idle if may_have_few else [])]


def by_warps(call: Call, device: Device, known: Known) -> list[KernelLaunch]:
    """The launches of the kernels whose warps attend one by one."""
    q, cache, table = call["q"], call["k_cache"], call["page_table"]
    num_tokens, num_q_heads, head_dim = q.shape
    num_seqs, num_kv_heads = table.shape[0], cache.shape[2]
    if num_tokens == 0 or num_seqs == 0:
        return []
    item, group = q.element_size(), num_q_heads // num_kv_heads
    max_keys = table.shape[1] * cache.shape[1]
    keys = min(known.seq_len or max_keys, max_keys)
    warp_rows = 4 if q.dtype == torch.float32 else 16
    tile_rows = WARPS * warp_rows

    # Sizes of each sequence, if all have equally many queries.
    queries = ceil_div(num_tokens, num_seqs)
    rows = queries * group
    name = "paged_attention_kernel"
    if cache.dtype == torch.float8_e4m3fn:
        name = "paged_attention_float8_kernel"
    if (
        item == 2
        and head_dim <= MAX_WIDE_HEAD
        and call["position_bias"] is None
        and rows > warp_rows
        and queries <= MAX_REPEATED_QUERIES
        and call["fixed_split_size"] > 0
        and cuda_tuning()["wide_attention"]
    ):
        name = "paged_attention_wide_kernel"
        warp_rows *= 2
    tiles = ceil_div(rows, tile_rows)
    team_rows = min(rows, tile_rows)
    team_warps = 1 if team_rows <= warp_rows else 2 if team_rows <= 2 * warp_rows else 4
    units = tiles * min(num_seqs, num_tokens) * num_kv_heads
    resident = 2 * device.num_multiprocessors
    all_rows = num_tokens * num_q_heads * (head_dim + 2) * 4  # bytes of one result of each row

    def spans_of(keys: int) -> int:
        return max(ceil_div(keys, WARPS * split), 1)

    split = call["fixed_split_size"]
    partials = places = 0  # partial results of each row: written, and allocated
    so_far = 0.0  # times that a block stores its rows and loads them again
    if split == 0:
        most = min(max(max_keys // 512, 1), 256)
        blocks = nearly_busy(units, resident, max(ceil_div(max_keys, 16384), 1), most)
        spans = blocks
        partials = places = blocks if blocks > 1 else 0
    else:
        spans, places = spans_of(keys), spans_of(max_keys)
        is_busy = units / (ceil_div(units, resident) * resident) >= 0.8
        blocks = 1
        if not is_busy and places * all_rows <= 256 << 20:
            blocks = nearly_busy(units, resident, 1, min(places, 256))
        partials = spans if blocks > 1 else 0
        rounds = spans * team_warps if queries <= MAX_REPEATED_QUERIES else 1
        so_far = rounds - (spans if blocks > 1 else 1)

    # Keys that the queries of a sequence see together, and that one query sees on average.
    window = call["sliding_window"]
    used = min(keys, window + queries - 1) if window > 0 else keys
    seen = used - ((queries - 1) / 2 if call["causal"] else 0)
    kv = 2 * num_seqs * used * num_kv_heads * head_dim * cache.element_size()
    out = num_tokens * num_q_heads * head_dim * item
    partial = partials * all_rows
    padded = ceil_div(rows, warp_rows) * warp_rows
    bound = num_tokens * group // tile_rows + num_seqs  # tiles that any lengths have
    arrivals = call["arrivals"]
    is_wide = q.dtype == torch.float32 and call["position_bias"] is not None
    can_merge = not is_wide and arrivals is not None and bound * num_kv_heads <= arrivals.shape[0]
    merged_bytes = min(rows, tile_rows) * places * head_dim * 4
    combines = blocks > 1 and not (can_merge and merged_bytes <= MAX_MERGED_BYTES)
    merges = blocks > 1 and not combines
    launches = [
        KernelLaunch(
            name,
            (bound * num_kv_heads, blocks),
            {
                "k_cache, v_cache": kv,
                "q": nbytes(q),
                "page_table": num_seqs * ceil_div(keys, cache.shape[1]) * 4,
                "position_bias": call.bytes_of("position_bias"),
            },
            # Each tile reads what its rows see, each block its queries.
            repeats={
                "k_cache, v_cache": (tiles - 1) * kv * seen / max(used, 1),
                "q": (min(blocks, spans) - 1) * nbytes(q),
                "so far": 2 * so_far * all_rows,
            },
            writes=0 if combines else out,
            # The last block of each tile, or the next kernel, reads the other blocks' results.
            workspace=partial,
            last_blocks=units if merges else 0,
            last_bytes=partial if merges else 0.0,
            flops=4.0 * num_seqs * num_kv_heads * padded * seen * head_dim,
        )
    ]
    if combines:
        grid = (num_tokens, ceil_div(num_q_heads * head_dim // MERGED_SIZE, 32))
        combine = "paged_attention_combine_kernel"
        launches.append(KernelLaunch(combine, grid, writes=out, workspace=partial))
    return launches
