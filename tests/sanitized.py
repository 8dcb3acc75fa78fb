"""eecore with AddressSanitizer and UndefinedBehaviorSanitizer in its compiled module.

``python tests/sanitized.py -m pytest tests/ops`` runs a Python command line with it. The package
in build/sanitized/package is that of the sources, but for the module; what it does to memory that
is not its own, or what C++ leaves undefined, ends the process with a report.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cmake_build


def runtimes() -> list[Path]:
    """Libraries to preload; none where the compiler has no AddressSanitizer.

    After the sanitizer's runtime follows libstdc++, whose exceptions it intercepts.
    """
    found = []
    for name in ("libasan.so", "libstdc++.so"):
        command = [os.environ.get("CXX", "g++"), f"-print-file-name={name}"]
        try:
            said = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        except OSError:
            return []
        if not Path(said).is_absolute():
            return []
        found.append(Path(said).resolve())
    return found


def environment() -> dict[str, str]:
    """The environment of a process that runs the sanitized eecore, which is built first.

    Raises:
        RuntimeError: with the compiler's words.
    """
    package = cmake_build.build_package("sanitized", "-DEECORE_SANITIZE=ON")
    path = [str(package), *filter(None, sys.path)]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "LD_PRELOAD": " ".join(map(str, runtimes())),
        # Python never frees some memory; too large an allocation fails as without the sanitizer.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


if __name__ == "__main__":
    if not runtimes():
        sys.exit(
            "no AddressSanitizer for this compiler: Debian/Ubuntu: apt install build-essential"
        )
    changed = {**os.environ, **environment()}
    sys.exit(subprocess.run([sys.executable, *sys.argv[1:]], env=changed).returncode)
