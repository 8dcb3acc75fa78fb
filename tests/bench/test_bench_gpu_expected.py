"""The model of time: its bytes are those of the calls; contradicting times are reported."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import decode as gpu_decode
from bench.gpu import gpu as gpu_bench
from bench.gpu.calls import Call, Known
from bench.gpu.decode import model_config, weight_bytes
from bench.gpu.devices import GPUS, MAX_RATIO, MIN_RATIO, Gpu, contradicts, known_gpu
from bench.gpu.draft_heads import dflash, eagle3
from bench.gpu.expected import (
    BATCHES,
    MODELS,
    REPORTS,
    cost,
    expected_cases,
    figures,
)
from bench.gpu.launches import (
    FEW_TRIPS,
    LATENCIES,
    IfNode,
    KernelLaunch,
    kernels,
    seconds,
    work_seconds,
)
from bench.gpu.plans import PLANS, plan
from bench.gpu.trace import META, draft_round, iteration, model_without_memory, nodes_of
from cases import CUDA_OPS
from eecore import ops

H100 = GPUS[1]


def read_of(launches: list[KernelLaunch], operand: str, *names: str) -> float:
    """Bytes of an operand that the kernels of these names read."""
    return sum(
        launch.reads.get(operand, 0) for launch in launches if not names or launch.kernel in names
    )


def test_plans_are_of_ops_that_there_are() -> None:
    assert set(PLANS) <= set(CUDA_OPS)


def test_an_op_without_a_plan_is_one_block_that_passes_over_its_tensors() -> None:
    given = {"flags": torch.zeros(9), "count": torch.zeros(1)}
    (launch,) = plan(Call("count_flags", given, frozenset({"count"})), H100)
    assert isinstance(launch, KernelLaunch)
    assert (launch.kernel, launch.grid) == ("count_flags_kernel", (1, 1))
    assert (sum(launch.reads.values()), launch.writes) == (36, 4)


@pytest.mark.parametrize(("name", "batch"), [*itertools.product(MODELS, BATCHES)])
def test_an_iteration_reads_every_weight_once(name: str, batch: int) -> None:
    config = model_config(name)
    launches = kernels(iteration(model_without_memory(config), batch, 160, H100))
    layer, _, head = weight_bytes(config, 2)
    products = (
        "skinny_linear_kernel",
        "skinny_append_kernel",
        "skinny_gated_linear_kernel",
        "exit_confidence_softmax_kernel",
    )
    assert read_of(launches, "weight", *products) == config.num_layers * layer + head
    keys = 2 * batch * 160 * config.num_layers * config.kv_size * 2
    assert read_of(launches, "k_cache, v_cache") == keys


def test_rows_that_leave_read_what_they_fill() -> None:
    config = model_config("1b")
    model = model_without_memory(config)
    layer, kv, head = weight_bytes(config, 2)
    launches = kernels(iteration(model, 8, 160, H100, rows_exit=True, exit_layer=4))
    assert read_of(launches, "weight", "kv_fill_pairs_kernel") == (config.num_layers - 4) * kv
    filled = sum(launch.writes for launch in launches if launch.kernel == "kv_fill_pairs_kernel")
    assert filled == 8 * (config.num_layers - 4) * 2 * config.kv_size * 2
    assert read_of(launches, "weight", "skinny_gated_linear_kernel") < 4 * layer
    # Their tokens are known from the check.
    assert read_of(launches, "weight", "exit_confidence_softmax_kernel") == head
    # A check that no row passes costs a head and fills nothing.
    full = kernels(iteration(model, 8, 160, H100))
    checked = kernels(iteration(model, 8, 160, H100, rows_exit=False, exit_layer=4))
    heads = [read_of(each, "weight", "exit_confidence_softmax_kernel") for each in (full, checked)]
    assert heads == [head, 2 * head]
    assert read_of(checked, "weight", "kv_fill_pairs_kernel") == 0


@pytest.mark.parametrize("drafts", [1, 5])
def test_a_round_reads_the_model_once_and_a_chain_head_for_each_draft(drafts: int) -> None:
    model = model_without_memory(model_config("1b"))
    model.draft_head = eagle3(model)
    launches = kernels(draft_round(model, 1, 160, H100, drafts))
    head = weight_bytes(model.config, 2)[2]
    own = 32000 * model.config.hidden_size * 2
    assert read_of(launches, "weight", "exit_confidence_softmax_kernel") == head + drafts * own


def test_a_round_reads_a_head_that_drafts_a_block_once() -> None:
    model = model_without_memory(model_config("1b"))
    model.draft_head = dflash(model, 7)
    launches = kernels(draft_round(model, 1, 160, H100, 7))
    head = weight_bytes(model.config, 2)[2]
    assert read_of(launches, "weight", "exit_confidence_softmax_kernel") == 2 * head
    gated = 2 * model.config.intermediate_size * model.config.hidden_size * 2
    layers = model.config.num_layers + 5
    assert read_of(launches, "weight", "skinny_gated_linear_kernel") == layers * gated


def test_rows_fill_from_the_layer_each_left_at() -> None:
    weight = torch.empty(6, 2 * 2 * 16, 64, dtype=torch.bfloat16, device=META)
    caches = [torch.empty(6, 4, 16, 2, 16, dtype=torch.bfloat16, device=META) for _ in "kv"]
    slots = torch.empty(3, dtype=torch.int64, device=META)

    def fill() -> None:
        ops.kv_fill(
            torch.empty(3, 64, dtype=torch.bfloat16, device=META),
            torch.empty(3, dtype=torch.int32, device=META),
            torch.empty(6, 64, dtype=torch.bfloat16, device=META),
            ops.Matrix(weight),
            *caches,
            slots,
        )

    def bytes_filled(exit_layers: tuple[int, ...] | None) -> tuple[float, float]:
        launches = kernels(nodes_of(fill, H100, Known(exit_layers=exit_layers)))
        return read_of(launches, "weight", "kv_fill_pairs_kernel"), launches[-1].writes

    layer, row = 64 * 64 * 2, 64 * 2
    assert bytes_filled(None) == (6 * layer, 3 * 6 * row)
    assert bytes_filled((6, 2, 5)) == (4 * layer, (0 + 4 + 1) * row)
    assert bytes_filled((6, 6, 9)) == (0, 0)


MORE = {
    "repeats": {"x": 1e9},
    "writes": 1e8,
    "workspace": 1e9,
    "last_bytes": 1e9,
    "flops": 1e12,
    "reads": {"weight": 1e9},
}


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("what", MORE)
@pytest.mark.parametrize("grid", [(1, 1), (64, 1), (1000, 2)])
def test_more_work_takes_longer(gpu: Gpu, what: str, grid: tuple[int, int]) -> None:
    some = KernelLaunch("skinny_linear_kernel", grid, {"weight": 1e6}, flops=1e6, last_blocks=1)
    more = dataclasses.replace(some, **{what: MORE[what]})
    assert 0 < work_seconds(gpu, some) < work_seconds(gpu, more)
    wider = dataclasses.replace(more, grid=(2 * grid[0], grid[1]))
    assert work_seconds(gpu, wider) <= work_seconds(gpu, more)


def test_memory_bounds_what_is_large() -> None:
    launch = KernelLaunch("skinny_linear_kernel", (132, 1), {"weight": 3.08e9})
    assert work_seconds(H100, launch) == pytest.approx(1e-3)


def test_a_kernel_starts_early_only_after_a_kernel() -> None:
    early = KernelLaunch("rms_norm_kernel", (1, 1))
    late = dataclasses.replace(early, starts_early=False)
    boundary, early_boundary = H100.boundary, H100.early_boundary
    assert early_boundary < boundary
    latency = LATENCIES[early.kernel]
    assert seconds(H100, [early, late]) == pytest.approx(early_boundary + boundary + 2 * latency)
    assert seconds(H100, [IfNode(), early]) == pytest.approx(2 * boundary + latency)
    a100 = GPUS[2]
    assert seconds(a100, [early]) == pytest.approx(a100.boundary + latency)
    own = dataclasses.replace(early, latency=3e-6)
    assert seconds(H100, [own], {}) == pytest.approx(early_boundary + FEW_TRIPS + 3e-6)
    with pytest.raises(ValueError, match="early_boundary: expected at most"):
        dataclasses.replace(H100, early_boundary=1.0)


def test_batches_and_faster_memory_are_in_order() -> None:
    rows = REPORTS[0].read()["iterations"]
    for name in MODELS.values():
        full = [r for r in rows if r["model"] == name and r["mode"] == "full"]
        for gpu in GPUS:
            times = [row["on"][gpu.name]["us"] for row in full]
            assert times == sorted(times)
        assert all(row["on"]["H200"]["us"] < row["on"]["A100-80GB"]["us"] for row in full)


def test_the_committed_figures_are_what_the_model_says() -> None:
    """To be renewed after a change of kernels or launchers by ``python -m bench gpu-expected``."""
    assert figures() == REPORTS[0].read()


def test_gpus_are_known_by_what_torch_calls_them() -> None:
    names = {
        "NVIDIA H200": "H200",
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA A100-SXM4-80GB": "A100-80GB",
        "NVIDIA GeForce RTX 4090": "RTX 4090",
    }
    for device, name in names.items():
        gpu = known_gpu(device)
        assert gpu is not None
        assert gpu.name == name
    assert known_gpu("NVIDIA A100-SXM4-40GB") is None
    assert known_gpu("cpu") is None


def measured_row(microseconds: float) -> dict[str, Any]:
    row = {"op": "skinny_linear", "case": "64 -> 96, B=1", "dtype": "bfloat16", "GB/s": 1.0}
    return row | {"of copy": 0.5, "of read": 0.4, "targets": {}, "microseconds": microseconds}


@pytest.mark.parametrize(
    ("times", "is_finding"), [(1.0, False), (MIN_RATIO - 0.01, True), (MAX_RATIO + 0.01, True)]
)
def test_a_time_that_contradicts_the_model_is_a_finding(times: float, is_finding: bool) -> None:
    expected = expected_cases(H100, torch.bfloat16, tiny=True)["skinny_linear", "64 -> 96, B=1"]
    row = measured_row(times * expected * 1e6)
    gpu_bench.compare(row, expected)
    assert row["finding"] is is_finding is contradicts(row["microseconds"], expected * 1e6)
    about = {"device": "NVIDIA H100", "driver": "", "torch": "", "commit": ""}
    table = gpu_bench.table({**about, "copy": 1.0, "read": 1.0, "matmul": 1.0, "rows": [row]})
    assert f"| {expected * 1e6:.1f} |" in table
    assert ("Findings:" in table) is is_finding


def test_a_step_that_contradicts_the_model_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    config = model_config("135m")
    on_gpu = SimpleNamespace(device=torch.device("cuda"), config=config)
    bench = gpu_decode.Bench(on_gpu, 8, 65, 1)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    shown = REPORTS[0].read()["iterations"]
    for mode in gpu_decode.STEPS:
        (expected,) = (
            row["on"]["H100"]["us"]
            for row in shown
            if (row["model"], row["batch"], row["mode"]) == ("SmolLM2-135M", 8, mode)
        )
        row = {"mode": mode, "way": "captured", "seconds_per_iteration": 2 * expected / 1e6}
        gpu_decode.compare(row, bench)
        assert row["expected_seconds"] == pytest.approx(expected / 1e6, rel=1e-4)
        assert "FINDING" in gpu_decode.note(row)
    failed = {"mode": "full", "way": "captured", "error": "out of memory"}
    gpu_decode.compare(failed, bench)
    assert "finding" not in failed


def test_nothing_is_expected_without_constants() -> None:
    row = measured_row(3.0)
    gpu_bench.compare(row, None)
    assert "expected" not in row
    assert "finding" not in row
    assert expected_cases(H100, torch.float32, tiny=True) == {}


def test_costs_are_counted() -> None:
    launch = KernelLaunch("rms_norm_kernel", (1, 1), {"x": 3}, writes=4)
    counted = cost(H100, [launch, IfNode(), launch])
    assert (counted["kernels"], counted["bytes"]) == (2, 14)
