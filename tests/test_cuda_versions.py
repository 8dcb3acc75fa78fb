"""csrc/cuda builds with CUDA 12.4 and everything later: it is compiled against older headers.

nvidia-cuda-runtime-cu12, of the extra ``test``, has those; EECORE_CUDA_HEADERS names folders with
others. nvcc checks host code as well when it makes PTX, which takes half a second.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OLDEST = 12040
# All of csrc/cuda that calls the runtime, once; the last for what all launchers share.
SOURCES = ("captured_graph", "conditional_body", "device", "begin_round")


def header_folders() -> list[Path]:
    """The folders of CUDA headers that are installed."""
    folders = [Path(name) for name in os.environ.get("EECORE_CUDA_HEADERS", "").split(os.pathsep)]
    package = importlib.util.find_spec("nvidia")
    for root in (package and package.submodule_search_locations) or ():
        folders.append(Path(root) / "cuda_runtime" / "include")
    return [folder for folder in folders if (folder / "cuda_runtime_api.h").is_file()]


def version_of(folder: Path) -> int:
    """CUDART_VERSION, 12040."""
    text = (folder / "cuda_runtime_api.h").read_text(errors="replace")
    found = re.search(r"#define CUDART_VERSION\s+(\d+)", text)
    assert found, f"{folder} has no version"
    return int(found[1])


@pytest.fixture(scope="module")
def headers() -> list[Path]:
    folders = [folder for folder in header_folders() if version_of(folder) >= OLDEST]
    if not folders:
        pytest.skip("no other CUDA's headers: pip install nvidia-cuda-runtime-cu12==12.4.127")
    return folders


def compiled(source: Path, headers: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    places = (headers, ROOT / "include", ROOT / "csrc" / "cuda", ROOT / "csrc")
    command = [nvcc, "-std=c++20", "-arch=sm_90", "-ptx", "-o", str(folder / "out.ptx")]
    command += [f"-I{place}" for place in places]
    return subprocess.run([*command, str(source)], capture_output=True, text=True)


@pytest.mark.long
@pytest.mark.parametrize("name", SOURCES)
def test_it_compiles_against_the_headers_of_an_older_cuda(
    headers: list[Path], tmp_path: Path, name: str
) -> None:
    for folder in headers:
        done = compiled(ROOT / "csrc" / "cuda" / f"{name}.cu", folder, tmp_path)
        assert done.returncode == 0, f"{version_of(folder)}: {done.stderr}"


@pytest.mark.long
def test_a_call_that_the_older_cuda_does_not_have_is_found(
    headers: list[Path], tmp_path: Path
) -> None:
    source = tmp_path / "later.cu"
    source.write_text("#include <cuda_runtime.h>\nint main() { return cudaLaterThanThat(); }\n")
    assert "cudaLaterThanThat" in compiled(source, headers[0], tmp_path).stderr


def test_every_source_that_calls_the_runtime_is_among_them() -> None:
    calling = {
        path.stem
        for path in (ROOT / "csrc" / "cuda").glob("*.cu")
        if re.search(r"\bcuda[A-Z]\w+\(", path.read_text())
    }
    assert calling <= set(SOURCES)
