"""The instructions of CUDA kernels, read from the built eecore._cuda with nvdisasm.

    python scripts/kernel_sass.py "paged_attention_combine_kernel<BFloat16, 16> sm_90a"

nvdisasm comes with the CUDA toolkit, the package nvidia-cuda-nvdisasm, or triton; the environment
variable NVDISASM can name one.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import kernel_resources

KERNEL = re.compile(r"\.text\.(\S+):")
FLOAT16 = "7Float16"
"""The type in mangled names."""
LABEL = re.compile(r"(\.L_x_\d+):")
TARGET = re.compile(r"\((\.L_x_\d+)\)")
INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*);")


@dataclass(frozen=True)
class Instruction:
    opcode: str
    """The opcode with its modifiers, such as "LDG.E.128"."""
    operands: str
    is_conditional: bool
    """Whether the instruction has a predicate."""

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]


@dataclass(frozen=True)
class Code:
    """The code of one kernel."""

    lines: list[Instruction]
    labels: dict[str, int]
    """The index of the line after each label."""

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.lines)

    def before(self, opcode: str) -> list[Instruction]:
        """The instructions that a thread can reach before any ``opcode``, on all branches.

        Calls are passed over, since only arithmetic is called.
        """
        seen: set[int] = set()
        to_see = [0]
        while to_see:
            at = to_see.pop()
            if at in seen or self.lines[at].opcode == opcode:
                continue
            seen.add(at)
            to_see += self._next(at)
        return [self.lines[at] for at in sorted(seen)]

    def _next(self, at: int) -> list[int]:
        line = self.lines[at]
        following = [at + 1] if at + 1 < len(self.lines) else []
        if line.name == "BRA":
            found = TARGET.search(line.operands)
            if found is None:
                raise ValueError(f"expected a branch to a label, got {line}")
            # A branch can also depend on a predicate among its operands.
            goes_on = line.is_conditional or "P" in line.operands.split("`")[0]
            return [self.labels[found[1]], *(following if goes_on else [])]
        if line.name == "BSYNC":  # jumps to the label in the BSSY of its barrier
            barrier = line.operands.split()[-1]
            begin = next(
                other.operands
                for other in reversed(self.lines[:at])
                if other.name == "BSSY" and other.operands.split(",")[0] == barrier
            )
            label = TARGET.search(begin)
            assert label is not None
            return [self.labels[label[1]], *(following if line.is_conditional else [])]
        return [] if line.name in ("EXIT", "RET") and not line.is_conditional else following


def find_nvdisasm() -> Path | None:
    """The nvdisasm of NVDISASM, on PATH, in the CUDA toolkit, or in a package."""
    if named := os.environ.get("NVDISASM"):
        return Path(named)
    if on_path := shutil.which("nvdisasm"):
        return Path(on_path)
    toolkits = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    if nvcc := shutil.which("nvcc"):
        toolkits.append(Path(nvcc).resolve().parent.parent)
    places = [toolkit / "bin" / "nvdisasm" for toolkit in toolkits]
    for package, folder in (("nvidia", "cu13/bin"), ("triton", "backends/nvidia/bin")):
        found = importlib.util.find_spec(package)
        roots = (found and found.submodule_search_locations) or ()
        places += [Path(root) / folder / "nvdisasm" for root in roots]
    return next((place for place in places if place.is_file()), None)


def instruction_of(line: str) -> Instruction | None:
    """The instruction of a line of nvdisasm's output; None if the line has none."""
    match = INSTRUCTION.match(line)
    return match and Instruction(match[2], match[3].strip(), match[1] is not None)


def code_of(cubin: bytes, nvdisasm: Path, symbols: Iterable[int]) -> dict[str, Code]:
    """The code of some kernels of a cubin, by their mangled names.

    Args:
        cubin: the cubin.
        nvdisasm: the disassembler.
        symbols: the indices of the kernels' symbols.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(nvdisasm), "--print-code", "--no-dataflow"]
        command += ["--cuda-function-index", ",".join(map(str, symbols)), file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{nvdisasm}: {done.stderr.strip()}")
    found: dict[str, Code] = {}
    kernel = Code([], {})
    for line in done.stdout.splitlines():
        if match := KERNEL.match(line):
            kernel = found[match[1]] = Code([], {})
        elif match := LABEL.match(line):
            kernel.labels[match[1]] = len(kernel.lines)
        elif instruction := instruction_of(line):
            kernel.lines.append(instruction)
    return found


def kernels_of(module: Path, nvdisasm: Path, few: bool = False) -> dict[str, Code]:
    """The code of each kernel by "kernel<arguments> architecture", as in kernel_resources.

    Args:
        module: the built module.
        nvdisasm: the disassembler; it takes half a minute for an architecture.
        few: whether kernels of the newest architecture are enough, without those of float16, whose
            code is that of bfloat16 but for its type.
    """
    cubins = {
        cubin: list(kernel_resources.kernels(cubin)) for cubin in kernel_resources.cubins(module)
    }
    newest = max((arch for kernels in cubins.values() for _, arch, _, _ in kernels), default="")

    def listed(cubin: bytes) -> list[tuple[str, str, Code]]:
        wanted = {
            name: (arch, symbol)
            for name, arch, symbol, _ in cubins[cubin]
            if not few or (arch == newest and FLOAT16 not in name)
        }
        symbols = [symbol for _, symbol in wanted.values()]
        code = code_of(cubin, nvdisasm, symbols) if wanted else {}
        return [(name, arch, code[name]) for name, (arch, _) in wanted.items()]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        listings = list(pool.map(listed, cubins))
    found = [kernel for listing in listings for kernel in listing]
    names = kernel_resources.demangled([name for name, _, _ in found])
    return {f"{name} {arch}": code for name, (_, arch, code) in zip(names, found, strict=True)}


def counts_of(code: Code) -> Counter[str]:
    """The count of each instruction, without modifiers."""
    return Counter(instruction.name for instruction in code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kernel", help="a regular expression")
    arguments = parser.parse_args()
    module, nvdisasm = kernel_resources.built_module(), find_nvdisasm()
    if module is None or nvdisasm is None:
        sys.exit("expected eecore._cuda, built here with EECORE_CUDA=ON, and an nvdisasm")
    for name, code in sorted(kernels_of(module, nvdisasm).items()):
        if re.search(arguments.kernel, name):
            print(f"{name}:")
            print("\n".join(f"  {line.opcode} {line.operands}" for line in code))


if __name__ == "__main__":
    main()
