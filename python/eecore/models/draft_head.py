"""What a draft head is to the programs that run it.

A head takes the model's residual stream after some of the model's layers, its *taps*, and drafts
tokens after the last one of a text. A head may have layers with keys and values of its own at each
position that ran all layers and whose next token is known. They are in the same slot as the
model's: they are rolled back, preempted, shared and counted with the page. Programs give such a
head its states at the end of each run, for all rows that cannot exit early and do not draft with a
part of the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from eecore import ops
from eecore.config import ModelConfig
from eecore.models.attention import AttentionBatch
from eecore.models.kv_cache import KVCache

if TYPE_CHECKING:
    from eecore.decoding.head_drafts import AheadDrafting, EndedRounds


class Positions(NamedTuple):
    """Positions that the model has computed, at which a head writes keys and values."""

    kv: KVCache
    """The cache of the head's layers."""
    made: Tensor
    """int64 [num_made]: tokens; -1 where the model gave none."""
    sources: Tensor
    """int32 [num_rows]: the index in ``made`` of the token after each position."""
    first_layers: Tensor
    """int32 [num_rows]: 0, the first of the layers to write."""
    batch: AttentionBatch
    """The positions and their slots, of which -1 writes nothing, and the texts."""
    starts: Tensor | None = None
    """int64 [num_starts], rows at position 0; None if there are none."""


@dataclass(frozen=True)
class SeenKeys:
    """The keys that a step attends to: of the rows' texts, in the model's or the head's layers."""

    kv: KVCache
    """The model's cache; ``kv.of_head`` is that of the head's layers."""
    batch: AttentionBatch
    """One query a row, at the position of the token that the step takes; ``seq_lens`` count the
    model's keys, without drafts. With a head that has keys the query is at the position before
    that token; its own key is written first and counted in ``seq_lens``."""
    no_keys: tuple[Tensor, Tensor]
    """See :meth:`LlamaModel.no_keys`."""


class DraftHead(ABC):
    """A draft head, with the model that it drafts for.

    Attributes:
        kind: the name of its kind.
        path: the head's directory.
        taps: layers of the model after which the head takes the state, in the order in which it
            takes them; the last layer's state is not normed.
        agreement: how often the first draft is expected to be the model's own token, the second if
            the first was, ...
        keys: the config of the head's own layers, as if they were a model, for which the model's
            cache has pages; None: it keeps no keys.
        attends: whether steps attend to keys, of the model or its own.
        num_at_once: drafts that one step makes for a round; 0: each step makes one.
    """

    kind: str
    path: Path
    taps: tuple[int, ...]
    agreement: tuple[float, ...]
    keys: ModelConfig | None = None
    attends: bool = True
    num_at_once: int = 0

    @property
    @abstractmethod
    def tokens(self) -> Tensor | None:
        """int64 [num_rows]: the model's token of each row of its LM head; None: row t is
        token t.
        """

    @property
    @abstractmethod
    def measure(self) -> ops.SoftmaxMeasure:
        """The measure of a state that gives a draft: over :attr:`tokens`, by their places."""

    @abstractmethod
    def begin(self, states: Sequence[Tensor], positions: Positions | None = None) -> Tensor:
        """The head's states at positions that the model has computed: [num_rows, head's
        hidden_size].

        Args:
            states: the states after each of the :attr:`taps`, [num_rows, model's hidden_size].
            positions: the positions, with a head that has :attr:`keys`, which it writes there.
        """

    def prepare(self, kv: KVCache) -> None:  # noqa: B027
        """Compute the tables that programs need for ``kv``, the cache of the head's layers."""

    def know(self, token_ids: Sequence[int]) -> None:  # noqa: B027
        """Let the head also draft these tokens until newer ones replace them, if it can."""

    # Drafting token by token

    def embed(self, token_ids: Tensor) -> Tensor:
        """The embeddings, for :meth:`step`, of tokens, int64 [num_rows]."""
        raise NotImplementedError

    def step(self, state: Tensor, embedded: Tensor, seen: SeenKeys | None = None) -> Tensor:
        """The state after one more token: [num_rows, head's hidden_size].

        Args:
            state: from :meth:`begin`, at the last position that the model has computed, or from the
                step before.
            embedded: the embedding of the next token.
            seen: the keys to attend to, if the head :attr:`attends`.
        """
        raise NotImplementedError

    # Drafting in one step

    def drafting(self, rounds: EndedRounds) -> AheadDrafting | None:  # noqa: ARG002
        """The calls that draft all tokens after a program's rounds in one step; None: there is a
        :meth:`step` for each.
        """
        return None

    # The exit measure ``cut``

    @property
    def vocabulary_sha256(self) -> str:
        """The digest of the tokens among which :meth:`gap` measures; empty: the head has no rows of
        the model's LM head for them, and no exits are measured with it.
        """
        return ""

    def prepare_gap(self) -> None:
        """Make the matrix that :meth:`gap` multiplies by, before a program with it is recorded."""
        raise NotImplementedError

    def gap(self, hidden: Tensor) -> Tensor:
        """The top-2 probability gap of the model's own states among some tokens: float32
        [num_rows].

        Args:
            hidden: [num_rows, hidden_size], states after any of the model's layers.
        """
        raise NotImplementedError
