"""Draft heads with their own layers, whose keys and values share pages with the model's.

A head takes the model's residual stream after some of the model's layers, the head's *taps*. Where
a position ran all layers and the next token is known, the head also has keys and values there, in
the same slot as the model's: they are rolled back, preempted, shared and counted with the page.
Programs write them at the end of each run (:meth:`KeyedHead.fill`), for all rows that cannot exit
early and do not draft with a part of the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from eecore import ops
from eecore.config import ModelConfig
from eecore.models.attention import AttentionBatch
from eecore.models.draft_head import SeenKeys
from eecore.models.kv_cache import KVCache


class Positions(NamedTuple):
    """Positions that the model has computed."""

    made: Tensor
    """int64 [num_made]: tokens; -1 where the model gave none."""
    sources: Tensor
    """int32 [num_rows]: the index in ``made`` of the token after each position."""
    batch: AttentionBatch
    """The positions and their slots, of which -1 writes nothing, and the texts."""
    starts: Tensor | None = None
    """int64 [num_starts], rows at position 0; None if there are none."""


class KeyedHead(ABC):
    """A draft head with its own keys and values.

    Attributes:
        kind: a name such as ``EAGLE-3``.
        path: the head's directory.
        config: the config of the head's layers, as if they were a model.
        taps: layers of the model after which the head takes the state, in the order in which it
            takes them; the last layer's state is not normed.
        verifier: the name of the model that the head was trained for; empty: unknown.
        agreement: how often the first draft is expected to be the model's own token, the second if
            the first was, ...
    """

    kind: str
    path: Path
    config: ModelConfig
    taps: tuple[int, ...]
    agreement: tuple[float, ...]
    verifier: str

    num_at_once: int = 0
    """Drafts that one step makes for a round; 0: each step makes one."""

    vocabulary_sha256 = ""
    """Empty: exits are not measured with this head's tokens, since it has no rows of the model's LM
    head for them."""

    @property
    def keys(self) -> ModelConfig:
        """The config of the layers whose keys and values share the pages of the model's."""
        return self.config

    @abstractmethod
    def prepare(self, kv: KVCache) -> None:
        """Compute the tables that programs need for ``kv``, the cache of the head's layers."""

    @abstractmethod
    def begin(self, states: Sequence[Tensor]) -> Tensor:
        """The head's states at positions that the model has computed: [num_rows, head's
        hidden_size].

        Args:
            states: the states after each of the :attr:`taps`, [num_rows, model's hidden_size].
        """

    @property
    @abstractmethod
    def tokens(self) -> Tensor | None:
        """int64 [draft_vocab_size]: the model's token of each row of its LM head; None: row t is
        token t.
        """

    @property
    @abstractmethod
    def measure(self) -> ops.SoftmaxMeasure:
        """The measure of a state that gives a draft: over :attr:`tokens`, by their places."""

    @abstractmethod
    def fill(self, begun: Tensor, positions: Positions, kv: KVCache) -> Tensor:
        """Write the head's keys and values at positions that the model has computed.

        Args:
            begun: [num_rows, head's hidden_size], from :meth:`begin`.
            positions: the positions.
            kv: the cache of the head's layers.

        Returns:
            The state to draft from after each position: [num_rows, head's hidden_size].
        """

    def reserve(self, num_rows: int) -> None:  # noqa: B027
        """Allocate what :meth:`fill` needs for so many rows, before it is recorded."""

    def know(self, token_ids: Sequence[int]) -> None:  # noqa: B027
        """Do nothing: the tokens of such a head stay the same."""


class ChainHead(KeyedHead):
    """A head that drafts token by token, each from the state of the step before."""

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """The embeddings, for :meth:`step`, of tokens, int64 [num_rows]."""

    @abstractmethod
    def step(self, state: Tensor, embedded: Tensor, seen: SeenKeys | None = None) -> Tensor:
        """The state after one more token: [num_rows, head's hidden_size].

        Args:
            state: from :meth:`begin`, at the last position that the model has computed, or from the
                step before.
            embedded: the embedding of the next token.
            seen: the keys to attend to, in ``kv.of_head``.
        """
