"""The compiled CUDA kernels: no spills, and registers and shared memory as they are on record."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

import kernel_resources
from kernel_resources import Resources

# Registers that another version of nvcc may give or take.
REGISTER_TOLERANCE = 24

HOW_TO_RECORD = "python scripts/kernel_resources.py --write puts what is built here on record"


@cache
def resources_of(module: Path) -> dict[str, Resources]:
    return kernel_resources.resources_of(module)


@pytest.fixture(scope="module")
def module() -> Path:
    built = kernel_resources.built_module()
    if built is None:
        pytest.skip("eecore._cuda is not built in this checkout")
    return built


def test_no_kernel_spills_or_has_a_stack_frame(module: Path) -> None:
    stacks = {name: kernel.stack for name, kernel in resources_of(module).items() if kernel.stack}
    assert not stacks


def test_registers_and_shared_memory_are_on_record(module: Path) -> None:
    record = json.loads(kernel_resources.RECORD.read_text())
    built = resources_of(module)
    architectures = {name.rpartition(" ")[2] for name in built}
    recorded = {
        name: Resources(**resources)
        for name, resources in record["kernels"].items()
        if name.rpartition(" ")[2] in architectures
    }
    assert set(built) == set(recorded), HOW_TO_RECORD
    same_compiler = kernel_resources.compiler_of(module) == record["compiler"]
    tolerance = 0 if same_compiler else REGISTER_TOLERANCE
    differing = {
        name: (recorded[name], kernel)
        for name, kernel in built.items()
        if abs(kernel.registers - recorded[name].registers) > tolerance
        or kernel.shared != recorded[name].shared
    }
    assert not differing, HOW_TO_RECORD


@pytest.mark.parametrize(("flags", "arch"), [(0x500550, "sm_80"), (0x5A0D5A, "sm_90a")])
def test_a_cubin_without_a_note_says_in_its_header_what_it_is_for(flags: int, arch: str) -> None:
    header = bytes(0x30) + flags.to_bytes(4, "little")
    assert kernel_resources.architecture_of(header, None) == arch


@pytest.mark.parametrize(
    ("demangled", "name"),
    [
        ("eecore::cuda::a_kernel(eecore::AParams)", "a_kernel"),
        (
            "void eecore::cuda::b_kernel<eecore::cuda::BFloat16, 8>(eecore::BParams, long)",
            "b_kernel<BFloat16, 8>",
        ),
        ("void eecore::cuda::c_kernel<float, (bool)1, (int)-2>(int)", "c_kernel<float, 1, -2>"),
    ],
)
def test_names_are_shortened_to_kernel_and_arguments(demangled: str, name: str) -> None:
    assert kernel_resources.shortened(demangled) == name
