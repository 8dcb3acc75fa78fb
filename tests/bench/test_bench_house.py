"""The house rules of benchmarks: which may import which, how they are named and started."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from bench.__main__ import BENCHMARKS
from bench.harness.places import ROOT
from bench.tables import WITH_REPORTS

BENCH = ROOT / "bench"
# What everybody may look at, and what those above may: a benchmark looks at no other benchmark.
SHARED = ("harness", "decode")
# Beside these: what is drawn and shown together, and the ops' cases that a GPU is timed on.
ALSO = {"tables": None, "overview": (), "__main__": (), "ops": ("gpu",)}


@cache
def modules() -> dict[str, Path]:
    """The modules of bench by dotted name."""
    found = {}
    for path in BENCH.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of bench that one of them imports, anywhere in it, for types as well."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules() else node.module or "")
    return frozenset(found & set(modules()))


def folder(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_imports_have_no_circles() -> None:
    """Imports for types alone count too."""
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"a circle: {' -> '.join((*way, module))}"
        if module not in done:
            for other in sorted(imports(module)):
                visit(other, (*way, module))
            done.add(module)

    for module in modules():
        visit(module, ())


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_benchmark_looks_at_what_is_shared_and_at_itself(module: str) -> None:
    own = folder(module)
    also = ALSO.get(own, ())
    if also is None:
        return
    seen = SHARED[: SHARED.index(own)] if own in SHARED else (*SHARED, *also)
    strangers = {folder(name) for name in imports(module)} - {"", own, *seen}
    assert not strangers, f"{module} imports {strangers}"


def test_imports_are_found_without_tricks() -> None:
    """Modules are imported as a package from the checkout's root; none changes the path."""
    trick = re.compile(r"sys\.path(\.(insert|append|extend)\b|\[.*\]\s*=|\s*\+?=)|noqa: E402")
    for path in modules().values():
        assert not trick.search(path.read_text()), path


def test_workers_of_peers_import_nothing_that_peers_do_not_have() -> None:
    """Workers run with interpreters without eecore: they may import bench.harness.answers alone."""
    light = {"bench.decode.worker", "bench.decode.peer_worker", "bench.decode.parses"}
    light |= {"bench.calm.worker", "bench.integrations.vllm_worker", "bench.decode.models"}
    light |= {"bench.harness.answers", "bench.decode.llama_wheel"}
    for module in light:
        assert imports(module) <= light, module
        tree = ast.parse(modules()[module].read_text())
        outright = {
            name.split(".")[0]
            for node in tree.body
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert not outright & {"eecore", "torch", "transformers", "vllm", "numpy"}, module


@pytest.mark.parametrize(("name", "module"), BENCHMARKS.items())
def test_a_benchmark_says_how_it_is_run(name: str, module: str) -> None:
    tree = ast.parse(modules()[module].read_text())
    assert f"python -m bench {name}" in (ast.get_docstring(tree) or "")
    (main,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main")
    assert [each.arg for each in main.args.args] == ["words"]


def test_all_reports_are_made_again() -> None:
    with_reports = {
        name.removeprefix("bench.")
        for name, path in modules().items()
        if re.search(r"^REPORTS = ", path.read_text(), re.MULTILINE)
    }
    assert with_reports == set(WITH_REPORTS)


def test_no_name_says_its_folder_again() -> None:
    for module in modules():
        assert not module.rpartition(".")[2].startswith(f"{folder(module)}_"), module


def test_nothing_speaks_of_scripts_that_are_no_more() -> None:
    command = ["git", "grep", "-lE", r"python bench/|bench/bench_[a-z]+\.py", "--", "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        pytest.skip("no git here")
    own = Path(__file__).relative_to(ROOT).as_posix()
    assert set(done.stdout.split()) <= {own}
