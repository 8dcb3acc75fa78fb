"""Where, and how, the tests of the runtime decode.

EECORE_TEST_DEVICE: ``cpu`` unless it says ``cuda``, a GPU, or ``emulated``, the path of CUDA over
the emulator, on the CPU's memory. Those two leave out what is about the CPU's own kernels
(:data:`cpu_only`). EECORE_TEST_DECODING: an ``EngineConfig.decoding`` instead of its default; other
than ``plain`` it leaves out what is about the plain way's calls (:data:`plain_only`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import eecore
import emulated

DEVICE = os.environ.get("EECORE_TEST_DEVICE", "cpu")
if DEVICE not in ("cpu", "cuda", "emulated"):
    raise ValueError(f"EECORE_TEST_DEVICE: expected cpu, cuda or emulated, got {DEVICE!r}")

DECODING = os.environ.get("EECORE_TEST_DECODING", eecore.EngineConfig().decoding)

cpu_only = pytest.mark.skipif(DEVICE != "cpu", reason="about the CPU's kernels")
plain_only = pytest.mark.skipif(DECODING != "plain", reason="about the plain way's calls")

if eecore.EngineConfig().decoding != DECODING:
    defaults = eecore.EngineConfig.__init__.__defaults__
    assert defaults is not None
    eecore.EngineConfig.__init__.__defaults__ = *defaults[:-1], DECODING
    assert eecore.EngineConfig().decoding == DECODING

if DEVICE == "emulated":
    emulated.route(pytest.MonkeyPatch())  # for good


def load(directory: Path, **settings: Any) -> eecore.Model:
    """``eecore.load`` on the device that is asked for."""
    model = eecore.load(directory, device="cuda" if DEVICE == "cuda" else "cpu", **settings)
    if DEVICE == "emulated":
        model.network._on_cpu = False
    return model
