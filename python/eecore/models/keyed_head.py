"""Draft heads with layers of their own, whose keys and values lie in pages beside the model's.

A head takes the residual stream of the model after some of its layers, its *taps*. Where all layers
of a position ran and the token after it is known, the head has keys and values there too, in the
slot of the model's own: they are rolled back, preempted, shared and counted with the page. Programs
write them at the end of each run (:meth:`KeyedHead.fill`), for all rows that cannot leave early and
draft with no part of the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from eecore import ops
from eecore.config import ModelConfig
from eecore.models.draft_head import SeenKeys
from eecore.models.kv_cache import KVCache

__all__ = ["ChainHead", "KeyedHead"]


class KeyedHead(ABC):
    """A draft head with keys and values of its own.

    Attributes:
        kind: in a word, ``EAGLE-3`` for one.
        path: of its directory.
        config: of its layers, as of a model that consists of them.
        taps: layers after which it takes the state, in the order in which it takes them; the last
            layer's state is not normed.
        verifier: the name of the model that it was trained for; empty where nothing says it.
        agreement: how often its first draft is expected to be the model's own token, the second if
            the first was, ...
    """

    kind: str
    path: Path
    config: ModelConfig
    taps: tuple[int, ...]
    agreement: tuple[float, ...]
    verifier: str

    vocabulary_sha256 = ""
    """No exit is measured with its tokens, for which it has no rows of the model's LM head."""

    @abstractmethod
    def prepare(self, kv: KVCache) -> None:
        """Compute what programs need beside a cache; ``kv``: of its own layers."""

    @abstractmethod
    def begin(self, states: Sequence[Tensor]) -> Tensor:
        """What it makes of positions that the model has computed: [num_rows, its hidden_size].

        Args:
            states: after each of the :attr:`taps`, [num_rows, hidden_size of the model].
        """

    @abstractmethod
    def fill(
        self,
        begun: Tensor,
        made: Tensor,
        sources: Tensor,
        kv: KVCache,
        positions: Tensor,
        slot_mapping: Tensor,
        starts: Tensor | None = None,
    ) -> None:
        """Write its keys and values at positions that the model has computed.

        Args:
            begun: [num_rows, its hidden_size], of :meth:`begin`.
            made: int64 [num_made]: tokens; -1, where the model gave none, stands for any.
            sources: int32 [num_rows]: the place there of the token after each position.
            kv: of the head's own layers.
            positions: int64 [num_rows].
            slot_mapping: int64 [num_rows]; -1 writes nothing.
            starts: int64 [num_starts], rows at position 0; None where there are none.
        """

    def reserve(self, num_rows: int) -> None:  # noqa: B027
        """Have what :meth:`fill` needs of so many rows, before it is recorded."""

    def know(self, token_ids: Sequence[int]) -> None:  # noqa: B027
        """Do nothing: its tokens stay the same."""


class ChainHead(KeyedHead):
    """A head that drafts token by token, each from the state of the one before."""

    @property
    @abstractmethod
    def tokens(self) -> Tensor | None:
        """int64 [draft_vocab_size]: the model's token of each row of its LM head; None: row t is
        token t.
        """

    @property
    @abstractmethod
    def measure(self) -> ops.SoftmaxMeasure:
        """The measure of a state of :meth:`step`: over :attr:`tokens`, by their places."""

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """What :meth:`step` takes of tokens, int64 [num_rows]."""

    @abstractmethod
    def step(self, state: Tensor, embedded: Tensor, seen: SeenKeys | None = None) -> Tensor:
        """The state after one more token: [num_rows, its hidden_size].

        Args:
            state: of :meth:`begin`, at the last position that the model has computed, or of the
                step before.
            embedded: of the token after it.
            seen: where it attends, in ``kv.of_head``.
        """
