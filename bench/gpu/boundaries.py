"""What the boundary between two kernels costs on this GPU: compiles and runs boundaries.cu.

python -m bench.gpu.boundaries [--build]

Where it was compiled before (``--build``, where nvcc is; no GPU is needed) it is only run.
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
    """The place beside the carried kernels; the name says from which source it was compiled."""
    folder = os.environ.get("EECORE_CUDA_OBJECTS") or ROOT / "build" / "cuda-objects"
    return Path(folder) / f"boundaries-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}"


def build(target: Path) -> None:
    """Compile it.

    Raises:
        SystemExit: there is no nvcc, or it fails.
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
