"""What callers see of a model and of an engine that may be in another process."""

from __future__ import annotations

from typing import Protocol

import torch

from eecore.config import AnyModelConfig, EngineConfig, SamplingParams
from eecore.exits import Exit
from eecore.guide import Guide
from eecore.models import ModelSource
from eecore.scheduling.sequence import Sequence


class HeadFacts(Protocol):
    """The facts on a draft head that decide whether a model can serve a request."""

    @property
    def vocabulary_sha256(self) -> str: ...


class ModelFacts(Protocol):
    """The facts on a model that decide whether it can serve a request: all but its weights."""

    @property
    def config(self) -> AnyModelConfig: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def source(self) -> ModelSource | None: ...
    @property
    def draft_head(self) -> HeadFacts | None: ...


class EngineView(Protocol):
    """An engine that a worker steps: its limits, and approximately how full it is."""

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
        """A checked request; any thread may call this.

        Raises:
            RequestError: for a prompt, setting or length that the engine can never serve.
        """

    def compile(self, guide: Guide) -> None:
        """Compile a guide before a request that follows it; any thread may call this.

        Raises:
            GuideError: it cannot be compiled, or nothing can follow it.
        """
