"""What docs/extending/add-an-op.md shows compiles, put to where the page says."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import test_house

ROOT = test_house.ROOT
PAGE = ROOT / "docs" / "extending" / "add-an-op.md"
NAMES = (
    "params",
    "row_counts",
    "schema",
    "boundary",
    "cpu",
    "kernel",
    "launch",
    "wrapper",
    "calls",
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
    edit("csrc/tape_rows.h", lambda text: text.replace(end, f"\n{shown['row_counts']}{end}"))
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


def test_the_kernel_for_the_cpu_compiles(tree: Path) -> None:
    check_syntax(tree, "csrc/cpu/count_flags.cpp", "-DEECORE_CAPABILITY=portable")


def test_the_boundary_compiles(tree: Path) -> None:
    headers = Path(torch.__path__[0]) / "include"
    torchs = ["-isystem", str(headers), "-isystem", str(headers / "torch/csrc/api/include")]
    stable = "-DTORCH_TARGET_VERSION=0x020a000000000000"
    check_syntax(tree, "csrc/ops/count_flags.cpp", f"-I{tree / 'csrc/cpu'}", stable, *torchs)


def test_the_kernel_for_cuda_compiles(tree: Path) -> None:
    emulated = [f"-I{tree / 'tests/emulator'}", "-include", "cuda_runtime.h", "-xc++"]
    defined = ["-DEECORE_EMULATED", "-DEECORE_BACKEND_CUDA", "-DUSE_CUDA"]
    check_syntax(tree, "csrc/cuda/count_flags.cu", "-Wno-unknown-pragmas", *defined, *emulated)


def test_the_schema_is_that_of_the_wrapper() -> None:
    schema, wrapper = code()["schema"], code()["wrapper"]
    assert re.search(
        r'm\.def\("count_flags\(Tensor flags, Tensor\(a!\) count\) -> \(\)"\);', schema
    )

    def compiled(op: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
        assert op == "count_flags"
        return lambda flags, count: count.copy_(flags.sum())

    module: dict[str, Any] = {"compiled": compiled, "torch": torch, "Tensor": torch.Tensor}
    exec(compile(wrapper, str(PAGE), "exec"), module)
    count = module["count_flags"](torch.tensor([True, False, True]))
    assert count.dtype == torch.int32
    assert count.tolist() == [2]
