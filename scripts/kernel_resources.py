"""The resources of each CUDA kernel, read from the built eecore._cuda.

    python scripts/kernel_resources.py            a table of all instantiations
    python scripts/kernel_resources.py --write    into tests/kernel_resources.json

The cubins that nvcc puts into the module are ELF files with each kernel's registers, static shared
memory and stack frame; reading them needs neither a GPU nor cuobjdump. A stack frame that is not 0
means spilled registers or an array that does not fit into registers.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "kernel_resources.json"

FATBIN_MAGIC = 0xBA55ED50
FATBIN_ELF = 2
# Attributes of .nv.info: pairs of a symbol and a number.
FRAME_SIZE, MIN_STACK_SIZE, REGISTERS = 0x11, 0x12, 0x2F
NOBITS = 8
# From sm_90 on the section's size includes the first KiB of shared memory, which is the system's.
SYSTEM_SHARED_BYTES = 1024


@dataclass(frozen=True)
class Resources:
    """The resources of one instantiation of a kernel on one architecture."""

    registers: int
    shared: int
    """Bytes of static shared memory, without the dynamic memory of a launch."""
    stack: int
    """Bytes of local memory of a thread."""


@dataclass(frozen=True)
class Section:
    name: str
    size: int
    data: bytes


def sections(elf: bytes) -> list[Section]:
    """The sections of a 64-bit little-endian ELF file."""
    table, count, names_index = (
        struct.unpack_from("<Q", elf, 0x28)[0],
        *struct.unpack_from("<HH", elf, 0x3C),
    )
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + 64 * i) for i in range(count)]
    names = headers[names_index][4]
    found = []
    for name, kind, _flags, _address, offset, size, _link, _info, _align, _entry in headers:
        end = elf.index(b"\0", names + name)
        text = elf[names + name : end].decode()
        data = b"" if kind == NOBITS else elf[offset : offset + size]
        found.append(Section(text, size, data))
    return found


def cubins(module: Path) -> Iterator[bytes]:
    """The compiled code of each translation unit and architecture."""
    fatbins = next(s.data for s in sections(module.read_bytes()) if s.name == ".nv_fatbin")
    at = 0
    while at + 16 <= len(fatbins):
        magic, _version, header_size, size = struct.unpack_from("<IHHQ", fatbins, at)
        if magic != FATBIN_MAGIC:  # padding before the next one
            at += 8
            continue
        entry, end = at + header_size, at + header_size + size
        while entry < end:
            kind, _version, header_size, size = struct.unpack_from("<HHIQ", fatbins, entry)
            body = fatbins[entry + header_size : entry + header_size + size]
            if kind == FATBIN_ELF:
                if not body.startswith(b"\x7fELF"):
                    raise RuntimeError(
                        f"{module}: expected plain cubins, got compressed ones: build with "
                        "NVCC_APPEND_FLAGS=--no-compress"
                    )
                yield body
            entry += header_size + size
        at = end


def numbers_by_symbol(info: bytes, attribute: int) -> dict[int, int]:
    """The numbers of one attribute of .nv.info, by the index of the symbol."""
    found: dict[int, int] = {}
    at = 0
    while at < len(info):
        form, kind, size = struct.unpack_from("<BBH", info, at)
        if form == 4 and kind == attribute:
            symbol, number = struct.unpack_from("<II", info, at + 4)
            found[symbol] = number
        at += 4 + (size if form == 4 else 0)
    return found


def architecture_of(cubin: bytes, note: bytes | None) -> str:
    """A cubin's architecture, by its note for tools, else (CUDA 12) by the flags of its header."""
    if note is None:
        flags = struct.unpack_from("<I", cubin, 0x30)[0]
        return f"sm_{flags & 0xFF}{'a' if flags & 0x800 else ''}"
    arch = re.search(rb"-arch (sm_\w+)", note)
    if arch is None:
        raise RuntimeError("expected a cubin with an architecture, got none")
    return arch[1].decode()


