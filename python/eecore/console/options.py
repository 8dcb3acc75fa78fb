"""Options of a command as dataclasses: one for each panel of ``--help``.

A command takes such an object in place of its options::

    @dataclass(frozen=True, kw_only=True)
    class Optimizer:
        PANEL: ClassVar[str] = "Optimizer"
        seed: int = option(0, min=0)

    @takes_options
    def train(model: ModelPath, optimizer: Optimizer) -> int: ...
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from eecore.console.loading import Debug, Device, Dtype, Threads, Weights, load

if TYPE_CHECKING:
    from eecore.exits import Exit
    from eecore.generation import Model

__all__ = ["LoadOptions", "ProcessOptions", "option", "takes_options"]


def option(default: Any = MISSING, help: str = "", **settings: Any) -> Any:
    """A field that is an option: its default, and settings of :func:`typer.Option`."""
    made = typer.Option(help=help or None, **settings)
    return dataclasses.field(default=default, metadata={"option": made})


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """What every command that computes has."""

    threads: Threads = None
    debug: Debug = False


@dataclass(frozen=True, kw_only=True)
class LoadOptions(ProcessOptions):
    """How a model is loaded."""

    device: Device = None
    dtype: Dtype = None
    weights: Weights = None

    def load(self, path: str | Path, policy: Exit | None = None) -> Model:
        """The model; its shape is checked against the exit policy before weights are read."""
        return load(
            str(path),
            threads=self.threads,
            policy=policy,
            device=self.device,
            dtype=self.dtype,
            weights=self.weights,
        )


def takes_options(command: Callable[..., int]) -> Callable[..., int]:
    """A command that typer can read: dataclasses among its parameters become their options."""
    hints = get_type_hints(command, include_extras=True)
    panels: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if dataclasses.is_dataclass(hints[name]):
            panels[name] = hints[name]
            parameters += _options(hints[name])
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(annotation=hints[name], kind=kind))

    @functools.wraps(command)
    def called(**given: Any) -> int:
        objects = {
            name: panel(**{each.name: given.pop(each.name) for each in dataclasses.fields(panel)})
            for name, panel in panels.items()
        }
        return command(**given, **objects)

    called.__annotations__ = {each.name: each.annotation for each in parameters}
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return called


def _options(panel: type[Any]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(panel, include_extras=True)
    for each in dataclasses.fields(panel):
        annotation, made = hints[each.name], each.metadata.get("option")
        if made is not None:
            made.rich_help_panel = getattr(panel, "PANEL", None)
            if annotation is bool:  # without a --no- of its own
                made.param_decls = (f"--{each.name.replace('_', '-')}",)
            annotation = Annotated[annotation, made]
        yield inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each.default is MISSING else each.default,
            annotation=annotation,
        )
