"""The example engines in C++ and CUDA, built against the installed headers and library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

import eecore

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cpp"
PROGRAMS = (EXAMPLE / "decode_step.cpp", EXAMPLE / "append_kv.cu")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tools = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    if shutil.which("cmake", path=tools) is None or shutil.which("c++") is None:
        pytest.skip("no cmake, or no C++ compiler")
    folder = tmp_path_factory.mktemp("cpp")
    for command in (
        ["cmake", "-S", str(EXAMPLE), "-B", str(folder), f"-DEECORE_DIR={eecore.get_include()}"],
        ["cmake", "--build", str(folder)],
    ):
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PATH": tools}
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "decode_step"


@pytest.mark.long
@pytest.mark.parametrize("capability", ["portable", None])
def test_it_finds_what_plain_loops_find(program: Path, capability: str | None) -> None:
    chosen = {} if capability is None else {"EECORE_CPU_CAPABILITY": capability}
    done = subprocess.run(
        [str(program)], capture_output=True, text=True, env={**os.environ, **chosen}
    )
    assert done.returncode == 0, done.stdout
    first, *others = done.stdout.splitlines()
    assert first == f"{capability or eecore.build_info()['cpu_capability']} kernels"
    assert [line.partition(":")[0] for line in others] == [
        "paged_attention",
        "exit_confidence_softmax",
    ]


@pytest.mark.long
def test_a_capability_that_is_none_is_an_error(program: Path) -> None:
    done = subprocess.run(
        [str(program)],
        capture_output=True,
        text=True,
        env={**os.environ, "EECORE_CPU_CAPABILITY": "fast"},
    )
    assert done.returncode != 0
    assert "expected portable, avx2" in done.stderr


@pytest.mark.long
def test_a_kernel_compiles_in_an_engines_own_file(program: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    compiled = program.parent / "append_kv"
    assert compiled.is_file()
    if not torch.cuda.is_available():
        return
    done = subprocess.run([str(compiled)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("append_kv: largest difference")


def test_headers_need_neither_torch_nor_python() -> None:
    headers = Path(eecore.get_include()) / "eecore"
    assert {"cpu.h", "params.h", "paged_attention.cuh"} <= {file.name for file in headers.iterdir()}
    for path in PROGRAMS:
        assert len(path.read_text().splitlines()) <= 150
