"""The memory that a process can still take, by the machine, its container, and its own limits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Free memory in bytes. A limit that cannot be read does not count."""
    return max(0, min([_of_machine(), *_of_limits(), *_of_cgroups()]))


def _of_machine() -> int:
    """Memory available without swapping, caches of files included."""
    for line in _lines(PROC / "meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_limits() -> Iterator[int]:
    """``ulimit -v`` and ``ulimit -d``, less the memory in use."""
    try:
        import resource
    except ImportError:  # not a Unix
        return
    sizes = next(iter(_lines(PROC / "self/statm")), "").split()
    for limit, column in ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5)):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            taken = int(sizes[column]) * os.sysconf("SC_PAGE_SIZE") if sizes else 0
            yield most - taken


def _of_cgroups() -> Iterator[int]:
    """The memory limit of each group that the process is in, less the memory in use."""
    for line in _lines(PROC / "self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, names = CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = CGROUPS / "memory"
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        own = root / path.strip().lstrip("/")
        # Each limits the groups below. In a container the own group may be mounted as the root.
        for group in (own, *own.parents):
            if group == root or root in group.parents:
                yield from _of_group(group, *names)


def _of_group(group: Path, limit: str, usage: str, caches: str) -> Iterator[int]:
    most, taken = _number(group / limit), _number(group / usage)
    if most is None or taken is None:
        return
    for line in _lines(group / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == caches and value.isdigit():
            taken -= int(value)  # caches of files, which are given up when memory is needed
    yield most - taken


def _number(path: Path) -> int | None:
    """The number in the first line of a file; None for "max", and where there is no such file."""
    text = next(iter(_lines(path)), "")
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
