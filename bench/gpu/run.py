"""The plan of a run on a GPU: the most important steps first, each with a time limit.

python -m bench gpu-run [FOLDER [PART ...]] [--seconds 540] [--show]

FOLDER gets gpu-<device>[-decode|-steps].json, written row by row, one .log and one .md. A step that
has passed for this commit and device is not run again: a second call continues an interrupted first
one. bench/gpu.sh runs it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.gpu.kept import UNFINISHED, Kept, about, figures_of
from bench.harness.places import ROOT
from bench.harness.rows import Columns, table_of

FOLDER = ROOT / "build" / "gpu"
SECONDS = 540
MIN_SECONDS = 5
"""The remaining time below which no step is started."""
KILL_SECONDS = 10
OUTCOMES = {0: "passed", UNFINISHED: "no time was left for all of it"}
SUMMARY = re.compile(r"\d+ (?:passed|failed|error)|ERROR SUMMARY|RACECHECK SUMMARY")
TESTS = ("tests/ops", "tests/decoding/test_cuda_path.py", "tests/decoding/test_programs.py")
# Tests of code that no kept run has: bench/results/gpu.md, "What has run".
NEVER_RUN = (
    "tests/decoding/test_coded_on_cuda.py",
    "tests/decoding/test_cache_dtypes.py",
    "tests/decoding/test_head_drafts.py",
    "tests/models/test_t5.py",
)
RUNTIME = ("tests/decoding", "tests/engine", "tests/models", "tests/scheduling")


@dataclass(frozen=True)
class Step:
    """One command of the plan.

    Args:
        name: the step's name.
        part: the part that it belongs to; a call may name parts.
        seconds: its time limit.
        words: the command.
        variables: additional environment variables.
    """

    name: str
    part: str
    seconds: int
    words: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)


def plan(folder: Path, device: str, archs: str) -> list[Step]:
    """All steps in order: those of the default run, then those that must be named.

    Args:
        folder: the folder of the results.
        device: the device's name in names of files.
        archs: CUDA architectures to build for.
    """
    python = sys.executable

    def bench(name: str, seconds: int, *words: str, file: str = "") -> tuple[str, ...]:
        json_file = str(folder / f"gpu-{device}{file}.json")
        told = ("--json", json_file, "--seconds", str(seconds))
        return (python, "-m", "bench", name, *told, *words)

    def decode(seconds: int, *words: str) -> tuple[str, ...]:
        return bench("gpu-decode", seconds, "--only", *words, file="-decode")

    def pytest(*words: str) -> tuple[str, ...]:
        has_workers = importlib.util.find_spec("xdist") is not None
        side_by_side = ("-n", str(min(12, os.cpu_count() or 1))) if has_workers else ()
        always = ("-q", "-p", "no:cacheprovider", "--timeout=120", "--durations=5")
        return (python, "-m", "pytest", *always, *side_by_side, *words)

    only_cuda = ("-k", "cuda and not emulated")
    reduced, on_cuda = {"EECORE_REDUCED_CASES": "1"}, {"EECORE_TEST_DEVICE": "cuda"}
    sanitizer = shutil.which("compute-sanitizer") or "compute-sanitizer"
    sanitize = (python, "-m", "bench.gpu.sanitize", "--sanitizer", sanitizer)
    building = {"EECORE_CUDA": "ON", "EECORE_CUDA_ARCHS": archs}
    build = (python, "setup.py", "build_ext", "--inplace")
    small, many = ("--model", "135m", "1b"), ("--batch", "1", "8", "32")
    return [
        Step("build", "build", 240, build, building),
        Step("modes", "decode", 80, decode(72, "modes")),
        Step("kernels", "kernels", 20, decode(12, "kernels", *small, "--batch", "1", "32")),
        Step("ops", "ops", 60, bench("gpu", 54)),
        Step("prompts", "decode", 25, decode(18, "prompts", "--batch", "1")),
        Step(
            *("speculation", "decode", 40),
            decode(28, "speculation", "transformers", "--model", "1b", *many),
        ),
        Step("tests", "tests", 72, pytest(*TESTS, *only_cuda), reduced),
        Step("never run", "tests", 55, pytest(*NEVER_RUN), {**reduced, **on_cuda}),
        Step("memcheck", "memcheck", 45, (*sanitize, "memcheck")),
        # Steps that only run if they are named.
        Step("runtime", "runtime", 240, pytest(*RUNTIME), on_cuda),
        Step("racecheck", "racecheck", 150, (*sanitize, "racecheck")),
        Step("all tests", "all-tests", 240, pytest(*TESTS, *only_cuda)),
    ]


BY_NAME_ALONE = ("runtime", "racecheck", "all-tests")


def chosen(steps: Sequence[Step], parts: Sequence[str]) -> list[Step]:
    """The build and the steps of these parts; without parts, all but BY_NAME_ALONE."""
    if parts:
        return [step for step in steps if step.part in ("build", *parts)]
    return [step for step in steps if step.part not in BY_NAME_ALONE]


def here() -> tuple[str, str]:
    """The GPU's name in names of files, and its architecture for CMake.

    Raises:
        SystemExit: there is no usable GPU.
    """
    if tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 10):
        raise SystemExit(f"gpu-run: expected torch >= 2.10, got {torch.__version__}")
    if not torch.cuda.is_available():
        raise SystemExit(
            f"gpu-run: expected a GPU that torch {torch.__version__} can use, got none"
        )
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        raise SystemExit(
            f"gpu-run: expected a GPU of compute capability 8.0 or newer, got {major}.{minor}"
        )
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    return name, f"{major}{minor}-real"


def run_step(step: Step, limit: float, log: Path) -> tuple[str, str]:
    """Run a step; its outcome and the summary lines of its output, which goes to the log."""
    own = os.pathsep.join(["python", *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": own, "PYTHONUNBUFFERED": "1", **step.variables}
    with log.open("ab") as output:
        output.write(f"\n== {step.name}: {' '.join(step.words)}\n".encode())
        output.flush()
        begin = output.tell()
        try:
            running = subprocess.Popen(
                step.words,
                cwd=ROOT,
                env=variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=os.setpgrp,  # so that a step's child processes end with it
            )
        except OSError as error:
            return f"FAILED ({error.strerror})", ""
        try:
            status = running.wait(limit)
            outcome = OUTCOMES.get(status, f"FAILED ({status})")
        except subprocess.TimeoutExpired:
            outcome = f"not finished in {limit:.0f} s"
        finally:  # also if this run is ended
            end(running)
    with log.open("rb") as written:
        written.seek(begin)
        lines = written.read().decode(errors="replace").splitlines()
    summaries = [line.strip("= ") for line in lines if SUMMARY.search(line)]
    if outcome.startswith("FAILED"):
        print("\n".join(lines[-30:]), file=sys.stderr)
    return outcome, "; ".join(summaries[-2:])


def end(running: subprocess.Popen[bytes]) -> None:
    """End a process and its child processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(running.pid, number)
            running.wait(KILL_SECONDS)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue


