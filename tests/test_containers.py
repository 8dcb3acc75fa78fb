"""Dockerfile and Dockerfile.cuda: the files they copy exist, suffice, and are few.

No container is built here: the workflow does that, and tries the image (scripts/try_image.sh).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import build_backend
from eecore.cli.app import command_line

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("Dockerfile", "Dockerfile.cuda")
FILE = pytest.mark.parametrize("name", NAMES)
MAX_CONTEXT = 64 << 20


def instructions(name: str) -> list[tuple[str, str]]:
    """The instructions of a file, each with its arguments."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.split("\n") if line]


def values(name: str, instruction: str) -> list[str]:
    return [value for found, value in instructions(name) if found == instruction]


def copied(name: str) -> list[str]:
    """The paths that a file copies out of the context."""
    lines = [value.split() for value in values(name, "COPY") if "--from" not in value]
    return [source for *sources, _ in lines for source in sources]


def is_sent(path: Path) -> bool:
    """Whether .dockerignore lets a file of the tree into the context: its last match decides."""
    sent = True
    names = ["/".join(path.parts[:length]) for length in range(1, len(path.parts) + 1)]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern, keeps = line.removeprefix("!"), line.startswith("!")
        inner = pattern.removeprefix("**/")
        tried = [name.rpartition("/")[2] for name in names] if inner != pattern else names
        # A star of .dockerignore stays within a name.
        if any(fnmatch(each, inner) and each.count("/") == inner.count("/") for each in tried):
            sent = keeps
    return sent


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    """The files of the last commit and the index."""
    command = ("git", "ls-files", "-z")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no git repository, which knows what belongs to the project")
    return [Path(name) for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def context(tracked: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the tree that the build stage has."""
    folder = tmp_path_factory.mktemp("context")
    wanted = {Path(source) for source in copied("Dockerfile")}
    for path in tracked:
        if is_sent(path) and wanted & {path, *path.parents}:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / path)
    return folder


@FILE
def test_what_is_copied_is_there_and_is_sent(name: str) -> None:
    assert copied(name)
    for source in copied(name):
        assert (ROOT / source).exists(), source
        assert is_sent(Path(source)), source


def test_the_context_is_small_and_has_nothing_that_was_built(tracked: list[Path]) -> None:
    sent = [path for path in tracked if is_sent(path)]
    assert sum((ROOT / path).stat().st_size for path in sent) < MAX_CONTEXT
    tops = {path.parts[0] for path in sent}
    assert tops <= {Path(source).parts[0] for source in copied("Dockerfile")}
    for name in (
        "python/eecore/_C.cpython-311-x86_64-linux-gnu.so",
        "python/eecore/__pycache__/hub.cpython-311.pyc",
        "python/eecore.egg-info/PKG-INFO",
        "python/eecore/include/eecore/cpu.h",
        "python/eecore/lib/libeecore_cpu.a",
        ".git/HEAD",
        ".venv/bin/python",
        "tests/test_containers.py",
        "build/site/index.html",
    ):
        assert not is_sent(Path(name)), name


def test_what_is_copied_makes_the_same_package(context: Path, tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    command += ["build_py", "--build-lib", str(tmp_path / "lib")]
    done = subprocess.run(command, cwd=context, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lib = tmp_path / "lib"
    made = {path.relative_to(lib) for path in lib.rglob("*") if path.is_file()}
    package = context / "python"
    assert made == {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    assert Path("eecore/data/intent/model.safetensors") in made
    assert "# eecore" in (tmp_path / "eecore.egg-info" / "PKG-INFO").read_text()


@pytest.mark.long
def test_what_is_copied_is_enough_for_cmake(context: Path, tmp_path: Path) -> None:
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    if cmake is None or shutil.which("c++") is None:
        pytest.skip("no cmake, or no C++ compiler")
    command = [cmake, "-S", str(context), "-B", str(tmp_path), "-DEECORE_CUDA=OFF"]
    command += [f"-DPython_EXECUTABLE={sys.executable}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@FILE
def test_torch_and_the_requirements_of_the_build_are_those_of_the_project(name: str) -> None:
    (torch,) = [value for value in values(name, "ARG") if value.startswith("TORCH=")]
    for script in ("build_wheel.sh", "setup_venv.sh"):
        assert torch.replace("=", "==").lower() in (ROOT / "scripts" / script).read_text()
    (installed,) = [run for run in values(name, "RUN") if "pybind11" in run]
    words = installed.partition("pip install ")[2].split()
    assert [word.strip('"') for word in words] == build_backend.BUILD_TOOLS


def test_both_run_the_same() -> None:
    one, other = ((ROOT / name).read_text().rpartition("\nFROM base\n")[2] for name in NAMES)
    assert one == other
    assert one.count("\n") > 10


@FILE
def test_it_serves_as_a_user_who_is_not_root(name: str) -> None:
    (user,) = values(name, "USER")
    assert int(user) > 0
    assert json.loads(values(name, "ENTRYPOINT")[0]) == ["eecore"]
    command, *options = json.loads(values(name, "CMD")[0])
    server: Any = command_line()
    known = {option for each in server.commands[command].params for option in each.opts}
    assert [option for option in options if option.startswith("--")] == ["--host"]
    assert known >= {"--host"}
    (volume,) = values(name, "VOLUME")
    assert f"HF_HOME={volume}" in values(name, "ENV")


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
@FILE
def test_the_health_check_asks_the_server(name: str, status: int, code: int) -> None:
    asked = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    (check,) = values(name, "HEALTHCHECK")
    program, option, code_to_run = json.loads(check.partition("CMD ")[2])
    assert (program, option) == ("python", "-c")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        here = code_to_run.replace(":8000/", f":{server.server_address[1]}/")
        assert here != code_to_run
        done = subprocess.run([sys.executable, "-c", here], capture_output=True, text=True)
    finally:
        server.shutdown()
        server.server_close()
    assert asked == ["/health"]
    assert done.returncode == code, done.stderr


def test_the_workflow_builds_both_and_tries_them() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert workflow.count("docker/build-push-action@") == len(NAMES)
    assert "file: Dockerfile.cuda\n" in workflow
    assert workflow.count("scripts/try_image.sh eecore:") == len(NAMES)
    assert (ROOT / "scripts" / "try_image.sh").stat().st_mode & 0o111


def test_wheels_are_built_for_every_python_that_is_named() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    (listed,) = re.findall(
        r"^ +python: (\[.*\])$", (ROOT / ".github/workflows/ci.yml").read_text(), re.M
    )
    assert json.loads(listed) == named == [f"3.{minor}" for minor in range(10, 15)]
    assert 'requires-python = ">=3.10"' in project
