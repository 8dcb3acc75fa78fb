"""eecore on aarch64, emulated by qemu.

``python tests/aarch64.py -m pytest tests/ops`` runs a Python command line there: with Debian's
Python for arm64, with the wheels of torch and of what tests need, and with eecore cross-compiled.
They come into build/aarch64 on first use. qemu translates one instruction after another, some tens
of times slower than a machine, and keeps to the order of memory of the machine below: what needs a
barrier on aarch64 alone does not show.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import cmake_build
from cmake_build import run

TOOLS = {
    "qemu-aarch64": "qemu-user",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
}
"""Programs that this machine needs, and the package of Debian that has each."""
TORCH = "torch==2.10.0"
"""The last version whose wheel for aarch64 needs no CUDA."""
TESTS = (
    "pytest pytest-timeout pytest-xdist hypothesis pybind11 "
    "scipy gguf llguidance regex transformers"
)
PROCESSOR = "neoverse-n1"

FOLDER = cmake_build.ROOT / "build" / "aarch64"
SYSTEM = FOLDER / "system"
SITE = FOLDER / "site"
PYTHON = FOLDER / "python"

# Like qemu-aarch64 -L, with a name by which a process can be started again.
WRAPPER = """#!/bin/sh
export QEMU_LD_PREFIX="{system}" QEMU_CPU="${{QEMU_CPU:-{processor}}}"
export PYTHONHOME="{system}/usr" PYTHONPATH="{path}" PYTHONNOUSERSITE=1
exec qemu-aarch64 -0 "$0" "{system}/usr/bin/{name}" "$@"
"""
# apt's lists for arm64, apart from those of this machine.
APT = """
Dir::State "{folder}";
Dir::State::status "{folder}/status";
Dir::Cache "{folder}";
APT::Architecture "arm64";
APT::Architectures "arm64";
APT::Install-Recommends "false";
APT::Sandbox::User "root";
"""


def missing() -> str:
    """What this machine lacks, as a sentence; nothing where all is there."""
    packages = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    return f"apt install {' '.join(packages)}, on Debian" if packages else ""


def environment() -> Path:
    """The Python of build/aarch64 with all that tests need but eecore; made on first use.

    Raises:
        RuntimeError: with the words of apt or pip.
    """
    with cmake_build.alone("aarch64"):
        whole(SYSTEM, _unpack_system)
        name = next(path.name for path in sorted(SYSTEM.glob("usr/bin/python3.*[0-9]")))
        path = os.pathsep.join(map(str, (FOLDER / "package", SITE)))
        PYTHON.write_text(WRAPPER.format(system=SYSTEM, processor=PROCESSOR, path=path, name=name))
        PYTHON.chmod(PYTHON.stat().st_mode | stat.S_IXUSR)
        whole(SITE, lambda folder: _install_wheels(folder, name.removeprefix("python")))
    return PYTHON


def build() -> Path:
    """The Python of build/aarch64, whose ``import eecore`` is that of the sources as they are.

    Raises:
        RuntimeError: with the words of apt, pip or the compiler.
    """
    python = environment()
    cmake_build.build_package(
        "aarch64",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
        f"-DCMAKE_CXX_FLAGS=-isystem {SYSTEM}/usr/include",
        f"-DPython_EXECUTABLE={python}",
    )
    return python


def whole(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder whole, or not at all."""
    if folder.exists():
        return
    print(f"aarch64: {folder.relative_to(cmake_build.ROOT)}", file=sys.stderr)
    begun = folder.with_name(f"{folder.name}-begun")
    shutil.rmtree(begun, ignore_errors=True)
    begun.mkdir()
    fill(begun)
    begun.rename(folder)


def _unpack_system(folder: Path) -> None:
    """Debian's Python with its libraries and headers: nothing is installed on this machine."""
    apt = folder / "apt"
    (apt / "lists" / "partial").mkdir(parents=True)
    (apt / "archives" / "partial").mkdir(parents=True)
    (apt / "status").touch()
    (apt / "conf").write_text(APT.format(folder=apt))
    settings = {"APT_CONFIG": str(apt / "conf")}
    run("apt-get", "update", **settings)
    plan = run("apt-get", "install", "--simulate", "python3", "libstdc++6", **settings)
    packages = [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
    python = next(name for name in packages if name.startswith("python3."))
    # Without dependencies: these would bring C's headers, which the compiler has.
    headers = f"lib{python.removesuffix('-minimal')}-dev"
    run("apt-get", "download", *packages, headers, cwd=apt, **settings)
    for archive in apt.glob("*.deb"):
        run("dpkg-deb", "--extract", str(archive), str(folder))
    shutil.rmtree(apt)


def _install_wheels(folder: Path, version: str) -> None:
    def install(*requirements: str) -> None:
        run(
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--target", str(folder), "--upgrade", "--python-version", version),
            *("--implementation", "cp", "--only-binary", ":all:"),
            *(f"--platform=manylinux{tag}_aarch64" for tag in ("_2_28", "_2_27", "_2_17", "2014")),
            *requirements,
        )

    install("--no-deps", TORCH)
    (torch,) = metadata.distributions(name="torch", path=[str(folder)])
    needed = [*_always(torch.requires), *_always(metadata.requires("eecore"))]
    install(*(each for each in needed if not each.startswith("torch")), *TESTS.split())


def _always(requirements: Sequence[str] | None) -> list[str]:
    """The requirements without a marker for an extra or a platform."""
    return [each for each in requirements or () if ";" not in each]


if __name__ == "__main__":
    if lacking := missing():
        sys.exit(f"no cross compiler or no qemu: {lacking}")
    command = [str(build()), *sys.argv[1:]]
    sys.exit(subprocess.run(command).returncode)
