"""Options of commands as dataclasses: one a panel of ``--help``.

A parameter of a command that is such a dataclass stands for its fields, which are options as typer
has them: ``Annotated[..., typer.Option(...)]``, or made by :func:`option`. ``PANEL`` of the class
is the name of the panel.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

__all__ = ["option", "with_panels"]

DECLARED = "option"


def option(default: Any = dataclasses.MISSING, help: str = "", *flags: str, **details: Any) -> Any:
    """A field that is an option.

    Args:
        default: the value where the option is not given; without one it has to be given.
        help: the words of ``--help``.
        flags: ``--name`` and others; that of the field's name when there are none. A bool has no
            ``--no-name`` unless the flags say so.
        details: other arguments of :func:`typer.Option`.
    """
    declared = typer.Option(*flags, help=help, **details)
    return dataclasses.field(default=default, metadata={DECLARED: declared})


def with_panels(command: Callable[..., int]) -> Callable[..., int]:
    """The command with the options of its dataclasses as parameters of their own, for typer."""
    hints = get_type_hints(command, include_extras=True)
    panels: dict[str, Any] = {
        name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)
    }
    if not panels:
        return command
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in panels:
            parameters += [_parameter(*each) for each in _options(panels[name])]
        else:
            parameters.append(_parameter(name, hints[name], parameter.default))

    @functools.wraps(command)
    def called(**given: Any) -> int:
        for name, kind in panels.items():
            given[name] = kind(**{each.name: given.pop(each.name) for each in _fields(kind)})
        return command(**given)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def _fields(kind: Any) -> list[dataclasses.Field[Any]]:
    return [each for each in dataclasses.fields(kind) if each.init]


def _parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if default is dataclasses.MISSING else default
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=hint)


def _options(kind: Any) -> list[tuple[str, Any, Any]]:
    """Name, annotation and default of each field."""
    hints = get_type_hints(kind, include_extras=True)
    made = []
    for each in _fields(kind):
        hint: Any = hints[each.name]
        declared: Any = each.metadata.get(DECLARED)
        if get_origin(hint) is Annotated:
            hint, declared = get_args(hint)
        declared = copy.copy(declared)
        if hint is bool and declared.default is ...:
            declared.default = f"--{each.name.replace('_', '-')}"  # typer's place for a first flag
        declared.rich_help_panel = declared.rich_help_panel or getattr(kind, "PANEL", None)
        made.append((each.name, Annotated[hint, declared], each.default))
    return made