def run_all(steps: Sequence[Step], record: Kept, log: Path, seconds: float) -> bool:
    """Run the steps that have not passed yet, while time is left; whether no step has failed.

    Raises:
        SystemExit: the build has failed, so that no step can run.
    """
    begin, good = time.monotonic(), True
    for step in steps:
        before = record.find(step=step.name)
        if step.part != "build" and before is not None and before["outcome"] == "passed":
            print(f"== {step.name}: passed before", file=sys.stderr)
            continue
        left = seconds - (time.monotonic() - begin)
        outcome, summary, started = "no time was left", "", time.monotonic()
        print(f"== {step.name}", file=sys.stderr, flush=True)
        if left >= MIN_SECONDS:
            outcome, summary = run_step(step, min(step.seconds, left), log)
        spent = round(time.monotonic() - started, 1)
        said = {"step": step.name, "outcome": outcome, "seconds": spent, "summary": summary}
        record.add(said)
        print(f"   {outcome}, {spent:.0f} s {summary}", file=sys.stderr, flush=True)
        good = good and not outcome.startswith("FAILED")
        if step.part == "build" and outcome != "passed":
            raise SystemExit(f"gpu-run: the build {outcome}: see {log}")
    return good


def page(folder: Path, name: str) -> str:
    """All tables of a run."""
    from bench.gpu import decode, gpu

    columns: Columns = (("step", "{step}"), ("outcome", "{outcome}"), ("s", "{seconds:.0f}"))
    tables = {
        "-steps": lambda found: table_of([*columns, ("", "{summary}")], found["rows"]),
        "-decode": decode.table,
        "": gpu.table,
    }
    found = {key: figures_of(folder / f"gpu-{name}{key}.json") for key in tables}
    return "\n\n".join(tables[key](own) for key, own in found.items() if own is not None)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m bench gpu-run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = list(dict.fromkeys(step.part for step in plan(FOLDER, "gpu", "")))
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="build/gpu")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all ({SECONDS})")
    parser.add_argument("--show", action="store_true", help="print the plan, run nothing")
    parser.add_argument("--built", action="store_true", help="python/eecore has the modules")
    arguments = parser.parse_args(words)
    for part in arguments.parts:
        if part not in parts:
            parser.error(f"expected parts among {' '.join(parts)}, got {part}")
    folder = arguments.folder.resolve()
    if arguments.show:
        for step in chosen(plan(folder, "<device>", "<archs>"), arguments.parts):
            print(f"{step.seconds:4d} s  {step.name}: {' '.join(step.words[1:])}")
        return 0
    name, archs = here()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder.mkdir(parents=True, exist_ok=True)
    steps = chosen(plan(folder, name, archs), arguments.parts)
    if arguments.built:
        steps = [step for step in steps if step.part != "build"]
    record = Kept(folder / f"gpu-{name}-steps.json", about(torch.device("cuda")), ("step",))
    good = run_all(steps, record, folder / f"gpu-{name}.log", arguments.seconds)
    text = page(folder, name)
    (folder / f"gpu-{name}.md").write_text(text + "\n")
    print(text)
    return 0 if good else 1
