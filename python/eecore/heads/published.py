"""What all heads that others publish have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eecore.config import ModelConfig
from eecore.models.draft_head import DraftHead


@dataclass(frozen=True, kw_only=True)
class PublishedSettings:
    """The settings in a head's ``config.json``."""

    kind: str
    """The name of its kind."""
    config: ModelConfig
    """The config of the head's layers, as if they were a model."""
    taps: tuple[int, ...]
    """Layers of the model after which the head takes the state, in the order in which it takes
    them."""
    draft_vocab_size: int
    """Rows of the head's LM head."""
    verifier: str = ""
    """The name of the model that the head was trained for; empty: unknown."""


class PublishedHead(DraftHead):
    """A head with layers, and keys, of its own.

    Args:
        settings: the settings in ``config.json``.
        path: the head's directory.
        agreement: approximate acceptance rates by position of the draft, with which ``Auto``
            requests begin.
    """

    def __init__(
        self, settings: PublishedSettings, path: Path, agreement: tuple[float, ...]
    ) -> None:
        self.kind, self.path, self.taps = settings.kind, path, settings.taps
        self.keys = self.config = settings.config
        self.agreement = agreement
