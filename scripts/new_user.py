"""The first steps of a new user: README's first screen, then some mistakes; each step timed.

    python scripts/new_user.py            # clones, sets up, tests, installs: some half an hour
    python scripts/new_user.py --built    # installs nothing: with this Python's packages and build

The commands and the Python code are those of README's section Start. They run in a clone of the
last commit of this repository, in a folder that is deleted at the end. The transcript is on stdout.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[1]
SHOWN_LINES = 15
SHAPES = (
    "import torch; from eecore import ops; "
    "ops.exit_confidence_softmax(torch.ones(2, 64), torch.ones(32), torch.ones(9, 64), eps=1e-5)"
)
# Commands, their exit code, and what they say.
MISTAKES = (
    (["eecore", "generate", "no-such-folder", "hello"], 3, "no-such-folder: expected a model"),
    (["python", "-c", SHAPES], 1, "norm_weight: expected float32 [hidden_size=64], got"),
)


def first_screen(readme: str) -> list[list[str]]:
    """The commands of README's section Start: words of its shell blocks and its Python code.

    Torch for a CPU comes before the installation that needs it.
    """
    start = readme.partition("\n## Start\n")[2].partition("\n## ")[0]
    torch = re.search(r"`(pip install torch [^`]+)`", start)
    found = []
    for language, block in re.findall(r"```(\w+)\n(.*?)```", start, re.DOTALL):
        if language == "python":
            found.append(["python", "-c", block])
            continue
        for words in (shlex.split(line, comments=True) for line in block.splitlines()):
            if words[:2] == ["pip", "install"] and torch is not None:
                found.append(shlex.split(torch[1]))
            found += [words] if words else []
    return found


def is_reached(command: list[str]) -> bool:
    """Whether the package index that a command names answers, if it names one."""
    if "--index-url" not in command:
        return True
    try:
        urlopen(command[command.index("--index-url") + 1], timeout=5).close()
    except OSError:
        return False
    return True


class Walk:
    """A clone in a folder, and an environment for its commands."""

    def __init__(self, folder: Path, *, built: bool) -> None:
        self.clone, self.built = folder / "eecore", built
        programs = folder / "venv" / "bin"
        self.environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
        clone = ["git", "clone", "--quiet", str(ROOT), str(self.clone)]
        self.run(clone, cwd=folder)
        if not built:
            self.run([sys.executable, "-m", "venv", str(programs.parent)])
            return
        for module in (ROOT / "python" / "eecore").glob("_*.so"):
            shutil.copy(module, self.clone / "python" / "eecore")
        programs.mkdir(parents=True)
        for name, words in (("python", ""), ("eecore", "-m eecore")):
            script = programs / name
            script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
            script.chmod(0o755)
        self.environment["PYTHONPATH"] = str(self.clone / "python")

    def run(self, words: list[str], code: int = 0, said: str = "", cwd: Path | None = None) -> None:
        """Run a command and print its last lines; exit if it ends or says something else."""
        print(f"\n$ {shlex.join(words)}", flush=True)
        begun = time.perf_counter()
        done = subprocess.run(
            words,
            cwd=cwd or self.clone,
            env=self.environment,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        print(*done.stdout.rstrip().splitlines()[-SHOWN_LINES:], sep="\n")
        print(f"# {time.perf_counter() - begun:.1f} s", flush=True)
        if done.returncode != code or said not in done.stdout:
            raise SystemExit(
                f"{words[0]}: expected exit code {code} and {said!r}, got {done.returncode}"
            )

    def all(self) -> None:
        """Run every step."""
        for words in first_screen((self.clone / "README.md").read_text()):
            if not (self.built and words[0] in ("make", "pip")) and is_reached(words):
                said = "[HassTurnOn [name front door]]" if words[0] == "eecore" else ""
                self.run(words, said=said)
        for words, code, said in MISTAKES:
            self.run(words, code, said)
        self.interrupt()

    def interrupt(self) -> None:
        """Press Ctrl-C while a command starts."""
        words = ["eecore", "generate", "lock the front door"]
        print(f"\n$ {shlex.join(words)}  # and Ctrl-C", flush=True)
        child = subprocess.Popen(
            words, cwd=self.clone, env=self.environment, text=True, stderr=subprocess.PIPE
        )
        maps = Path(f"/proc/{child.pid}/maps")
        while child.poll() is None and "libtorch" not in maps.read_text():
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        error = child.communicate()[1]
        if child.returncode != 130 or "Traceback" in error:
            raise SystemExit(f"Ctrl-C: expected exit code 130, got {child.returncode}: {error}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--built", action="store_true", help="install nothing, compile nothing")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="eecore-walk-") as folder:
        Walk(Path(folder), built=given.built).all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
