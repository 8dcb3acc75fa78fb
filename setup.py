"""Builds the compiled modules with CMake and Ninja; everything else is in pyproject.toml.

EECORE_CUDA=AUTO|ON|OFF and EECORE_CUDA_ARCHS are handed to CMake, see CMakeLists.txt. MAX_JOBS
limits the parallel compilations.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata, util
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))
from build_backend import check_machine, site_packages  # noqa: E402

sys.path.append(site_packages())  # where an isolated build finds a torch that is installed


def origin(module: str) -> str:
    spec = util.find_spec(module)
    return str(spec.origin) if spec is not None else ""


def tool_environment() -> dict[str, str]:
    """The environment with this interpreter's own cmake and ninja first, activated or not."""
    environment = dict(os.environ)
    if origin("cmake").startswith(sys.prefix):  # not so in pip's isolated builds, which set PATH
        environment["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    return environment


def fresh_build_dir(build_dir: Path, path: str) -> Path:
    """The folder of in-place builds, emptied when what its CMake cache points at has changed."""
    tools = {name: shutil.which(name, path=path) for name in ("cmake", "ninja", "nvcc")}
    variables = {name: os.environ.get(name) for name in ("CC", "CXX", "CUDACXX")}
    torch = f"{metadata.version('torch')} {origin('torch')}" if origin("torch") else None
    made_with = {"python": sys.executable, "torch": torch, **tools, **variables}
    record = build_dir / "made-with.json"
    if record.exists() and json.loads(record.read_text()) != made_with:
        shutil.rmtree(build_dir)
    build_dir.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(made_with, indent=2))
    return build_dir


def require_tools(path: str) -> None:
    check_machine()
    missing = [name for name in ("cmake", "ninja") if shutil.which(name, path=path) is None]
    missing += [name for name in ("pybind11", "torch") if not origin(name)]
    if missing:
        sys.exit(
            f"eecore is built with {', '.join(missing)}, not found for {sys.executable}: "
            f"pip install {' '.join(missing)} first, or build without --no-build-isolation"
        )


class CMakeBuild(build_ext):
    """One CMake run makes every module; setuptools only learns where they went."""

    def run(self) -> None:
        environment = tool_environment()
        require_tools(environment["PATH"])
        if self.inplace:
            build_dir = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
            fresh_build_dir(build_dir, environment["PATH"])
            self.build_into(ROOT / "python" / "eecore", build_dir, environment)
        else:  # pip may have put CMake and torch into a folder that is about to vanish
            with tempfile.TemporaryDirectory(prefix="eecore-build-") as folder:
                package_dir = Path(self.build_lib).resolve() / "eecore"
                self.build_into(package_dir, Path(folder), environment)

    def build_into(self, package_dir: Path, build_dir: Path, environment: dict[str, str]) -> None:
        configure = [
            *("cmake", "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DEECORE_VERSION={self.distribution.get_version()}",
        ]
        for name in ("EECORE_CUDA", "EECORE_CUDA_ARCHS"):
            value = os.environ.get(name)
            configure.append(f"-D{name}={value}" if value else f"-U{name}")
        jobs = os.environ.get("MAX_JOBS")
        build = ["cmake", "--build", str(build_dir), *(["-j", jobs] if jobs else [])]
        install = ["cmake", "--install", str(build_dir), "--prefix", str(package_dir)]
        package_dir.mkdir(parents=True, exist_ok=True)
        for command in (configure, build, install):
            subprocess.run(command, check=True, env=environment)

    def get_outputs(self) -> list[str]:
        return []


setup(ext_modules=[Extension("eecore._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
