"""Random calls of every op, which have to succeed: ``fuzzed_call`` of the ops' tests."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from random_calls import Arguments, Checked, Maker

TESTED_TOGETHER = dict.fromkeys(("skinny_gated_linear", "skinny_linear"), "skinny_products")
"""The tests of ops that share a file."""


@dataclass
class Call:
    """A call that has to succeed.

    Attributes:
        arguments: in the order of the schema.
        check: compares the arguments after the call with those before it.
    """

    op: str
    arguments: Arguments
    check: Callable[[Arguments, Arguments], None] = field(repr=False)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: t for name, t in self.arguments.items() if isinstance(t, Tensor)}

    def run(self) -> None:
        run(self.op, self.arguments)


def overload(op: str) -> Any:
    """The overload ``torch.ops.eecore.<op>``."""
    return getattr(torch.ops.eecore, op).default


def written(op: str) -> list[str]:
    """The arguments that an op writes."""
    arguments = overload(op)._schema.arguments
    return [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]


def run(op: str, arguments: Arguments) -> None:
    overload(op)(**arguments)


def tests_of(op: str) -> ModuleType:
    """The test file of an op, in tests/ops."""
    return importlib.import_module(f"test_{TESTED_TOGETHER.get(op, op)}")


def fuzzed_call(op: str) -> Callable[[Maker], Checked]:
    """The maker of an op's calls: ``fuzzed_call`` of its tests, ``fuzzed_<op>`` in shared tests."""
    name = f"fuzzed_{op}" if op in TESTED_TOGETHER else "fuzzed_call"
    made: Callable[[Maker], Checked] = getattr(tests_of(op), name)
    return made


def random_call(op: str, random: Random) -> Call:
    """A call of an op."""
    made = Maker(random)
    arguments, check = fuzzed_call(op)(made)
    names = [argument.name for argument in overload(op)._schema.arguments]
    assert set(arguments) <= set(names), set(arguments) - set(names)
    return Call(op, {name: arguments[name] for name in names if name in arguments}, check)


def copied(arguments: Arguments) -> Arguments:
    """The same values in memory of their own."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
