"""The house rules: which module may import which, and every op has all of its parts.

The rules are read from the sources: Python imports through ast, C++ includes line by line.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch

import cases
import op_calls
import reference
from eecore import ops

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
# Files of csrc/cpu that are built once, for all CPUs.
BASELINE = ("run.cpp", "tile_permission.h", "crew.h", "crew.cpp")
INCLUDE = ROOT / "include"
PACKAGE = ROOT / "python" / "eecore"
MAX_TRACKED_BYTES = 56 << 20
"""Bytes of the checkout, which is copied whole to machines that have a GPU."""


@cache
def schemas() -> tuple[str, ...]:
    """The ops that csrc/ops registers, each in the file of its name."""
    found = []
    for path in sorted((CSRC / "ops").glob("*.cpp")):
        registered = re.findall(r"^EECORE_OP\((\w+),", path.read_text(), re.M)
        assert registered == [path.stem], f"{path}: registers {registered}"
        found += registered
    return tuple(found)


def tracked_files() -> list[Path]:
    """Files that git tracks or would track; without git, every file except build products."""
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        skipped = {".git", ".venv", ".peers", ".models", "build", "dist", "__pycache__"}
        files = [path for path in ROOT.rglob("*") if not skipped & set(path.parts)]
    else:
        files = [ROOT / name for name in listing.decode().split("\0") if name]
    return [path for path in files if path.is_file()]


# C++


def includes(path: Path) -> Iterator[tuple[str, bool]]:
    """Each included name, and whether it is in quotes."""
    for line in path.read_text().splitlines():
        if match := re.match(r"\s*#\s*include\s*([<\"])([^>\"]+)[>\"]", line):
            yield match[2], match[1] == '"'


def is_torch_or_python(name: str) -> bool:
    return name.startswith(("torch/", "ATen/", "c10/", "pybind11/")) or name == "Python.h"


def sources(folder: Path, *suffixes: str) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in suffixes)


def test_include_knows_neither_torch_nor_python() -> None:
    for path in sources(INCLUDE, ".h", ".cuh"):
        for name, quoted in includes(path):
            assert not is_torch_or_python(name), f"{path}: {name}"
            if quoted:
                assert (INCLUDE / name).is_file(), f"{path}: {name} is outside include/"


def test_cpu_kernels_include_params_and_their_own_headers_alone() -> None:
    # No inline functions that kernels call.
    allowed_system = {"cstdint", "cstddef", "new", "type_traits", "immintrin.h"}
    for path in sources(CSRC / "cpu", ".h", ".cpp"):
        for name, quoted in includes(path):
            if path.name in BASELINE:
                assert not is_torch_or_python(name), f"{path}: {name}"
            elif quoted:
                own = (CSRC / "cpu" / name).is_file() and name not in BASELINE
                assert own or name in ("eecore/params.h", "eecore/cpu.h"), f"{path}: {name}"
            else:
                assert name in allowed_system, f"{path}: {name}"


def test_cuda_launchers_do_not_include_torch() -> None:
    for path in sources(CSRC / "cuda", ".cu", ".cuh", ".h"):
        for name, quoted in includes(path):
            assert not is_torch_or_python(name), f"{path}: {name}"
            if quoted:
                homes = (CSRC / "cuda" / name, INCLUDE / name, CSRC / name)
                assert any(home.is_file() for home in homes), f"{path}: {name}"
                assert name not in ("check.h", "backend.h"), f"{path}: {name}"


def test_tapes_know_no_torch() -> None:
    for name in ("tape.h", "tape.cpp"):
        for included, _ in includes(CSRC / name):
            assert not is_torch_or_python(included), f"{name}: {included}"


def test_ops_include_the_boundary_headers_and_no_other_op() -> None:
    for path in sources(CSRC / "ops", ".h", ".cpp"):
        for name, quoted in includes(path):
            if quoted:
                boundary = "/" not in name and (CSRC / name).is_file()
                assert boundary or name in ("eecore/params.h", "cpu/crew.h"), f"{path}: {name}"
            else:
                assert not name.startswith(("pybind11/", "cuda")), f"{path}: {name}"
    for path in [*sources(CSRC / "cpu", ".cpp"), *sources(CSRC / "cuda", ".cu")]:
        others = {f"{op}{suffix}" for op in schemas() for suffix in (".cpp", ".h", ".cu", ".cuh")}
        others -= {f"{path.stem}{suffix}" for suffix in (".h", ".cuh")}
        for name, _ in includes(path):
            assert name.rpartition("/")[2] not in others, f"{path} includes another op: {name}"


def test_no_instruction_of_one_capability_leaks_into_another() -> None:
    """Inline functions of kernels live in their capability's namespace.

    The linker keeps one copy of a weak symbol; if that is the AVX-512 one, older CPUs crash in it.
    """
    objects = sorted((ROOT / "build").glob("*/CMakeFiles/eecore_cpu_*.dir/csrc/cpu/*.o"))
    # Without optimisation include/'s are there as well, and the linker meets the portable first.
    objects = [path for path in objects if "sanitized" not in path.parts]
    nm = shutil.which("nm")
    if nm is None or not objects:
        pytest.skip("no nm, or nothing built in this checkout")
    for path in objects:
        if not (CSRC / "cpu" / path.stem).is_file():
            continue  # left over from a source that is gone
        capability = path.parts[-4].removeprefix("eecore_cpu_").removesuffix(".dir")
        listing = subprocess.run(
            [nm, "-C", "--defined-only", str(path)], capture_output=True, text=True, check=True
        ).stdout
        for line in listing.splitlines():
            _, kind, symbol = line.split(maxsplit=2)
            if kind in "WVu" and not symbol.startswith("DW.ref."):
                assert f"eecore::cpu::{capability}::" in symbol, f"{path.name}: {line}"


def test_kernels_for_cpus_without_avx512_have_none_of_its_encodings() -> None:
    """An instruction of AVX-512 begins with the byte 0x62, that of AVX-VNNI does not."""
    folders = sorted((ROOT / "build").glob("cmake-*/CMakeFiles/eecore_cpu_avx_vnni.dir/csrc/cpu"))
    objdump = shutil.which("objdump")
    if objdump is None or not folders:
        pytest.skip("no objdump, or nothing built in this checkout")
    for path in (folders[0] / f"multiply_{weight}.cpp.o" for weight in ("int8", "panel")):
        command = [objdump, "-d", "--insn-width=15", str(path)]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "vpdp" in code
        assert not re.search(r"^ *[0-9a-f]+:\t62 ", code, re.MULTILINE), path


# Python


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(module: str, *, for_types: bool = True) -> frozenset[str]:
    """All that a module imports, anywhere in it, as dotted module names.

    With ``for_types=False`` without what stands under ``if TYPE_CHECKING``.
    """
    path = modules()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    if not for_types:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                skipped |= {inner for statement in node.body for inner in ast.walk(statement)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                known = name in modules() or name in ("eecore._C", "eecore._cuda")
                found.add(name if known else base)
    return frozenset(found)


# Each module or folder of the package, lowest first, and the rows above it that it may import, as
# well as EVERYBODYS. "eecore" is the root: an import from it imports all that it re-exports.
EVERYBODYS = {"errors", "files", "values"}
FLOORS = {
    "errors": "",
    "values": "",
    "files": "",
    "guide": "",
    "thought_stop": "",
    "bounded_process": "",
    "template_process": "",
    "config": "guide thought_stop",
    "output": "thought_stop",
    "calibration_file": "config thought_stop",
    "exits": "calibration_file config",
    "exit_text": "exits calibration_file thought_stop",
    "ops": "_C _cuda",
    "models": "ops config bounded_process",
    "scheduling": "config",
    "planning": "scheduling models exits config guide thought_stop output bounded_process",
    "decoding": "planning scheduling models ops exits config guide output",
    "heads": "decoding models ops config",
    "engine": "decoding planning scheduling models ops exit_text exits config guide thought_stop "
    "output",
    "generation": "engine models exits config thought_stop output",
    "calibration": "generation models exits calibration_file config thought_stop output",
    "integrations": "generation models ops exit_text exits config output",
    "eecore": "integrations calibration generation engine ops exits calibration_file "
    "config guide thought_stop output",
    "serving": "eecore generation engine models exit_text exits calibration_file config "
    "guide output",
    "cli": "eecore heads serving calibration generation models exit_text exits "
    "calibration_file config thought_stop output",
    "lab": "cli eecore calibration generation engine decoding planning models exit_text "
    "exits calibration_file config output",
    "__main__": "cli",
}
# Floors that a floor may name in annotations alone.
FOR_TYPES = {
    "models": {"decoding"},
    "scheduling": {"exits", "output", "planning", "engine"},
}


def floor(name: str) -> str:
    """The row that a dotted name of the package is in."""
    return name.split(".")[1] if "." in name else name


def floors_seen(module: str, *, for_types: bool = True) -> set[str]:
    """The other floors that a module imports from."""
    names = imports(module, for_types=for_types)
    return {floor(name) for name in names if name.split(".")[0] == "eecore"} - {floor(module)}


def on_floor(row: str) -> list[str]:
    return sorted(name for name in modules() if floor(name) == row)


def test_floors_look_down_alone() -> None:
    above = {"_C", "_cuda"}
    for row, seen in FLOORS.items():
        assert above >= set(seen.split()), f"{row} looks up: {set(seen.split()) - above}"
        above.add(row)


@pytest.mark.parametrize("module", sorted(modules()))
def test_modules_look_where_their_floor_may(module: str) -> None:
    row = floor(module)
    assert row in FLOORS, f"{module}: on no floor"
    may = {*FLOORS[row].split(), *EVERYBODYS}
    strangers = floors_seen(module, for_types=False) - may
    assert not strangers, f"{module} imports {strangers}"
    strangers = floors_seen(module) - may - FOR_TYPES.get(row, set())
    assert not strangers, f"{module} imports {strangers} for types"


def test_annotations_can_be_evaluated_by_python_3_10() -> None:
    """Python 3.10 takes no ClassVar without a type; the command line evaluates its annotations."""
    for module, path in sorted(modules().items()):
        assert not re.search(r": ClassVar( =|$)", path.read_text(), re.MULTILINE), module


def test_the_root_imports_what_it_exports_when_it_is_asked_for() -> None:
    assert not floors_seen("eecore", for_types=False)


def test_scheduling_knows_no_torch() -> None:
    scheduling = on_floor("scheduling")
    for module in scheduling:
        assert "torch" not in {name.split(".")[0] for name in imports(module)}, module
    program = f"import sys, {', '.join(scheduling)}; print('torch' in sys.modules)"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


def test_planning_knows_no_tensors() -> None:
    for module in on_floor("planning"):
        assert "torch" not in {name.split(".")[0] for name in imports(module)}, module


def test_models_are_passes_and_what_reads_them() -> None:
    """Passes know neither files nor text, text no readers, and no two modules import each other."""
    may = {"passes": {"passes"}, "text": {"text"}, "readers": {"readers", "passes", "text"}}
    seen: dict[str, set[str]] = {}
    for module in on_floor("models"):
        if module.count(".") > 1:
            names = {name for name in imports(module) if name.startswith("eecore.models.")}
            seen[module] = names
            parts = {part_of_models(name) for name in names}
            assert parts <= may[part_of_models(module)], f"{module} imports {names}"
    TopologicalSorter(seen).prepare()  # raises where there is a circle


@pytest.mark.parametrize("room", ["scheduling", "planning", "decoding", "serving", "calibration"])
def test_no_two_modules_of_a_room_import_each_other(room: str) -> None:
    """Nor in annotations alone. The package itself names none of its modules."""
    seen = {
        module: {name for name in imports(module) if name.startswith(f"eecore.{room}.")}
        for module in on_floor(room)
    }
    TopologicalSorter(seen).prepare()  # raises where there is a circle


def part_of_models(module: str) -> str:
    """The folder of a module of ``models``; the forward passes have none."""
    parts = module.split(".")
    return parts[2] if parts[2] in ("readers", "text") else "passes"


def test_vllm_is_known_to_its_own_integration_alone() -> None:
    for module in modules():
        if "vllm" in {name.split(".")[0] for name in imports(module)}:
            assert module.startswith("eecore.integrations.vllm"), module
        assert "vllm" not in {n.split(".")[0] for n in imports(module, for_types=False)}, module


def test_models_are_read_without_an_extra() -> None:
    """Every package that the core imports, also lazily, is a plain dependency."""
    text = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [")[2]
    plain = set(re.findall(r'^  "([\w-]+)', text.partition("]\n\n")[0], re.MULTILINE))
    assert "torch" in plain
    known = {*plain, *sys.stdlib_module_names, "eecore"}
    for row in ("models", "scheduling", "planning", "decoding", "engine", "generation"):
        for module in on_floor(row):
            strangers = {name.partition(".")[0] for name in imports(module)} - known
            assert strangers <= {"llguidance"}, f"{module} imports {strangers}"


def test_training_never_imports_its_extra_outright() -> None:
    for module in (name for name in on_floor("lab") if name.startswith("eecore.lab.training")):
        lazy = {name for name in imports(module) if name.split(".")[0] in ("transformers", "peft")}
        assert not lazy, f"{module} imports {lazy}: they come with an extra"


def test_the_command_line_needs_nothing_of_the_server() -> None:
    """The server's packages come with an extra; ``eecore serve`` says so where they are missing."""
    extra = {"fastapi", "starlette", "uvicorn", "prometheus_client", "pydantic", "anyio", "msgspec"}
    for module in ["eecore.serving", *on_floor("lab"), *on_floor("cli")]:
        names = {name.split(".")[0] for name in imports(module)}
        assert not names & extra, f"{module} imports {names & extra}"


