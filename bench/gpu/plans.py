"""The launches of an op on CUDA, from its arguments' shapes: the launchers of csrc/cuda in short.

A grid depends on the number of multiprocessors, and the kernel that makes rows ready on shared
memory.
Values on the device are not read: a call is assumed to use the full sizes of its tensors, unless
``Known`` has other values. The tests compare grids and bytes with the counts of the emulator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from bench.gpu.attention_plan import paged_attention
from bench.gpu.calls import Call, Known, Plan, ceil_div, nbytes
from bench.gpu.devices import Device
from bench.gpu.launches import KernelLaunch
from bench.gpu.product_plans import (
    append_kv,
    exit_confidence_softmax,
    kv_fill,
    skinny_gated_linear,
    skinny_linear,
)
from bench.gpu.sample_plan import sample_tokens

MLP_UNITS, MLP_MAX_ROWS, MLP_FINISH_ROWS = 4, 8, 8


def embed_tokens(call: Call, _: Device, __: Known) -> list[KernelLaunch]:
    out = nbytes(call["out"])
    reads = {"weight": out, "token_ids": call.bytes_of("token_ids", "sources")}
    if call["scale"] is not None or call["table"] is not None:
        raise NotImplementedError(f"{call.op}: no plan of quantised weights")
    return [KernelLaunch("embed_tokens_kernel", (call["out"].shape[0], 1), reads, writes=out)]


def exit_confidence_mlp(call: Call, _: Device, __: Known) -> list[KernelLaunch]:
    hidden, weight1, weight2 = call["hidden"], call["weight1"], call["weight2"]
    num_seqs, accepts = hidden.shape[0], call["num_survivors"] is not None
    inner, size = weight1.shape[0], weight1.shape[0]
    if weight2 is not None and inner * hidden.shape[1] * 4 > 256 << 10:
        size = ceil_div(ceil_div(inner, MLP_UNITS), 512) * MLP_UNITS
    slices = ceil_div(inner, size)
    in_one_block = accepts and 1 <= num_seqs <= (MLP_MAX_ROWS if slices == 1 else 32)
    one_by_one = num_seqs == 1 or (weight2 is None and not (in_one_block and slices == 1))
    tiles = ceil_div(num_seqs, 1 if one_by_one else MLP_MAX_ROWS)
    weights = call.bytes_of("weight1", "bias1", "weight2", "bias2")
    parts = 0 if slices == 1 else slices * num_seqs * 8
    out = call.bytes_of("confidence")
    launches = [
        KernelLaunch(
            "exit_confidence_mlp_kernel",
            (tiles, slices),
            {"hidden": nbytes(hidden), "weight": weights},
            repeats={
                "weight": (tiles - 1) * weights,
                "hidden": (slices - 1) * nbytes(hidden),
            },
            writes=0 if parts else out,
            workspace=parts,
        )
    ]
    if slices > 1:
        grid = (ceil_div(num_seqs, num_seqs if in_one_block else MLP_FINISH_ROWS), 1)
        name = "exit_confidence_mlp_finish_kernel"
        launches.append(KernelLaunch(name, grid, writes=out, workspace=parts))
    if accepts and not in_one_block:
        launches.append(_accept_mask(call))
    return launches


def _accept_mask(call: Call) -> KernelLaunch:
    names = ("confidence", "thresholds", "status", "exit_layer")
    written = ("status", "exit_layer", "survivors", "num_survivors", "all_accepted")
    reads = {"rows": call.bytes_of(*names)}
    return KernelLaunch("accept_mask_kernel", (1, 1), reads, writes=call.bytes_of(*written))


def exit_confidence_cosine(call: Call, _: Device, __: Known) -> list[KernelLaunch]:
    num_seqs, accepts = call["hidden"].shape[0], call["num_survivors"] is not None
    rows = num_seqs if accepts and 1 <= num_seqs <= 8 else 1
    reads = {"states": call.bytes_of("hidden", "previous")}
    name, out = "exit_confidence_cosine_kernel", call.bytes_of("confidence")
    launches = [KernelLaunch(name, (ceil_div(num_seqs, rows), 1), reads, writes=out)]
    if accepts and rows == 1:
        launches.append(_accept_mask(call))
    return launches


MEASURED = frozenset({"confidence", "token", "logsumexp", "top_logit"})
MEASURED_WITH = frozenset(
    {"previous", "weight1", "bias1", "weight2", "bias2", "norm_weight", "lm_head"}
    | {"lm_head_scale", "lm_head_table"}
)
"""Inputs of the confidence measures within a call of another op."""
EXITING_ROWS = 32  # rows that one block can exit after another kernel measured them
EXITING_STATES = 8  # rows that one block can measure and exit by itself


def _measuring(call: Call, device: Device, known: Known) -> list[KernelLaunch]:
    """The kernels by which a call of another op first measures confidence."""
    for name, op in (("lm_head", "softmax"), ("previous", "cosine"), ("weight1", "mlp")):
        if call.arguments.get(name) is not None:
            given = {"num_survivors": None, **call.arguments}
            measuring = Call(f"exit_confidence_{op}", given, call.written)
            return plan(measuring, device, known)
    return []


def _going_on(last: KernelLaunch, after: KernelLaunch, grid: tuple[int, int]) -> KernelLaunch:
    """A kernel that also does the work of the kernel after it."""
    reads = {**last.reads, **{f"{name}, after": n for name, n in after.reads.items()}}
    return replace(last, grid=grid, reads=reads, writes=last.writes + after.writes)


def exit_rows(call: Call, device: Device, known: Known) -> list[KernelLaunch]:
    """The kernels if every row exits, with its state."""
    launches = _measuring(call, device, known)
    rows = {
        name: nbytes(x)
        for name, x in call.arguments.items()
        if isinstance(x, Tensor) and name not in MEASURED_WITH
    }
    states = rows.pop("hidden"), rows.pop("final_hidden")
    written = sum(size for name, size in rows.items() if name in call.written - MEASURED)
    reads = {"hidden": states[0], "rows": sum(rows.values())}
    own = KernelLaunch("exit_rows_kernel", (1, 1), reads, writes=states[0] + written)
    most = EXITING_ROWS if len(launches) > 1 else EXITING_STATES
    if not launches or call["hidden"].shape[0] > most:
        return [*launches, own]
    return [*launches[:-1], _going_on(launches[-1], own, (1, 1))]


def place_head(call: Call, device: Device, known: Known) -> list[KernelLaunch]:
    launches = _measuring(call, device, known)
    if known.tokens_known and call["kind"] is not None and launches:
        # Its blocks read only the kinds of rows.
        kinds = {"kind": call.bytes_of("kind")}
        product, summary = (KernelLaunch(each.kernel, each.grid, kinds) for each in launches[-2:])
        return [*launches[:-2], product, summary]
    left_out = MEASURED_WITH | {"hidden"}
    placed = {name: x for name, x in call.arguments.items() if name not in left_out}
    placing = Call(call.op, placed, call.written - MEASURED)
    blocks = ceil_div(call["token"].shape[0], 128)
    own = one_pass(lambda _: blocks)(placing, device, known)
    if not launches:
        return own
    return [*launches[:-1], _going_on(launches[-1], own[0], launches[-1].grid)]


def one_pass(
    blocks: Callable[[Call], int],
    kernel: str | None = None,
    *,
    parts: Mapping[str, str] | None = None,
) -> Plan:
    """The plan of one kernel that reads all its tensors and writes those that it changes.

    ``parts``: tensors of which it only accesses as many bytes as the given other tensor has.
    """
    sizes_of = parts or {}

    def plan(call: Call, _: Device, __: Known) -> list[KernelLaunch]:
        sizes = {
            name: call.bytes_of(sizes_of.get(name, name))
            for name, value in call.arguments.items()
            if isinstance(value, Tensor)
        }
        reads = {name: size for name, size in sizes.items() if name not in call.written}
        writes = sum(size for name, size in sizes.items() if name in call.written)
        name = kernel or f"{call.op}_kernel"
        return [KernelLaunch(name, (blocks(call), 1), reads, writes=writes)]

    return plan


def greedy_or_sampled(call: Call, device: Device, known: Known) -> list[KernelLaunch]:
    """The plan with a warp for each greedy sequence and a block for each sampling sequence."""
    num_seqs = call["draft_start_loc"].shape[0] - 1
    if call["target_tokens"] is not None:
        made = one_pass(lambda _: ceil_div(num_seqs, 4), "speculative_accept_greedy_kernel")
    else:
        made = one_pass(lambda _: num_seqs, "speculative_accept_sampling_kernel")
    return made(call, device, known)


def share_kv(call: Call, _: Device, known: Known) -> list[KernelLaunch]:
    """A kernel with a block for each row and layer; the blocks of skipped layers copy."""
    exits, cache = call["exit_layer"], call["k_cache"]
    rows, layers, loop = len(exits), len(cache), call["loop_layers"]
    if not rows or not layers:
        return []
    row = cache.shape[3] * cache.shape[4] * cache.element_size()
    sources, copies = set(), 0
    for number, layer in enumerate(known.exit_layers or (0,) * rows):
        for skipped in range(layer, layers):
            first = layers if call["from_last"] else layer
            source = range(skipped % loop, first, loop)[-1:]
            if source and source[0] != skipped:
                copies += 1
                sources.add((number, source[0]))
    reads = {"k_cache": len(sources) * row, "v_cache": len(sources) * row}
    repeats = {name: copies * row - size for name, size in reads.items()}
    launch = KernelLaunch("share_kv_kernel", (rows, layers), reads, repeats=repeats)
    return [replace(launch, writes=2 * copies * row)]


ONE_BLOCK = one_pass(lambda _: 1)
"""The plan of ops that have no plan of their own."""

PLANS: dict[str, Plan] = {
    "add_normed": one_pass(lambda call: call["x"].shape[0]),
    "accept_round": one_pass(lambda call: call["num_drafted"].shape[0]),
    "append_drafts": one_pass(
        lambda call: 1 + (0 if call["hidden"] is None else call["hidden"].shape[0]),
        parts={"states": "hidden"},
    ),
    "append_kv": append_kv,
    "embed_tokens": embed_tokens,
    "exit_confidence_cosine": exit_confidence_cosine,
    "exit_confidence_mlp": exit_confidence_mlp,
    "exit_confidence_softmax": exit_confidence_softmax,
    "exit_rows": exit_rows,
    "gather_states": one_pass(lambda call: call["out"].shape[0], parts={"states": "out"}),
    "kv_fill": kv_fill,
    "paged_attention": paged_attention,
    "place_head": place_head,
    "sample_tokens": sample_tokens,
    "share_kv": share_kv,
    "skinny_gated_linear": skinny_gated_linear,
    "skinny_linear": skinny_linear,
    "speculative_accept": greedy_or_sampled,
}


def plan(call: Call, device: Device, known: Known | None = None) -> list[KernelLaunch]:
    """The kernels of a call.

    Raises:
        NotImplementedError: the op or its arguments have no plan.
    """
    return PLANS.get(call.op, ONE_BLOCK)(call, device, known or Known())
