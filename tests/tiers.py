"""The short suite, which ``make test`` runs, beside all tests, which ``make test-all`` runs.

Both run on the backends of this machine. The short suite leaves out

- tests and single cases marked ``long``: compilers, sanitizers, what takes minutes;
- on CPU capabilities other than portable and the best of this machine, all but random calls;
- on the emulator, all but a case of each value;
- on the emulator, of bfloat16 and float16 the one or the other, by turns: they share a kernel;
- cases of a function which hold no value, and no pair of values, that another case does not hold:
  what is left is a covering array of strength 2 (Cohen et al., The AETG system, 1997).
"""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

import cases
from eecore import ops

HAS_CUDA = torch.cuda.is_available() and ops.build_info()["cuda"]
CPU_CAPABILITIES: tuple[str, ...] = ("portable",)
if platform.machine() in ("x86_64", "AMD64"):
    CPU_CAPABILITIES += ("avx2", "avx_vnni", "avx512", "avx512_bf16", "amx")
    CPU_CAPABILITIES += ("avx_vnni_model", "amx_model")
PRODUCTS = ("amx", "avx_vnni_model", "amx_model")
"""Capabilities that differ from another one in products: matrix tiles, and the models."""
# Test files of ops that multiply with weights.
MULTIPLIES = {"skinny_products", "kv_fill", "exit_confidence_softmax"}
MULTIPLIES |= {"decoder_layers", "weight_formats", "rows_alone", "tiles", "random_calls"}
# Test files that also run on CUDA: of ops, and across them.
ON_CUDA = cases.CUDA_OPS | {"skinny_products", "weight_formats", "appended_heads", "float8_caches"}
ON_CUDA |= {"random_calls", "rows_alone"}
NOT_EMULATED = (*ops.CPU_ONLY_OPS, "append_drafts", "exit_rows", "gather_states", "place_head")
"""Ops whose random calls are the CPU's alone: without a kernel, with other numbers in rows that
nothing reads, or with a measure whose last bit decides."""


CUDA_BACKENDS = ("emulated", "cuda") if HAS_CUDA else ("emulated",)
"""The backends that run the CUDA kernels here."""


def in_all(*values: Any) -> list[Any]:
    """Values of a parameter that only ``make test-all`` tries; a tuple is a value of several."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=pytest.mark.long) for row in rows]


def op_of(module_name: str) -> str:
    """The op that a test file is about."""
    return module_name.rpartition(".")[2].removeprefix("test_")


def runs_all(config: pytest.Config) -> bool:
    """Whether all tests are asked for, by ``--all`` or EECORE_TEST_ALL."""
    return bool(config.option.all) or os.environ.get("EECORE_TEST_ALL", "") not in ("", "0")


def backends(op: str, function: str, everything: bool) -> list[str]:
    """The backends that a test function of an op runs over, on this machine.

    Args:
        op: the op, or the subject, that the test file is named for.
        function: the test function's name.
        everything: all of them, and not those of the short suite.
    """
    here = [name for name in cases.cpu_capabilities() if name not in PRODUCTS or op in MULTIPLIES]
    if not everything and op != "random_calls":
        here = [name for name in here if f"cpu-{name}" not in by_random_calls()]
    found = [] if function.endswith("_on_cuda") else [f"cpu-{name}" for name in here]
    if op in ON_CUDA and "number_of_threads" not in function:  # threads of the CPU
        found += CUDA_BACKENDS
    return found


def by_random_calls() -> list[str]:
    """The CPU capabilities of this machine which random calls alone try in the short suite."""
    vectors = [name for name in cases.cpu_capabilities() if name not in PRODUCTS]
    kept = {"portable", vectors[-1], "amx"}
    return [f"cpu-{name}" for name in cases.cpu_capabilities() if name not in kept]


def fits(item: pytest.Item) -> bool:
    """Whether a test's case is one of its backend: dtypes that it has, sizes that it can run.

    EECORE_REDUCED_CASES leaves out on CUDA what the emulator would take too long for: for tools
    that make a GPU slow.
    """
    parameters = parameters_of(item)
    backend, dtype = parameters.get("device"), parameters.get("dtype")
    if backend == "emulated" and parameters.get("op") in NOT_EMULATED:
        return False
    if backend == "emulated":
        return cases.fits_the_emulator(parameters)
    if backend == "cuda":
        return "EECORE_REDUCED_CASES" not in os.environ or cases.fits_the_emulator(parameters)
    if backend in ("cpu-amx", "cpu-amx_model"):
        return dtype in (None, torch.bfloat16)
    return dtype != torch.float16


def parameters_of(item: pytest.Item) -> dict[str, object]:
    """The parameters of a test by name; none where it has none."""
    return dict(item.callspec.params) if hasattr(item, "callspec") else {}


def covering(rows: Sequence[Sequence[int]], strength: int = 2) -> list[int]:
    """The places of few rows that hold each pair of values, in two columns, that any row holds.

    Greedy: of the rows that hold most pairs which no row before holds, the first.

    Args:
        rows: values of the same columns in each, as whole numbers.
        strength: 2 for pairs, 1 for single values.
    """
    columns = range(len(rows[0]) if rows else 0)
    groups = list(itertools.combinations(columns, min(strength, len(columns))))
    held = [{(group, *(row[i] for i in group)) for group in groups} for row in rows]
    open_pairs, chosen = set().union(*held), []
    while open_pairs:
        best = max(range(len(rows)), key=lambda i: len(held[i] & open_pairs))
        open_pairs -= held[best]
        chosen.append(best)
    return sorted(chosen)


def one_of_16_bits(items: list[pytest.Function]) -> list[pytest.Function]:
    """Cases in float32, and the others in bfloat16 and float16 by turns: one kernel has both."""
    turns: dict[tuple[int, ...], list[pytest.Function]] = {}
    for item in items:
        rest = (id(value) for name, value in item.callspec.params.items() if name != "dtype")
        turns.setdefault(tuple(rest), []).append(item)
    skipped = (torch.float16, torch.bfloat16)
    return [
        item
        for turn, of_one in enumerate(turns.values())
        for item in of_one
        if len(of_one) < 3 or item.callspec.params["dtype"] != skipped[turn % 2]
    ]


def short(items: Iterable[pytest.Item]) -> tuple[set[pytest.Item], dict[str, int]]:
    """The tests of the short suite among those that fit their backends.

    Returns:
        the tests, and how many are left out, by reason.
    """
    kept: set[pytest.Item] = set()
    left_out = {"tests marked long": 0, "cases whose pairs of values others hold": 0}
    functions: dict[tuple[object, ...], list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("long") is not None:
            left_out["tests marked long"] += 1
        elif isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            backend = item.callspec.params.get("device")
            key = (item.path, item.cls, item.originalname, backend)
            functions.setdefault(key, []).append(item)
        else:
            kept.add(item)
    for key, of_one in functions.items():
        every = len(of_one)
        strength = 2
        if "emulated" in key:
            of_one, strength = one_of_16_bits(of_one), 1
        rows = [  # the values of a parameter are the same objects in every case
            [id(value) for name, value in item.callspec.params.items() if name != "device"]
            for item in of_one
        ]
        chosen = covering(rows, strength)
        kept.update(of_one[i] for i in chosen)
        left_out["cases whose pairs of values others hold"] += every - len(chosen)
    return kept, left_out


def absent() -> list[str]:
    """The backends that this machine does not have."""
    lacking = sorted(set(CPU_CAPABILITIES) - set(cases.cpu_capabilities()))
    return [*(f"cpu-{name}" for name in lacking), *([] if HAS_CUDA else ["cuda"])]
