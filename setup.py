"""Builds the compiled modules with CMake and Ninja; everything else is in pyproject.toml.

EECORE_CUDA=AUTO|ON|OFF and EECORE_CUDA_ARCHS are handed to CMake, see CMakeLists.txt. MAX_JOBS
limits the parallel compilations.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """One CMake run makes every module; setuptools only learns where they went."""

    def run(self) -> None:
        package_dir = (
            ROOT / "python" / "eecore" if self.inplace else Path(self.build_lib) / "eecore"
        )
        package_dir.mkdir(parents=True, exist_ok=True)
        build_dir = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        build_dir.mkdir(parents=True, exist_ok=True)
        configure = [
            *("cmake", "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DEECORE_VERSION={self.distribution.get_version()}",
        ]
        for name in ("EECORE_CUDA", "EECORE_CUDA_ARCHS"):
            if name in os.environ:
                configure.append(f"-D{name}={os.environ[name]}")
        jobs = os.environ.get("MAX_JOBS")
        subprocess.run(configure, check=True)
        subprocess.run(
            ["cmake", "--build", str(build_dir), *(["-j", jobs] if jobs else [])], check=True
        )
        subprocess.run(
            ["cmake", "--install", str(build_dir), "--prefix", str(package_dir.resolve())],
            check=True,
        )

    def get_outputs(self) -> list[str]:
        return []


setup(ext_modules=[Extension("eecore._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
