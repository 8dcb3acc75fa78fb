"""Releases: the source archive has all tracked files, the wheel all of the package.

scripts/build_wheel.sh makes both and installs the wheel; here setuptools only lists and copies.
"""

from __future__ import annotations

import re
import subprocess
import sys
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import build_backend

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("python/eecore")
COMPILED = (".so", ".a")


def setuptools(*command: str) -> None:
    """Run one command of setup.py, which has to write outside the tree."""
    run = [sys.executable, "setup.py", "--quiet", *command]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def tracked() -> set[Path]:
    """The files of the last commit and the index."""
    command = ("git", "ls-files", "-z")
    try:
        listing = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git repository, which knows what belongs to the project")
    return {Path(name) for name in listing.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def egg_info(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which setuptools describes the source archive."""
    folder = tmp_path_factory.mktemp("described")
    setuptools("egg_info", "--egg-base", str(folder))
    return folder / "eecore.egg-info"


@pytest.fixture(scope="module")
def metadata(egg_info: Path) -> Message:
    """The metadata that an installer reads."""
    return Parser().parsestr((egg_info / "PKG-INFO").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> set[Path]:
    """The files of the wheel, except compiled ones and those from include/."""
    folder = tmp_path_factory.mktemp("copied")
    setuptools("egg_info", "--egg-base", str(folder), "build_py", "--build-lib", f"{folder}/lib")
    lib = folder / "lib"
    return {path.relative_to(lib) for path in lib.rglob("*") if path.is_file()}


def test_the_source_archive_has_every_tracked_file(tracked: set[Path], egg_info: Path) -> None:
    lines = (egg_info / "SOURCES.txt").read_text(encoding="utf-8").splitlines()
    listed = {Path(line) for line in lines if "eecore.egg-info" not in line}
    assert tracked - listed == set(), "missing: MANIFEST.in says what goes in"
    assert not [path for path in listed if path.suffix in COMPILED]


def test_the_wheel_has_every_file_of_the_package(tracked: set[Path], copied: set[Path]) -> None:
    package = {path.relative_to(PACKAGE.parent) for path in tracked if PACKAGE in path.parents}
    assert copied == package


def test_a_build_in_place_leaves_nothing_in_the_wheel(copied: set[Path]) -> None:
    """This test runs on a build in place, whose modules may be of another Python, or CUDA's."""
    assert [path.name for path in (ROOT / PACKAGE).glob("_C*.so")]
    assert not [path for path in copied if path.suffix in COMPILED or "include" in path.parts]


def test_the_wheel_asks_for_the_torch_that_it_is_compiled_for(metadata: Message) -> None:
    wanted = next(line for line in metadata.get_all("Requires-Dist", []) if "torch" in line)
    target = re.search(
        r"TORCH_TARGET_VERSION=0x(\w\w)(\w\w)0+\b", (ROOT / "CMakeLists.txt").read_text()
    )
    assert target
    assert wanted == f"torch>={int(target[1], 16)}.{int(target[2], 16)}"


def test_an_older_torch_is_refused_by_name() -> None:
    """The compiled module lacks functions of it then, and does not load."""
    program = """
import sys, torch
torch.__version__ = torch.torch_version.TorchVersion("2.9.1")
sys.modules["eecore._C"] = None
import eecore.ops
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("ImportError: torch: expected 2.10 or newer, got 2.9.1\n")


@pytest.mark.parametrize(
    "hook", ["get_requires_for_build_wheel", "get_requires_for_build_editable"]
)
def test_a_machine_without_a_compiler_hears_it_before_anything_is_fetched(hook: str) -> None:
    asked = f"import build_backend; print(build_backend.{hook}())"
    environment = {"PATH": "/nonexistent", "PYTHONPATH": str(ROOT / "scripts")}
    command = [sys.executable, "-c", asked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"eecore: expected a C\+\+ compiler, got none of .*\n", done.stderr)


def test_an_old_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_backend.sys, "version_info", (3, 9, 18))
    assert str(build_backend.complaint()).startswith("expected Python 3.10 or newer, got Python ")


def test_a_torch_that_is_installed_is_not_fetched() -> None:
    assert build_backend.get_requires_for_build_wheel() == build_backend.BUILD_TOOLS
