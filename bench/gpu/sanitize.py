"""Tests of the backend cuda under a tool of compute-sanitizer, one process for each file.

python -m bench.gpu.sanitize memcheck|racecheck [--sanitizer PROGRAM] [--one-in N] [PATH...]

Every N-th case is run. Programs are only tested by memcheck: racecheck crashes in graphs with
conditional nodes (seen with CUDA 13.0). The output of a file's tests is printed if they fail; the
last line is a summary. bench/gpu.sh runs it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OPS = ("tests/ops",)
PROGRAMS = ("tests/decoding/test_cuda_path.py", "tests/decoding/test_programs.py")
FOUND, NO_TESTS = 9, 5  # exit codes: the sanitizer's when it finds something, and pytest's
VARIABLES = {"EECORE_REDUCED_CASES": "1", "PYTEST_ADDOPTS": ""}
# Gives each tensor an allocation of its own; graphs need the cached memory to stay.
OF_OPS = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def files_of(paths: Sequence[str]) -> list[Path]:
    """The test files of folders, and the files among the paths."""
    found = [ROOT / path for path in paths]
    return [file for path in found for file in ([path] if path.is_file() else path.glob("test_*"))]


def run(command: Sequence[str], file: Path, one_in: int) -> tuple[int, str]:
    """The exit code of a command on a file of tests, and its output."""
    variables = {**VARIABLES, **(OF_OPS if file.parent.name == "ops" else {})}
    done = subprocess.run(
        [*command, str(file)],
        cwd=ROOT,
        env={**os.environ, **variables, "EECORE_ONE_CASE_IN": str(one_in)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.gpu.sanitize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tool", choices=["memcheck", "racecheck"])
    parser.add_argument("paths", nargs="*", help="paths of tests in the checkout")
    parser.add_argument("--sanitizer", default="compute-sanitizer")
    parser.add_argument("--one-in", type=int, default=8, help="run every N-th case; 1 runs all")
    arguments = parser.parse_intermixed_args(words)
    checked = [arguments.sanitizer, "--error-exitcode", str(FOUND), "--tool", arguments.tool]
    tests = ["-m", "pytest", "-k", "cuda and not emulated", "-p", "no:cacheprovider"]
    passed, bad = 0, []
    usual = OPS if arguments.tool == "racecheck" else (*OPS, *PROGRAMS)
    paths = arguments.paths or usual
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {
            pool.submit(run, [*checked, sys.executable, *tests], file, arguments.one_in): file
            for file in files_of(paths)
        }
        for done in as_completed(running):
            (status, said), file = done.result(), running[done].relative_to(ROOT)
            if status == NO_TESTS:
                continue
            count = re.search(r"(\d+) passed", said)
            passed += int(count.group(1)) if count else 0
            print(f"{file}: {count.group() if count else 'none passed'}", flush=True)
            if status != 0:
                bad.append(file.name)
                print(said, flush=True)
    print(f"{passed} passed; found something or failed: {', '.join(bad) or 'none'}")
    return 1 if bad or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
