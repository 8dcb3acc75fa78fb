"""What :class:`eecore.AsyncEngine` and the server ask of whoever steps an engine for them.

:class:`SharedEngine` steps one in this process; ``eecore serve`` has one that does so in another.
"""

from __future__ import annotations

from typing import Protocol

import torch

from eecore.config import AnyModelConfig, EngineConfig, SamplingParams
from eecore.engine.client import Client
from eecore.exits import Exit
from eecore.guide import Guide
from eecore.models import ModelSource
from eecore.output import StepOutput
from eecore.scheduling.sequence import Sequence

__all__ = ["EngineView", "ModelFacts", "Sharing"]


class HeadFacts(Protocol):
    """What of a draft head decides that."""

    @property
    def vocabulary_sha256(self) -> str: ...


class ModelFacts(Protocol):
    """What of a model decides whether it can serve a request: all but its weights."""

    @property
    def config(self) -> AnyModelConfig: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def source(self) -> ModelSource | None: ...
    @property
    def draft_head(self) -> HeadFacts | None: ...


class EngineView(Protocol):
    """An engine that others step: its limits, and how full it is, never quite now."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def has_prefix_cache(self) -> bool: ...
    @property
    def has_unfinished(self) -> bool: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_held(self) -> int: ...
    @property
    def num_used_pages(self) -> int: ...
    @property
    def num_cached_pages(self) -> int: ...
    @property
    def num_failed_iterations(self) -> int: ...

    def prepare(
        self,
        prompt: str | list[int],
        *,
        exit: Exit | str | None = None,
        sampling: SamplingParams | None = None,
    ) -> Sequence:
        """A request, checked; from any thread.

        Raises:
            RequestError: for a prompt, setting or length that the engine can never serve.
        """

    def compile(self, guide: Guide) -> None:
        """Compile a guide before a request that follows it; from any thread.

        Raises:
            GuideError: it cannot be compiled, or nothing can follow it.
        """


class Sharing(Protocol):
    """One engine for callers on any thread; a :class:`Client` is a caller."""

    @property
    def engine(self) -> EngineView: ...
    @property
    def is_up(self) -> bool:
        """Whether requests are taken just now."""

    @property
    def num_restarts(self) -> int:
        """How often the engine had to be started again."""

    @property
    def failure(self) -> Exception | None:
        """Why it will never take requests again, if that is so."""

    def open(self, client: Client, name: str | None = None) -> None:
        """Queue a client's requests; ``name`` is that of its only one."""

    def take(self, client: Client) -> StepOutput | None:
        """The next step of a client's requests if it is there; an error ends them all."""

    def close(self, client: Client) -> None:
        """Cancel what is unfinished; waits for nothing, from any thread."""

    def reset_prefix_cache(self) -> None:
        """Forget what pages hold that no unfinished request has."""

    def let_go(self) -> None:
        """Nobody will come any more, for all that the one who says so knows."""
