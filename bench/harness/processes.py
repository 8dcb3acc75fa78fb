"""Programs of other engines, each a process that answers lines of JSON with lines of JSON.

They run as modules of this checkout, which is on their path. A program with another interpreter
gets none of the other paths of this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bench.harness import peers
from bench.harness.places import ROOT

START_TIMEOUT_S = 600
ANSWER_TIMEOUT_S = 300


def own_paths() -> list[Path]:
    """The import paths of this process."""
    return [Path(path) for path in sys.path if path]


class EngineError(Exception):
    """An engine could not run; the message has the reason."""


@dataclass
class Process:
    """A program that answers lines of JSON with lines of JSON."""

    command: list[str | Path]
    threads: int
    paths: Sequence[Path] = ()
    """Import paths in addition to its interpreter's and this checkout."""
    process: subprocess.Popen[str] = field(init=False)
    log: IO[str] = field(init=False)

    def __post_init__(self) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment(self.threads, self.paths),
        )

    def send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # answer() raises the error
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def answer(self, timeout: float) -> dict[str, Any]:
        """The next answer; EngineError if there is none within ``timeout`` seconds."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.close()
            raise EngineError(self._last_words() if ready else f"no answer in {timeout} s")
        return dict(json.loads(line))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def _last_words(self) -> str:
        self.log.seek(0)
        lines = [line.strip() for line in self.log if line.strip()]
        return (lines[-1] if lines else f"exit code {self.process.returncode}")[:300]


def peak_bytes(process: int) -> int:
    """The largest resident memory that a running program has had; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0


def environment(threads: int, paths: Sequence[Path] = ()) -> dict[str, str]:
    """The environment of an engine's process: the caller's, with only ``threads`` for threads."""
    steering = ("OMP_", "GOMP_", "KMP_", "MKL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    cache = peers.DIRECTORY / "cache"
    return kept | {
        "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT])),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
    }
