"""Compiled kernels that are copied to another machine: whole, or refused with a reason."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import cuda_objects

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def carried(tmp_path: Path) -> Path:
    """A folder made from a build whose objects are text."""
    objects = tmp_path / "build" / "CMakeFiles" / "_cuda.dir" / "csrc"
    (objects / "cuda").mkdir(parents=True)
    for name in ("check.cpp.o", "cuda/device.cu.o", "cuda/module.cpp.o"):
        (objects / name).write_text(name * 9)
    (tmp_path / "build" / "libeecore_cpu.a").write_bytes(b"!<arch>\n")
    cuda_objects.pack(tmp_path / "build", tmp_path / "objects", "90a-real")
    return tmp_path / "objects"


def test_what_is_carried_comes_out_as_it_went_in(carried: Path, tmp_path: Path) -> None:
    target = tmp_path / "linked"
    assert cuda_objects.unpack(carried, target) == "90a-real"
    archive = (target / "libeecore_cuda.a").read_bytes()
    assert b"cuda/device.cu.o" * 9 in archive
    assert b"module.cpp.o" not in archive  # it is made for one Python
    assert (target / "libeecore_cpu.a").read_bytes() == b"!<arch>\n"
    stamp = (target / "libeecore_cuda.a").stat().st_mtime_ns
    cuda_objects.unpack(carried, target)
    assert (target / "libeecore_cuda.a").stat().st_mtime_ns == stamp  # nothing is linked again


def test_the_fingerprint_is_of_all_sources_and_architectures(tmp_path: Path) -> None:
    for name in ("CMakeLists.txt", "csrc/a.cu", "include/eecore/a.cuh"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a")
    seen = [cuda_objects.fingerprint(archs, tmp_path) for archs in ("80-real", "90a-real")]
    for name in ("CMakeLists.txt", "csrc/a.cu", "include/eecore/a.cuh"):
        (tmp_path / name).write_text("b")
        seen.append(cuda_objects.fingerprint("90a-real", tmp_path))
    (tmp_path / "csrc" / "b.h").write_text("")
    seen.append(cuda_objects.fingerprint("90a-real", tmp_path))
    assert len(set(seen)) == len(seen)


def test_what_cannot_be_linked_is_refused(
    carried: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "linked"
    with pytest.raises(cuda_objects.StaleObjects, match=r"expected a folder with objects\.json"):
        cuda_objects.unpack(tmp_path, target)
    packed = carried / "libeecore_cuda.a.xz"
    whole = packed.read_bytes()
    for damaged in (whole[:-9], b"", (carried / "libeecore_cpu.a.xz").read_bytes()):
        packed.write_bytes(damaged)
        with pytest.raises(cuda_objects.StaleObjects, match=r"expected libeecore_cuda\.a as"):
            cuda_objects.unpack(carried, target)
    packed.write_bytes(whole)
    monkeypatch.setattr(cuda_objects, "fingerprint", lambda _: "another")
    with pytest.raises(cuda_objects.StaleObjects, match=r"objects of these sources .* make them"):
        cuda_objects.unpack(carried, target)


def test_cmake_says_that_objects_are_stale(tmp_path: Path) -> None:
    """Before it looks for a compiler of CUDA."""
    (tmp_path / "objects.json").write_text('{"fingerprint": "0", "archs": "", "sha256": {}}')
    tools = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    done = subprocess.run(
        [
            *("cmake", "-S", ROOT, "-B", tmp_path / "build", "-G", "Ninja"),
            *(f"-DPython_EXECUTABLE={sys.executable}", f"-DEECORE_CUDA_OBJECTS={tmp_path}"),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": tools},
    )
    assert done.returncode != 0
    assert "EECORE_CUDA_OBJECTS: expected objects of these sources" in done.stderr
