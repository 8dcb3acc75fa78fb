"""The cost of the boundary between two kernels on this GPU: compiles and runs boundaries.cu.

python -m bench.gpu.boundaries [--build]

A program that was compiled before is only run. ``--build`` compiles it on a machine with nvcc; no
GPU is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.harness.places import ROOT

SOURCE = ROOT / "bench" / "gpu" / "boundaries.cu"
ARCH = "arch=compute_90a,code=sm_90a"


def program() -> Path:
    """The program's file, in the folder of the carried kernels; its name has the source's hash."""
    folder = os.environ.get("EECORE_CUDA_OBJECTS") or ROOT / "build" / "cuda-objects"
    return Path(folder) / f"boundaries-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}"


def build(target: Path) -> None:
    """Compile the program.

    Raises:
        SystemExit: nvcc is missing or fails.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    nvcc = os.environ.get("CUDACXX", "nvcc")
    options = ("-O3", "-std=c++17", "-gencode", ARCH)
    try:
        subprocess.run([nvcc, *options, str(SOURCE), "-o", str(target)], check=True)
    except FileNotFoundError:
        raise SystemExit("boundaries: expected nvcc on PATH or in CUDACXX, got none") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"boundaries: nvcc ended with {error.returncode}") from None


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.gpu.boundaries",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--build", action="store_true", help="compile it, run nothing")
    arguments = parser.parse_args(words)
    target = program()
    if not target.exists():
        build(target)
    return 0 if arguments.build else subprocess.run([str(target)]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
