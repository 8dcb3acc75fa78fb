"""A share of the fuzzers with AddressSanitizer and UndefinedBehaviorSanitizer in every kernel.

``make sanitize MINUTES=10`` is for more, and for the tests of the ops.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import fuzzing
import sanitized
from eecore import _C

pytestmark = pytest.mark.long  # builds all kernels anew
INPUTS = 300

POISONED = """
import ctypes
import torch
from eecore import _C, ops

def one(random):
    for capability in {capabilities!r}:
        _C.set_cpu_capability(capability)
        table = torch.ones(4, 64)
        if {poisons}:
            runtime = ctypes.CDLL(None)
            last = ctypes.c_void_p(table.data_ptr() + table.nbytes - 8)
            runtime.__asan_poison_memory_region(last, ctypes.c_size_t(8))
        out = torch.zeros(1, 64)
        ops.embed_tokens(torch.tensor([3]), table, out=out)
    return True
"""


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The environment of the sanitized module, which is built first."""
    if not sanitized.runtimes():
        pytest.skip("no AddressSanitizer for this compiler")
    return sanitized.environment()


def write_class(text: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of inputs that is there for one test."""
    (folder / f"fuzz_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, f"fuzz_{name}", raising=False)


def tried(environment: dict[str, str], folder: Path, inputs: int, name: str) -> fuzzing.Tally:
    """The harness's tally of a class of inputs, sanitized; its module may be in a folder."""
    path = os.pathsep.join((environment["PYTHONPATH"], str(folder), str(fuzzing.FOLDER)))
    return fuzzing.run(
        name, first=10**6, inputs=inputs, environment={**environment, "PYTHONPATH": path}
    )


CAPABILITIES = ("portable", "avx2", "avx512", "avx512_bf16")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_kernel_that_reads_what_it_must_not_is_a_finding(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: str
) -> None:
    """Kernels of each capability are sanitized, and the report reaches the harness."""
    if capability not in _C.cpu_capabilities():
        pytest.skip(f"this CPU does not have {capability}")
    text = POISONED.format(capabilities=[capability], poisons=True)
    write_class(text, "poisoned", tmp_path, monkeypatch)
    tally = tried(environment, tmp_path, 1, "poisoned")
    assert tally.counts == {"crash": 1}
    said = tally.findings[0].text
    assert "AddressSanitizer: use-after-poison" in said
    assert f"eecore::cpu::{capability}::" in said


def test_what_is_undefined_ends_the_process(environment: dict[str, str]) -> None:
    """UBSan's checks in the module abort."""
    folder = Path(environment["PYTHONPATH"].split(os.pathsep)[0])
    (module,) = (folder / "eecore").glob("_C*.so")
    symbols = module.read_bytes()
    for check in ("add_overflow", "shift_out_of_bounds", "out_of_bounds", "type_mismatch_v1"):
        assert f"__ubsan_handle_{check}_abort".encode() in symbols


def test_nothing_falls_over_under_the_sanitizers(environment: dict[str, str]) -> None:
    tally = tried(environment, fuzzing.FOLDER, INPUTS, "ops")
    assert not tally.findings, "\n".join(map(str, tally.findings))
    assert tally.inputs == INPUTS
    assert tally.counts["served"] > INPUTS / 3
