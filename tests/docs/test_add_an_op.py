"""The code of docs/extending/add-an-op.md compiles, in the files that the page names."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import random_calls
import test_house
from bench.gpu import case

ROOT = test_house.ROOT
PAGE = ROOT / "docs" / "extending" / "add-an-op.md"
NAMES = (
    "params",
    "boundary",
    "cpu",
    "kernel",
    "launch",
    "wrapper",
    "tests",
    "bench",
)


def code() -> dict[str, str]:
    """The blocks of C++ and Python of the page, in its order."""
    found = re.findall(r"^```(?:cpp|python)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return dict(zip(NAMES, found, strict=True))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the C++ sources in which the page was followed."""
    folder = tmp_path_factory.mktemp("op")
    for name in ("csrc", "include", "tests/emulator"):
        shutil.copytree(ROOT / name, folder / name)
    shown = code()

    def edit(name: str, change: Callable[[str], str]) -> None:
        before = (folder / name).read_text()
        after = change(before)
        assert after != before, name
        (folder / name).write_text(after)

    struct, _, line = shown["params"].partition("\n  X(")
    end, opening = "\n}  // namespace eecore\n", "#define EECORE_FOR_EACH_OP(X) \\\n"
    edit("include/eecore/params.h", lambda text: text.replace(end, f"\n{struct}{end}"))
    edit("include/eecore/params.h", lambda text: text.replace(opening, f"{opening}  X({line}"))
    for name in ("ops", "cpu"):
        block = shown["boundary" if name == "ops" else name]
        (folder / "csrc" / name / "count_flags.cpp").write_text(block)
    (folder / "include" / "eecore" / "count_flags.cuh").write_text(shown["kernel"])
    (folder / "csrc" / "cuda" / "count_flags.cu").write_text(shown["launch"])
    return folder


def check_syntax(tree: Path, file: str, *options: str) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    includes = [f"-I{tree / name}" for name in ("include", "csrc")]
    command = [compiler, "-std=c++20", "-fsyntax-only", "-Wall", "-Werror", *includes, *options]
    done = subprocess.run([*command, str(tree / file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_the_kernel_for_the_cpu_compiles(tree: Path) -> None:
    check_syntax(tree, "csrc/cpu/count_flags.cpp", "-DEECORE_CAPABILITY=portable")


@pytest.mark.long
def test_the_boundary_compiles(tree: Path) -> None:
    headers = Path(torch.__path__[0]) / "include"
    torchs = ["-isystem", str(headers), "-isystem", str(headers / "torch/csrc/api/include")]
    stable = "-DTORCH_TARGET_VERSION=0x020a000000000000"
    check_syntax(tree, "csrc/ops/count_flags.cpp", f"-I{tree / 'csrc/cpu'}", stable, *torchs)


@pytest.mark.long
def test_the_kernel_for_cuda_compiles(tree: Path) -> None:
    emulated = [f"-I{tree / 'tests/emulator'}", "-include", "cuda_runtime.h", "-xc++"]
    defined = ["-DEECORE_EMULATED", "-DEECORE_BACKEND_CUDA", "-DUSE_CUDA"]
    check_syntax(tree, "csrc/cuda/count_flags.cu", "-Wno-unknown-pragmas", *defined, *emulated)


def run(block: str, **given: Any) -> dict[str, Any]:
    """The names that a block of Python defines, with the imports that it has not."""
    module = {"torch": torch, "Tensor": torch.Tensor, **given}
    exec(compile(code()[block], str(PAGE), "exec"), module)
    return module


def count(flags: torch.Tensor, count: torch.Tensor) -> None:
    """The result of the compiled op."""
    count.copy_(flags.sum())


def wrapper() -> Callable[..., torch.Tensor]:
    made: Callable[..., torch.Tensor] = run("wrapper", compiled=lambda _: count)["count_flags"]
    return made


def test_the_schema_is_that_of_the_wrapper() -> None:
    assert 'EECORE_OP(count_flags, "Tensor flags, Tensor(a!) count")' in code()["boundary"]
    assert 'compiled("count_flags")' in code()["wrapper"]
    counted = wrapper()(torch.tensor([True, False, True]))
    assert counted.dtype == torch.int32
    assert counted.tolist() == [2]


@pytest.mark.parametrize("seed", range(5))
def test_the_fuzzed_call_holds_the_op_to_the_reference(seed: int) -> None:
    module = run("tests", **vars(random_calls))
    given, check = module["fuzzed_call"](random_calls.Maker(Random(seed)))
    before = {name: tensor.clone() for name, tensor in given.items()}
    count(**given)
    check(before, given)
    given["count"] += 1
    with pytest.raises(AssertionError, match="count"):
        check(before, given)


def test_the_cases_for_a_gpu_run() -> None:
    ops = SimpleNamespace(count_flags=wrapper())
    made = run("bench", **{**vars(case), "partial": partial, "pytest": pytest, "ops": ops})
    cases = list(made["gpu_cases"](case.CPU))
    assert {each.op for each in cases} == {"count_flags"}
    assert all(0 <= each.make().call().item() <= each.moved_bytes - 4 for each in cases)
