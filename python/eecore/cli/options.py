"""Options of a command as dataclasses: one for each panel of ``--help``.

A command takes such an object in place of single options::

    @dataclass(frozen=True, kw_only=True)
    class Optimizer:
        PANEL: ClassVar[str] = "Optimizer"
        seed: int = option(0, min=0)

    @takes_options
    def train(model: ModelPath, optimizer: Optimizer) -> int: ...

A field may also be ``Annotated[..., typer.Option(...)]``, as a parameter of a command is.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_origin, get_type_hints

import typer

from eecore.cli.loading import Debug, Device, load

if TYPE_CHECKING:
    from eecore.exits import Exit
    from eecore.generation import Model


def option(default: Any = MISSING, help: str = "", *flags: str, **settings: Any) -> Any:
    """A field that is an option.

    Args:
        default: the value where the option is not given; without a default the option is required.
        help: the text of ``--help``.
        flags: ``--name`` and others; by default the field's name. A bool has no ``--no-name``
            unless the flags say so.
        settings: further arguments of :func:`typer.Option`.
    """
    made = typer.Option(*flags, help=help or None, **settings)
    return dataclasses.field(default=default, metadata={"option": made})


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """The options of every command that computes."""

    threads: int | None = option(
        None, "CPU threads.", min=1, max=1024, show_default="torch's choice"
    )
    debug: Debug = False


@dataclass(frozen=True, kw_only=True)
class LoadOptions(ProcessOptions):
    """The options of loading a model."""

    device: Device = None
    dtype: str | None = option(
        None,
        "float32, bfloat16 or (CUDA) float16.",
        show_default="from the checkpoint and the device",
    )
    weights: str | None = option(
        None, "int8, int4: quantised as they are read.", show_default="those of the dtype"
    )

    @property
    def settings(self) -> dict[str, Any]:
        """The options that :func:`eecore.load` takes."""
        return {"device": self.device, "dtype": self.dtype, "weights": self.weights}

    def load(self, path: str | Path, policy: Exit | None = None, **more: Any) -> Model:
        """The model; its shape is checked against the exit policy before weights are read."""
        return load(path, threads=self.threads, policy=policy, **self.settings, **more)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(LoadOptions):
    """The options of loading a model in commands that answer requests."""

    kv_cache_tokens: int | None = option(None, "Positions in the KV cache.", min=1)
    kv_cache_dtype: str | None = option(
        None,
        "fp8: a byte for each key and value; bfloat16; float32; auto.",
        show_default="that of the model, or bfloat16 beside weights of few bits",
    )
    exits: str | None = option(
        None,
        "head, auto: a directory that eecore train-exits made, a repository with one; none.",
        show_default="the one beside the model, or one that ships for it",
        rich_help_panel="Exit mode",
    )
    draft_head: str | None = option(
        None,
        "head, auto: a published head, such as EAGLE-3 or DFlash, in place of --exits.",
        show_default="that of --exits",
        rich_help_panel="Exit mode",
    )

    @property
    def settings(self) -> dict[str, Any]:
        return {
            **super().settings,
            "kv_cache_tokens": self.kv_cache_tokens,
            "kv_cache_dtype": self.kv_cache_dtype,
            "exits": False if self.exits == "none" else self.exits,
            "draft_head": self.draft_head,
        }


def given_flags(options: Any) -> list[str]:
    """The flags of a dataclass of options whose values are not the defaults."""
    given = (
        each.name
        for each in dataclasses.fields(options)
        if getattr(options, each.name) != each.default
    )
    return ["--" + name.replace("_", "-") for name in given]


def takes_options(command: Callable[..., int]) -> Callable[..., int]:
    """A command for typer, with dataclasses among its parameters turned into their options."""
    panels: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if dataclasses.is_dataclass(parameter.annotation):
            panels[name] = parameter.annotation
            parameters += _options(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

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


def _options(panel: Any) -> Iterator[inspect.Parameter]:
    hints: dict[str, Any] = get_type_hints(panel, include_extras=True)
    for each in dataclasses.fields(panel):
        hint, made = hints[each.name], cast(Any, each.metadata.get("option"))
        if get_origin(hint) is Annotated:
            hint, made = get_args(hint)
        made = copy.copy(made)
        if hint is bool and made.default is ...:  # typer's place for the first flag
            made.default = f"--{each.name.replace('_', '-')}"
        made.rich_help_panel = made.rich_help_panel or getattr(panel, "PANEL", None)
        yield inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each.default is MISSING else each.default,
            annotation=Annotated[hint, made],
        )
