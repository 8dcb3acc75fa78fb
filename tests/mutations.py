"""Faults planted one at a time, and which test finds each: ``python tests/mutations.py``.

The faults are in ``tests/mutants.py``. Each is planted in a copy of the working tree, in
``build/mutations``, which is built there; then its tests run until one of them fails. First the
same tests run without a fault, and must pass. The long suite holds all tests of the short one, so
that it only runs for faults that the short suite missed.

What was found goes to ``tests/mutations.json`` after each fault: a run that was stopped goes on
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
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "mutations"
RESULTS = ROOT / "tests" / "mutations.json"
PAGE = ROOT / "docs" / "development.md"
BEGIN, END = "<!-- mutations: begin -->", "<!-- mutations: end -->"
# Changes to these files change no result.
WITHOUT_EFFECT = ("tests/mutations.json", "tests/mutations.py", "tests/mutants.py")
TEST_TIMEOUT_S = 300
"""The time after which a test counts as failed: a fault may make it wait forever."""

Suite = Literal["short", "long"]
SUITES: tuple[Suite, ...] = ("short", "long")


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

    def finds(self, tests: str, suite: Suite) -> str:
        """The test that fails; an empty text if none does.

        Raises:
            RuntimeError: no test ran.
        """
        # A thread ends tests that hang in compiled code, which no signal reaches.
        options = ["-x", "-vv", "-p", "no:cacheprovider"]
        options += [f"--timeout={TEST_TIMEOUT_S}", "-o", "timeout_method=thread"]
        options += ["--all"] if suite == "long" else []
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
    """The results, in a file that is written after each fault.

    Args:
        tree: the fingerprint of the working tree; results of another one are dropped.
        keeps: they are not.
    """

    def __init__(self, tree: str, *, keeps: bool) -> None:
        held = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        if held.get("tree") != tree and not keeps:
            held = {}
        self._tree = tree
        self.passed: dict[str, str] = held.get("passed", {})
        """Tests that pass without a fault, by suite and arguments, and the tree they ran on."""
        known = {mutant.name: fingerprint(mutant) for mutant in MUTANTS}
        self.found: dict[str, dict[str, Any]] = {
            name: found
            for name, found in held.get("mutants", {}).items()
            if found["fingerprint"] == known.get(name)
        }

    def passes(self, tests: str, suite: Suite) -> bool:
        """Whether tests are known to pass on this tree."""
        return self.passed.get(f"{suite}: {tests}") == self._tree

    def add_passed(self, tests: str, suite: Suite) -> None:
        self.passed[f"{suite}: {tests}"] = self._tree
        self._write()

    def of(self, mutant: Mutant, suite: Suite) -> dict[str, Any] | None:
        """A suite's result for a mutant; None before it ran."""
        found: dict[str, Any] | None = self.found.get(mutant.name, {}).get(suite)
        return found

    def add(self, mutant: Mutant, suite: Suite, by: str, seconds: float) -> None:
        own = self.found.setdefault(mutant.name, {"fingerprint": fingerprint(mutant)})
        own[suite] = {"found": bool(by), "by": by, "seconds": round(seconds, 1)}
        self._write()

    def _write(self) -> None:
        order = [mutant.name for mutant in MUTANTS if mutant.name in self.found]
        whole = {
            "tree": self._tree,
            "mutants": {name: self.found[name] for name in order},
            "passed": dict(sorted(self.passed.items())),
        }
        partial = RESULTS.with_suffix(".partial")
        partial.write_text(json.dumps(whole, indent=1) + "\n")
        partial.replace(RESULTS)


def fingerprint(mutant: Mutant) -> str:
    """A fingerprint of all that a result depends on, except the working tree."""
    return digest(mutant.file, mutant.old, mutant.new, mutant.tests)