# Every op has all of its rooms


def test_every_schema_is_run_on_the_cpu() -> None:
    listed = (INCLUDE / "eecore" / "params.h").read_text()
    assert sorted(re.findall(r"X\((\w+), \w+Params\)", listed)) == sorted(schemas())


@pytest.mark.parametrize("op", schemas())
def test_every_op_has_its_rooms(op: str) -> None:
    for path in (
        CSRC / "ops" / f"{op}.cpp",
        CSRC / "cpu" / f"{op}.cpp",
        ROOT / "bench" / "ops" / f"bench_{op}.py",
    ):
        assert path.is_file(), f"{op} has no {path.relative_to(ROOT)}"
    bench = (ROOT / "bench" / "ops" / f"bench_{op}.py").read_text()
    assert "def bench_" in bench
    assert f"ops.{op}" in bench, f"bench_{op}.py does not call ops.{op}"
    camel = "".join(word.capitalize() for word in op.split("_"))
    assert re.search(rf"struct {camel}Params\b", (INCLUDE / "eecore" / "params.h").read_text())
    assert op in ops.__all__
    assert callable(getattr(ops, op))
    tests = op_calls.tests_of(op)
    assert callable(getattr(reference, op, None) or getattr(tests, op)), "no plain PyTorch"
    assert callable(op_calls.fuzzed_call(op))
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel(f"eecore::{op}", "CPU"), f"{op} has no CPU implementation"
    assert has_kernel(f"eecore::{op}", "Meta"), f"{op} has no fake kernel"


