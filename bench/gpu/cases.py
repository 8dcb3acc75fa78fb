"""The cases to time on a GPU: ``gpu_cases`` of the ops' benchmarks, at shapes of real models."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator

import torch

from bench.gpu.case import Case, Setting
from eecore import ops

# Ops that move many bytes, whose times say most: in this order before all other ops.
FIRST = ("paged_attention", "exit_confidence_softmax", "kv_fill")
FIRST += ("skinny_linear", "skinny_gated_linear")


def cases_of(op: str, setting: Setting) -> Iterator[Case]:
    """The cases of one op."""
    found: Iterator[Case] = importlib.import_module(f"bench.ops.bench_{op}").gpu_cases(setting)
    return found


def cases(dtype: torch.dtype, device: torch.device, tiny: bool) -> Iterator[Case]:
    """Every row of the table, for one dtype; the small ops take turns, one case each.

    Args:
        tiny: shrinks every shape, for tests of the script on a machine without a GPU.
    """
    setting = Setting(dtype, device, tiny)
    for op in FIRST:
        yield from cases_of(op, setting)
    others = [op for op in ops.OP_NAMES if op not in (*FIRST, *ops.CPU_ONLY_OPS)]
    for turn in itertools.zip_longest(*(cases_of(op, setting) for op in others)):
        yield from (case for case in turn if case is not None)