def hunt(copy: Copy, results: Results, mutants: list[Mutant], suite: Suite) -> None:
    """Run a suite for mutants of which it has no result yet.

    Raises:
        RuntimeError: a test fails without a fault, or a fault does not compile.
    """
    todo = [mutant for mutant in mutants if results.of(mutant, suite) is None]
    for emulator in sorted({mutant.is_emulated for mutant in todo} | {False}):
        copy.build(emulator=emulator)
    for tests in dict.fromkeys(mutant.tests for mutant in todo):
        if not results.passes(tests, suite):
            if by := copy.finds(tests, suite):
                raise RuntimeError(f"{by} fails without a fault")
            say(f"{suite}: passes without a fault: {tests}")
            results.add_passed(tests, suite)
    for number, mutant in enumerate(todo, 1):
        path = TREE / mutant.file
        original = path.read_text()
        started = time.monotonic()
        try:
            plant(mutant, TREE)
            if mutant.is_compiled:
                copy.build(emulator=mutant.is_emulated)
            by = copy.finds(mutant.tests, suite)
        except RuntimeError as error:
            raise RuntimeError(f"{mutant.name}: {error}") from None
        finally:
            path.write_text(original)
        results.add(mutant, suite, by, time.monotonic() - started)
        said = f"found by {by}" if by else "MISSED"
        say(f"{suite}: {number}/{len(todo)}: {mutant.name}: {said}")
    if any(mutant.is_compiled for mutant in todo):
        for emulator in sorted({mutant.is_emulated for mutant in todo} | {False}):
            copy.build(emulator=emulator)


def say(text: str) -> None:
    print(text, flush=True)


def table(results: Results) -> str:
    """The mutants that each suite found, by area, and those that none found."""
    lines = [
        "| where | planted | found by the short suite | by the long one |",
        "|---|---|---|---|",
    ]
    counts: dict[str, list[int]] = {}
    missed: list[str] = []
    for mutant in MUTANTS:
        of_area = counts.setdefault(area(mutant), [0, 0, 0])
        short, whole = results.of(mutant, "short"), results.of(mutant, "long")
        by_short = short is not None and short["found"]
        by_long = by_short or (whole is not None and whole["found"])
        for i, counted in enumerate((True, by_short, by_long)):
            of_area[i] += counted
        if not by_long:
            missed.append(f"`{mutant.name}`")
    for name, of_area in counts.items():
        lines.append(f"| {name} | {' | '.join(map(str, of_area))} |")
    total = [sum(column) for column in zip(*counts.values(), strict=True)]
    lines.append(f"| all | {' | '.join(map(str, total))} |")
    lines += ["", f"Missed: {', '.join(missed) if missed else 'none'}."]
    return "\n".join(lines)


def write_table(results: Results) -> None:
    """Put the table into the page, between its marks."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise RuntimeError(f"{PAGE.name}: expected {BEGIN} and {END}, got a page without")
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}")


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="faults whose name or file holds this pattern")
    parser.add_argument(
        "--suite", choices=SUITES, default="short", help="long: after short, for what it missed"
    )
    parser.add_argument("--jobs", type=int, default=1, help="compilations at a time")
    parser.add_argument("--keep", action="store_true", help="keep results of another working tree")
    parser.add_argument("--write", action="store_true", help=f"the table into {PAGE.name}")
    options = parser.parse_args(None if arguments is None else list(arguments))
    lost = {m.name: count for m in MUTANTS if (count := occurrences(m)) != 1}
    if lost:
        sys.exit(f"expected the old text of each fault once, got {lost}")
    only = [m for m in MUTANTS if re.search(options.only, f"{m.name} {m.file}")]
    copy = Copy(options.jobs)
    results = Results(copy.digest, keeps=options.keep)
    try:
        hunt(copy, results, only, "short")
        if options.suite == "long":
            missed = [m for m in only if not (results.of(m, "short") or {}).get("found")]
            hunt(copy, results, missed, "long")
    except RuntimeError as error:
        sys.exit(str(error))
    if options.write:
        write_table(results)
    print(table(results))


if __name__ == "__main__":
    main()
