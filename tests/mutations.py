"""Faults planted one at a time, and which test finds each: ``python tests/mutations.py``.

The faults are in ``tests/mutants.py``. Each is planted in a copy of the working tree, in
``build/mutations``, which is built there; then its tests run until one of them fails. Before, the
same tests run without a fault, and must pass.

What was found goes to ``build/mutations.json`` after each fault. A run that was stopped goes on
there, as long as neither the fault nor the working tree has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "mutations"
RESULTS = ROOT / "build" / "mutations.json"
# Changes to these files change no result.
WITHOUT_EFFECT = ("tests/mutations.py", "tests/mutants.py")
TEST_TIMEOUT_S = 300
"""The time after which a test counts as failed: a fault may make it wait forever."""


def occurrences(mutant: Mutant, root: Path = ROOT) -> int:
    """How often the text that a mutant replaces occurs in its file; 0 without the file."""
    path = root / mutant.file
    return path.read_text().count(mutant.old) if path.exists() else 0


def area(mutant: Mutant) -> str:
    """The part of eecore that a mutant is in."""
    areas = {
        "csrc/cpu/": "CPU kernels",
        "csrc/cuda/": "CUDA kernels, emulated",
        "include/": "CUDA kernels, emulated",
        "csrc/": "checks of the ops",
        "python/eecore/scheduling/": "scheduler, pages, prefix cache",
        "python/eecore/decoding/": "decoding and sampling",
        "python/eecore/planning/": "decoding and sampling",
        "python/eecore/engine/": "engine",
        "python/eecore/serving/": "server",
        "python/eecore/models/": "readers, tokenizer, templates",
        "python/eecore/template_process": "readers, tokenizer, templates",
        "python/eecore/lab/": "training",
        "python/eecore/calibration/": "calibration",
        "python/eecore/integrations/": "integrations",
        "python/eecore/cli/": "commands",
    }
    return next(
        (name for start, name in areas.items() if mutant.file.startswith(start)), "the rest"
    )


def digest(*texts: str | bytes) -> str:
    """A short fingerprint of some texts."""
    made = hashlib.sha256()
    for text in texts:
        made.update(text.encode() if isinstance(text, str) else text)
        made.update(b"\0")
    return made.hexdigest()[:16]


class Copy:
    """The copy of the working tree that faults are planted in.

    Args:
        jobs: compilations at a time.
    """

    def __init__(self, jobs: int) -> None:
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(TREE / "python"),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "EECORE_CUDA": "OFF",
            "MAX_JOBS": str(jobs),
            "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs),
        }
        self.digest = self._bring_up_to_date()

    def _bring_up_to_date(self) -> str:
        """Copy changed files alone; returns a fingerprint of all files."""
        listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        said = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        wanted = [name for name in sorted(said.split("\0")) if name and (ROOT / name).is_file()]
        TREE.mkdir(parents=True, exist_ok=True)
        record = TREE / "build" / "copied"
        for name in record.read_text().splitlines() if record.exists() else []:
            if name not in wanted:
                (TREE / name).unlink(missing_ok=True)
        fingerprints = []
        for name in wanted:
            data = (ROOT / name).read_bytes()
            copied = TREE / name
            if not copied.exists() or copied.read_bytes() != data:
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, copied)
            if name not in WITHOUT_EFFECT and not name.startswith("docs/"):
                fingerprints += [name, digest(data)]
        record.parent.mkdir(exist_ok=True)
        record.write_text("\n".join(wanted))
        return digest(*fingerprints)

    def _run(self, *command: str) -> tuple[int, str]:
        """The exit code and output of a Python command line; all that it started has ended."""
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=TREE,
                env=self._environment,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            said.seek(0)
            return code, said.read().decode(errors="replace")

    def build(self, *, emulator: bool) -> None:
        """Compile what has changed of the module, or of the emulated kernels.

        Raises:
            RuntimeError: with the compiler's words.
        """
        by_tests = "import sys; sys.path.insert(0, 'tests'); import emulated; emulated.build()"
        in_place = ("setup.py", "--quiet", "build_ext", "--inplace")
        code, said = self._run(*(("-c", by_tests) if emulator else in_place))
        if code != 0:
            raise RuntimeError(f"the build failed:\n{said[-4000:]}")

    def finds(self, tests: str, *more: str) -> str:
        """The test that fails; an empty text if none does.

        Raises:
            RuntimeError: no test ran.
        """
        # A thread ends tests that hang in compiled code, which no signal reaches.
        options = ["-x", "-vv", "-p", "no:cacheprovider", *more]
        options += [f"--timeout={TEST_TIMEOUT_S}", "-o", "timeout_method=thread"]
        code, said = self._run("-m", "pytest", *shlex.split(tests), *options)
        if code == 0 and " passed" in said:
            return ""
        # Tests are named as they begin: the last is the one that ended the process, if any did.
        failed = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", said, re.MULTILINE)
        begun = re.findall(r"^(tests/\S+::\w+(?:\[.*?\])?)(?: .*)?$", said, re.MULTILINE)
        if code in (0, pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR) or not (
            failed or begun
        ):
            raise RuntimeError(f"pytest {tests}: no test ran:\n{said[-3000:]}")
        return str((failed or begun)[-1])


def plant(mutant: Mutant, root: Path) -> None:
    """Put a mutant's text in its place.

    Raises:
        ValueError: what it replaces does not occur exactly once.
    """
    if (count := occurrences(mutant, root)) != 1:
        raise ValueError(f"{mutant.name}: expected its old text once in {mutant.file}, got {count}")
    path = root / mutant.file
    path.write_text(path.read_text().replace(mutant.old, mutant.new))


class Results:
    """The test that found each fault, in a file that is written after each.

    Args:
        tree: the fingerprint of the working tree; results of another one are dropped.
        keeps: they are not.
    """

    def __init__(self, tree: str, *, keeps: bool) -> None:
        held = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        if held.get("tree") != tree and not keeps:
            held = {}
        self._tree = tree
        known = {mutant.name: fingerprint(mutant) for mutant in MUTANTS}
        self.found: dict[str, dict[str, Any]] = {
            name: found
            for name, found in held.get("mutants", {}).items()
            if found["fingerprint"] == known.get(name)
        }

    def add(self, mutant: Mutant, by: str, seconds: float) -> None:
        """Keep the test that found a fault; an empty text if none did."""
        result = {"fingerprint": fingerprint(mutant), "by": by, "seconds": round(seconds, 1)}
        self.found[mutant.name] = result
        order = [each.name for each in MUTANTS if each.name in self.found]
        whole = {"tree": self._tree, "mutants": {name: self.found[name] for name in order}}
        partial = RESULTS.with_suffix(".partial")
        partial.write_text(json.dumps(whole, indent=1) + "\n")
        partial.replace(RESULTS)

    def table(self) -> str:
        """How many faults were planted and found, by area, and those that were missed."""
        tried = [mutant for mutant in MUTANTS if mutant.name in self.found]
        missed = [mutant.name for mutant in tried if not self.found[mutant.name]["by"]]
        planted = Counter(map(area, tried))
        found = planted - Counter(area(mutant) for mutant in tried if mutant.name in missed)
        lines = [f"{name}: {found[name]} of {planted[name]} found" for name in planted]
        return "\n".join([*lines, f"missed: {', '.join(missed) or 'none'}"])


def fingerprint(mutant: Mutant) -> str:
    """A fingerprint of all that a result depends on, except the working tree."""
    return digest(mutant.file, mutant.old, mutant.new, mutant.tests)


def hunt(copy: Copy, results: Results, mutants: list[Mutant], *more: str) -> None:
    """Run the tests of mutants of which there is no result yet, with more options of pytest.

    Raises:
        RuntimeError: a test fails without a fault, or a fault does not compile.
    """
    todo = [mutant for mutant in mutants if mutant.name not in results.found]
    for emulator in sorted({mutant.is_emulated for mutant in todo} | {False}):
        copy.build(emulator=emulator)
    for tests in dict.fromkeys(mutant.tests for mutant in todo):
        if by := copy.finds(tests, *more):
            raise RuntimeError(f"{by} fails without a fault")
        say(f"passes without a fault: {tests}")
    for number, mutant in enumerate(todo, 1):
        path = TREE / mutant.file
        original = path.read_text()
        started = time.monotonic()
        try:
            plant(mutant, TREE)
            if mutant.is_compiled:
                copy.build(emulator=mutant.is_emulated)
            by = copy.finds(mutant.tests, *more)
        except RuntimeError as error:
            raise RuntimeError(f"{mutant.name}: {error}") from None
        finally:
            path.write_text(original)
        results.add(mutant, by, time.monotonic() - started)
        say(f"{number}/{len(todo)}: {mutant.name}: {f'found by {by}' if by else 'MISSED'}")
    if any(mutant.is_compiled for mutant in todo):
        for emulator in sorted({mutant.is_emulated for mutant in todo} | {False}):
            copy.build(emulator=emulator)


def say(text: str) -> None:
    print(text, flush=True)


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="faults whose name or file holds this pattern")
    parser.add_argument("--all", action="store_true", help="all tests, not only the short suite")
    parser.add_argument("--jobs", type=int, default=1, help="compilations at a time")
    parser.add_argument("--keep", action="store_true", help="keep results of another working tree")
    options = parser.parse_args(None if arguments is None else list(arguments))
    lost = {m.name: count for m in MUTANTS if (count := occurrences(m)) != 1}
    if lost:
        sys.exit(f"expected the old text of each fault once, got {lost}")
    only = [m for m in MUTANTS if re.search(options.only, f"{m.name} {m.file}")]
    copy = Copy(options.jobs)
    results = Results(copy.digest, keeps=options.keep)
    try:
        hunt(copy, results, only, *(["--all"] if options.all else []))
    except RuntimeError as error:
        sys.exit(str(error))
    print(results.table())


if __name__ == "__main__":
    main()
