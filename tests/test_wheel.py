"""Installing: the wheel has all of the package, and a machine that cannot build it is told why.

scripts/build_wheel.sh makes the source archive and a wheel, and installs it; here setuptools only
copies.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("python/eecore")


def test_the_wheel_has_every_file_of_the_package(tmp_path: Path) -> None:
    """As git knows them; compiled files and those from include/ are CMake's to install."""
    listing = subprocess.run(
        ("git", "ls-files", "-z", str(PACKAGE)), cwd=ROOT, capture_output=True, text=True
    )
    if listing.returncode != 0:
        pytest.skip("no git repository, which knows what belongs to the project")
    tracked = [Path(name) for name in listing.stdout.split("\0") if (ROOT / name).is_file()]
    run = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    run += ["build_py", "--build-lib", f"{tmp_path}/lib"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lib = tmp_path / "lib"
    copied = {path.relative_to(lib) for path in lib.rglob("*") if path.is_file()}
    assert copied == {path.relative_to(PACKAGE.parent) for path in tracked}


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