def test_every_op_has_a_cuda_kernel_but_those_for_the_cpu_alone() -> None:
    assert set(ops.CPU_ONLY_OPS) <= set(schemas())
    on_cuda = set(schemas()) - set(ops.CPU_ONLY_OPS)
    assert on_cuda == cases.CUDA_OPS
    for op in on_cuda:
        assert (CSRC / "cuda" / f"{op}.cu").is_file()
        assert (INCLUDE / "eecore" / f"{op}.cuh").is_file()
    kernels = {path.stem for path in sources(CSRC / "cuda", ".cu")} & set(schemas())
    assert kernels == on_cuda


def test_no_op_file_is_left_without_a_schema() -> None:
    rooms = [
        *(path.stem for path in (CSRC / "ops").glob("*.cpp")),
        *(path.stem.removeprefix("bench_") for path in (ROOT / "bench" / "ops").glob("bench_*.py")),
    ]
    assert set(rooms) == set(schemas())
    tests = {path.stem for path in (ROOT / "tests" / "ops").glob("test_*.py")}
    assert tests == {op_calls.tests_of(op).__name__ for op in schemas()}


def test_tests_lie_as_the_package_does() -> None:
    tests = ROOT / "tests"
    folders = {path.relative_to(tests).parts[0] for path in tests.glob("*/**/test_*.py")}
    of_none = {"across_ops", "bench", "docs", "emulator", "fuzz"}
    assert folders <= {*FLOORS, *of_none}


# Names


def test_names_carry_meaning() -> None:
    empty = {"util", "utils", "misc", "common", "helper", "helpers"}
    for path in tracked_files():
        relative = path.relative_to(ROOT)
        names = {*relative.parts[:-1], relative.name.split(".")[0]}
        assert not names & empty, f"{relative}: a name that says nothing"


def test_tracked_files_are_small_enough_to_travel() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("these files are no checkout")
    sizes = {path: path.stat().st_size for path in tracked_files()}
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:5]
    whole = sum(sizes.values())
    assert whole < MAX_TRACKED_BYTES, f"{whole:,} bytes, most in {[str(path) for path in largest]}"


def test_no_file_names_a_path_of_one_machine() -> None:
    machine_path = re.compile(r"(?<![\w./$}~-])/(?:work|tmp|home|root|Users|opt|mnt)/")
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            assert not machine_path.search(line), (
                f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
            )