def kernels(cubin: bytes) -> Iterator[tuple[str, str, int, Resources]]:
    """(mangled name, architecture, index of its symbol, resources) of each kernel of a cubin."""
    by_name = {section.name: section for section in sections(cubin)}
    note = by_name.get(".note.nv.tkinfo")
    arch = architecture_of(cubin, note and note.data)
    names = by_name[".strtab"].data
    table = by_name[".symtab"].data
    info = by_name[".nv.info"].data
    frames, stacks = numbers_by_symbol(info, FRAME_SIZE), numbers_by_symbol(info, MIN_STACK_SIZE)
    system_bytes = SYSTEM_SHARED_BYTES if ".nv.shared.reserved.0" in by_name else 0
    for symbol, registers in numbers_by_symbol(info, REGISTERS).items():
        start = struct.unpack_from("<I", table, 24 * symbol)[0]
        kernel = names[start : names.index(b"\0", start)].decode()
        shared = by_name.get(f".nv.shared.{kernel}")
        shared_bytes = max(shared.size - system_bytes, 0) if shared else 0
        stack = max(frames.get(symbol, 0), stacks.get(symbol, 0))
        yield kernel, arch, symbol, Resources(registers, shared_bytes, stack)


def shortened(demangled: str) -> str:
    """`kernel<arguments>` of a demangled signature."""
    depth = 0
    for i, letter in enumerate(demangled):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            demangled = demangled[:i]
            break
    return re.sub(r"^void |eecore::(cuda::)?|\((int|bool)\)", "", demangled)


def demangled(names: list[str]) -> list[str]:
    """`kernel<arguments>` of mangled names."""
    text = "\n".join(names)
    done = subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True)
    return [shortened(name) for name in done.stdout.splitlines()]


def compiler_of(module: Path) -> str:
    """The version of the ptxas that made a module, "V13.0.88"."""
    versions = {
        match[1].decode()
        for cubin in cubins(module)
        for section in sections(cubin)
        if section.name == ".note.nv.tkinfo" and (match := re.search(rb", (V[\d.]+)", section.data))
    }
    return " ".join(sorted(versions))


def resources_of(module: Path) -> dict[str, Resources]:
    """Resources by "kernel<arguments> architecture", sorted."""
    found = [kernel for cubin in cubins(module) for kernel in kernels(cubin)]
    names = demangled([name for name, *_ in found])
    listed = (
        (f"{name} {arch}", resources)
        for name, (_, arch, _, resources) in zip(names, found, strict=True)
    )
    return dict(sorted(listed))


def built_module() -> Path | None:
    """eecore._cuda as built in this checkout; None without a build."""
    return next(iter(sorted((ROOT / "python" / "eecore").glob("_cuda*.so"))), None)


def record(module: Path) -> str:
    """The text of tests/kernel_resources.json."""
    lines = ",\n".join(
        f"    {json.dumps(name)}: {json.dumps(asdict(resources))}"
        for name, resources in resources_of(module).items()
    )
    compiler = json.dumps(compiler_of(module))
    return f'{{\n  "compiler": {compiler},\n  "kernels": {{\n{lines}\n  }}\n}}\n'


def table(module: Path) -> str:
    rows = [("kernel", "arch", "registers", "shared", "stack")]
    for name, resources in resources_of(module).items():
        kernel, _, arch = name.rpartition(" ")
        rows.append((kernel, arch, *map(str, asdict(resources).values())))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("module", nargs="?", type=Path, help="python/eecore/_cuda*.so")
    parser.add_argument("--write", action="store_true", help=f"into {RECORD.relative_to(ROOT)}")
    arguments = parser.parse_args()
    module = arguments.module or built_module()
    if module is None:
        sys.exit("no eecore._cuda here: build it with EECORE_CUDA=ON, on a machine that has nvcc")
    if arguments.write:
        RECORD.write_text(record(module))
    else:
        print(table(module))


if __name__ == "__main__":
    main()
