"""Backends that op tests run over, and the real model that runtime tests use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import cases
from eecore import _C, ops
from get_smollm2 import get_smollm2

HAS_CUDA = torch.cuda.is_available() and ops.build_info()["cuda"]
CPU_CAPABILITIES = ("portable", "avx2", "avx512", "avx512_bf16")


@pytest.fixture(params=[*(f"cpu-{name}" for name in CPU_CAPABILITIES), "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device of each backend in turn: every CPU capability, then CUDA.

    What this machine cannot run is skipped, and counted as skipped.
    """
    if request.param == "cuda":
        op = request.module.__name__.rpartition(".")[2].removeprefix("test_")
        if op not in cases.CUDA_OPS:
            pytest.skip(f"{op} has no CUDA kernel yet")
        if not HAS_CUDA:
            pytest.skip("no GPU, or a build without eecore._cuda")
        yield torch.device("cuda")
        return
    capability = request.param.removeprefix("cpu-")
    if capability not in _C.cpu_capabilities():
        pytest.skip(f"this CPU does not have {capability}")
    before = _C.cpu_capability()
    _C.set_cpu_capability(capability)
    yield torch.device("cpu")
    _C.set_cpu_capability(before)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of SmolLM2-135M-Instruct in float32; made on first use and kept."""
    try:
        return get_smollm2()
    except RuntimeError as error:
        pytest.skip(f"no SmolLM2: {error}")
