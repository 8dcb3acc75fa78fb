"""Stand-ins for templates that cost too much: the code of their workers, with more functions.

A template can call ``spin()``, ``allocate()`` and ``die()``. No test has a template whose cost
jinja2 itself has to bear: it has loops, and bounds neither time nor memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from costly_guides import COSTS
from eecore import template_process

_environment = template_process._environment


def _with_costs() -> ImmutableSandboxedEnvironment:
    environment = _environment()
    environment.globals |= COSTS
    return environment


def prepared() -> Callable[..., Any]:
    """What a worker runs, as in the module that this one stands in for."""
    vars(template_process)["_environment"] = _with_costs
    return template_process.prepared()
