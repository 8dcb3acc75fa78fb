"""The machine that a benchmark ran on: for its figures, and in words for its table."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path
from typing import Any

import torch

import eecore


def machine(device: str = "cpu") -> dict[str, str]:
    """The machine's description for the figures of a run."""
    gpu = {"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}
    return {
        **gpu,
        "cpu": cpu_name(),
        "cpu_capability": eecore.build_info()["cpu_capability"],
        "torch": torch.__version__,
    }


def in_words(result: dict[str, Any]) -> str:
    """The machine in words, from the fields that the figures have; old figures have fewer."""
    if "gpu" in result:
        return f"{result['gpu']}, torch {result['torch']}"
    parts = [result["cpu"]] if "cpu" in result else []
    parts.append(f"{result['cpu_capability']} kernels")
    parts += [f"torch {result['torch']}"] if "torch" in result else []
    return ", ".join(parts)


def cpu_name() -> str:
    """The processor's name, if the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def has_amx() -> bool:
    """Whether the processor has AMX tiles."""
    with contextlib.suppress(OSError):
        return " amx_tile " in Path("/proc/cpuinfo").read_text()
    return False
