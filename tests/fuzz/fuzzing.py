"""The harness of the fuzzers: a seed is an input, and a failing input is known by its seed.

A class of inputs is a module ``fuzz_<name>.py`` in this folder. It has

- ``one(random)``: makes one input, from ``random`` alone, and tries it. True: it was served; False:
  one of the errors that are promised refused it. An AssertionError is a wrong answer, any other
  exception an error that is not ours;
- ``prepare()``, if anything is needed once a process;
- ``LIMIT_S``, if one input may take longer than that of here;
- ``SHARE``, if the test suite can afford another number of inputs than that of here.

Inputs are tried in a child process, so that one which kills it, or never ends, is one finding.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

LIMIT_S = 20.0
START_S = 120.0
SHARE = 150
MAX_FINDINGS = 20
"""The findings after which a class is stopped: they will be one fault, or few."""

FOLDER = Path(__file__).parent
# Fuzzers use modules of the tests, however they are started; a child gets the same path.
PLACES = (FOLDER, FOLDER.parent, FOLDER.parent / "ops")
sys.path += [str(place) for place in PLACES if str(place) not in sys.path]


def classes() -> list[str]:
    """The names of all classes of inputs."""
    return sorted(path.stem.removeprefix("fuzz_") for path in FOLDER.glob("fuzz_*.py"))


def module_of(name: str) -> ModuleType:
    """The module of a class of inputs."""
    return importlib.import_module(f"fuzz_{name}")


def try_one(one: Callable[[Random], bool], random: Random) -> tuple[str, str]:
    """The verdict on an input, and the error if it is a finding."""
    try:
        return ("served" if one(random) else "refused"), ""
    except AssertionError:
        return "wrong", traceback.format_exc()
    except BaseException:
        return "foreign", traceback.format_exc()


@dataclass(frozen=True)
class Finding:
    """An input that failed.

    Attributes:
        kind: "crash", "hang", "wrong" or "foreign".
    """

    seed: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.kind}\n{self.text}"


@dataclass
class Tally:
    """The results of a class of inputs."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    """Inputs by verdict: "served", "refused" and the kinds of findings."""
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def inputs(self) -> int:
        return sum(self.counts.values())

    def add(self, seed: int, verdict: str, text: str) -> None:
        """Count one input."""
        self.counts[verdict] += 1
        if verdict not in ("served", "refused"):
            self.findings.append(Finding(seed, verdict, text))

    def row(self) -> dict[str, Any]:
        """The tally as a row of JSON."""
        kinds = ("served", "refused", "crash", "hang", "wrong", "foreign")
        return {
            "inputs": self.inputs,
            **{kind: self.counts[kind] for kind in kinds},
            "seconds": round(self.seconds, 1),
        }


def run(
    name: str,
    *,
    first: int = 0,
    inputs: int | None = None,
    seconds: float | None = None,
    command: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
) -> Tally:
    """Try the inputs of a class from seed ``first`` on, until one of the limits is reached.

    Args:
        name: the class's name.
        first: the seed of the first input.
        inputs: the maximum number of inputs.
        seconds: the maximum time; the input that is running then is the last.
        command: words before the child's command line.
        environment: variables to add to the child's environment.
    """
    limit = getattr(module_of(name), "LIMIT_S", LIMIT_S)
    tally, seed, started = Tally(name), first, time.monotonic()
    stop = None if inputs is None else first + inputs
    until = None if seconds is None else started + seconds
    while (stop is None or seed < stop) and (until is None or time.monotonic() < until):
        for at, verdict, text in _child(name, seed, stop, limit, command, environment):
            tally.add(at, verdict, text)
            seed = at + 1
            if len(tally.findings) >= MAX_FINDINGS or (until and time.monotonic() >= until):
                break
        if len(tally.findings) >= MAX_FINDINGS:
            break
    tally.seconds = time.monotonic() - started
    return tally


def _child(
    name: str,
    first: int,
    stop: int | None,
    limit: float,
    command: tuple[str, ...],
    environment: dict[str, str] | None,
) -> Iterator[tuple[int, str, str]]:
    """Seed, verdict and error of each input that one child tries, its crash included."""
    reads, writes = os.pipe()
    numbers = [str(-1 if number is None else number) for number in (first, stop, writes)]
    path = os.pathsep.join([str(FOLDER), *filter(None, sys.path)])
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [*command, sys.executable, "-m", "fuzzing", name, *numbers],
            pass_fds=[writes],
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        os.close(writes)
        reports, seed, wait = _Reports(reads), first, START_S
        try:
            while (report := reports.next(wait)) is not None:
                kind, seed, text = report
                if kind == "done":
                    return
                wait = limit
                if kind != "begins":
                    yield seed, kind, text
            child.wait(START_S)
            errors.seek(0)
            said = errors.read().decode(errors="replace")
            if len(said) > 8000:  # a sanitizer says what it was at first, and where at length
                said = f"{said[:6000]}\n...\n{said[-2000:]}"
            yield seed, "crash", f"exit status {child.returncode}\n{said}"
        except TimeoutError:
            yield seed, "hang", f"longer than {wait} s"
        finally:
            os.close(reads)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # and whatever it has started
            child.wait()


class _Reports:
    """Reports of a child, from a pipe."""

    def __init__(self, reads: int) -> None:
        self._reads = reads
        self._rest = b""
        self._lines: deque[bytes] = deque()

    def next(self, wait: float) -> tuple[str, int, str] | None:
        """The child's next report; None at its end, TimeoutError after ``wait`` seconds."""
        while not self._lines:
            if not select.select([self._reads], [], [], wait)[0]:
                raise TimeoutError
            got = os.read(self._reads, 1 << 16)
            if not got:
                return None
            *lines, self._rest = (self._rest + got).split(b"\n")
            self._lines += lines
        kind, seed, text = json.loads(self._lines.popleft())
        return kind, seed, text


def main(name: str, first: int, stop: int, reports: int) -> None:
    """The child's main: try seeds, and report before and after each."""

    def report(kind: str, seed: int, text: str = "") -> None:
        os.write(reports, json.dumps([kind, seed, text[-4000:]]).encode() + b"\n")

    module = module_of(name)
    getattr(module, "prepare", lambda: None)()
    seed = first
    while stop < 0 or seed < stop:
        report("begins", seed)
        report(*_verdict(module, seed))
        seed += 1
    report("done", seed)
    os._exit(0)  # what threads of the inputs still do is no finding


def _verdict(module: ModuleType, seed: int) -> tuple[str, int, str]:
    verdict, text = try_one(module.one, Random(seed))
    return verdict, seed, text


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
