"""Compiled kernels to carry to a machine that has a GPU, which then only links the modules.

    python scripts/cuda_objects.py make build/cuda-objects [--archs 90a-real]
    EECORE_CUDA_OBJECTS=build/cuda-objects python setup.py build_ext --inplace

``make`` compiles on a machine that has nvcc. The folder gets the CUDA part and the CPU kernels as
compressed libraries, and ``objects.json`` with the fingerprint of their sources and settings. CMake
calls ``unpack``, which refuses a folder of other sources. The remaining files to compile depend on
Python or torch; they need CUDA's headers and runtime, but no nvcc.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = "objects.json"
LIBRARIES = ("libeecore_cuda.a", "libeecore_cpu.a")
ARCHS = "90a-real"


class StaleObjects(Exception):
    """A folder whose libraries cannot be linked here; the message has the reason."""


def sources(root: Path = ROOT) -> Iterator[Path]:
    """The files that the libraries are made from."""
    yield root / "CMakeLists.txt"
    for folder in ("csrc", "include"):
        yield from sorted(path for path in (root / folder).rglob("*") if path.is_file())


def fingerprint(archs: str, root: Path = ROOT) -> str:
    """SHA-256 over the names and contents of all sources, and the architectures."""
    digest = hashlib.sha256(archs.encode())
    for path in sources(root):
        digest.update(f"\0{path.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def pack(build: Path, folder: Path, archs: str) -> None:
    """Put the compiled libraries of a finished build of these sources into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as name:
        archive = Path(name) / LIBRARIES[0]
        objects = sorted((build / "CMakeFiles" / "_cuda.dir" / "csrc").rglob("*.o"))
        # The module itself depends on the Python version, so it is compiled where it is linked.
        carried = [str(path) for path in objects if path.name != "module.cpp.o"]
        subprocess.run(["ar", "rcsD", str(archive), *carried], check=True)
        digests = {}
        for path in (archive, build / LIBRARIES[1]):
            data = path.read_bytes()
            digests[path.name] = hashlib.sha256(data).hexdigest()
            (folder / f"{path.name}.xz").write_bytes(lzma.compress(data, preset=6))
    record = {"fingerprint": fingerprint(archs), "archs": archs, "sha256": digests}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def make(folder: Path, archs: str) -> None:
    """Compile the libraries and put them into a folder."""
    build = ROOT / "build" / "cmake-cuda-objects"
    configure = ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", "-DEECORE_CUDA=ON"]
    configure += [f"-DEECORE_CUDA_ARCHS={archs}", "-UEECORE_CUDA_OBJECTS"]
    jobs = os.environ.get("MAX_JOBS")
    compiling = ["cmake", "--build", str(build), *(["-j", jobs] if jobs else [])]
    subprocess.run(configure, check=True)
    subprocess.run([*compiling, "--target", "_cuda", "eecore_cpu"], check=True)
    pack(build, folder, archs)


def unpack(folder: Path, target: Path) -> str:
    """Decompress a folder's libraries into another folder.

    Returns:
        The architectures of the libraries.

    Raises:
        StaleObjects: they were made from other sources, or are damaged.
    """
    again = f"make them again: python scripts/cuda_objects.py make {folder}"
    try:
        record = json.loads((folder / RECORD).read_text())
        archs, expected = str(record["archs"]), record["sha256"]
        found = record["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        raise StaleObjects(
            f"EECORE_CUDA_OBJECTS: expected a folder with {RECORD}, got {folder}; {again}"
        ) from None
    here = fingerprint(archs)
    if found != here:
        raise StaleObjects(
            f"EECORE_CUDA_OBJECTS: expected objects of these sources ({here[:12]}), got objects of "
            f"other sources ({str(found)[:12]}) in {folder}; {again}"
        )
    target.mkdir(parents=True, exist_ok=True)
    for name in LIBRARIES:
        try:
            data = lzma.decompress((folder / f"{name}.xz").read_bytes())
        except (OSError, lzma.LZMAError, EOFError):
            data = b""
        if hashlib.sha256(data).hexdigest() != expected.get(name):
            raise StaleObjects(
                f"EECORE_CUDA_OBJECTS: expected {name} as {RECORD} has it, got another or none in "
                f"{folder}; {again}"
            )
        path = target / name
        if not path.exists() or path.read_bytes() != data:  # a new file would be linked again
            path.write_bytes(data)
    return archs


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="compile the libraries into a folder")
    making.add_argument("folder", type=Path)
    making.add_argument("--archs", default=ARCHS, help=f"CUDA architectures ({ARCHS})")
    unpacking = commands.add_parser("unpack", help="what CMake calls")
    unpacking.add_argument("folder", type=Path)
    unpacking.add_argument("target", type=Path)
    arguments = parser.parse_args(words)
    if arguments.command == "make":
        if shutil.which("cmake") is None:
            sys.exit("cuda_objects: expected cmake, ninja and nvcc on PATH, got none")
        make(arguments.folder, arguments.archs)
        return 0
    try:
        print(unpack(arguments.folder, arguments.target))
    except StaleObjects as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
