"""What the tokens before a draft add to its logits, in heads that draft a block in one pass.

DSpark adds what a low-rank table says of the token before: as it is (``vanilla``), with a gate that
sees the draft's state (``gated``), or by a state that goes from draft to draft (``rnn``). Domino
runs a GRU over the tokens of the block. (DSpark: DeepSpec 2026, arXiv 2607.05147.)

Gates are made of the ops that there are: sigmoid(y) = (1 + tanh(y / 2)) / 2 by the cap of a linear
layer, and a product of two features by a gated layer with constant weights, since
a b = silu(a) b + silu(-a) (-b). These layers are as small as the rank or the state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from eecore import ops
from eecore.models.linear import gated_product, product
from eecore.ops import Matrix

NewMatrix = Callable[[Tensor], Matrix]
"""Makes a matrix of floats, in the form that the head's others have."""


class Work(NamedTuple):
    """Memory in which drafts are corrected."""

    rows: Tensor
    """[num_rows, hidden_size + width]: the normed state of a draft, then the correction's own
    columns, which are zeros at first."""
    order: Tensor
    """int64 [num_rows]: 0, 1, ..."""
    zeros: Tensor
    """[num_rows, state_size]"""


class Correction(ABC):
    """What the tokens before a draft add to its logits.

    Args:
        before: [vocab_size, row_size], the rows of tokens.
        after: [draft_vocab_size, size], the last linear layer, which gives logits.

    Attributes:
        width: number of its own columns.
        state_size: size of the state that goes from draft to draft; 0: there is none.
        sees_state: whether the draft's state is to be in the rows.
    """

    width: int
    state_size = 0
    sees_state = True

    def __init__(self, before: Matrix, after: Matrix) -> None:
        self.before, self.after = before, after

    def begin(self, work: Work) -> None:  # noqa: B027 (most have no state)
        """Begin a block."""

    @abstractmethod
    def corrected(self, draft: int, logits: Tensor, token_ids: Tensor, work: Work) -> Tensor:
        """The logits of a draft with what is added: [num_rows, draft_vocab_size].

        Args:
            draft: its number in the block, from 0; they come one after the other.
            logits: [num_rows, draft_vocab_size], any row stride.
            token_ids: int64 [num_rows], the tokens before.
            work: with the draft's state where :attr:`sees_state`.
        """

    def _put(self, token_ids: Tensor, out: Tensor) -> Tensor:
        """Put the rows of tokens into columns."""
        table = self.before
        return ops.embed_tokens(
            token_ids, table.weight, scale=table.scale, table=table.table, out=out
        )

    def _own(self, work: Work) -> Tensor:
        """The correction's own columns."""
        return work.rows[:, work.rows.shape[1] - self.width :]


class Markov(Correction):
    """A row of a low-rank table by the token before: ``vanilla``."""

    sees_state = False

    def __init__(self, before: Matrix, after: Matrix, rank: int) -> None:
        super().__init__(before, after)
        self.rank = self.width = rank

    def corrected(self, draft: int, logits: Tensor, token_ids: Tensor, work: Work) -> Tensor:  # noqa: ARG002
        return product(self._put(token_ids, self._own(work)), self.after, residual=logits)


class GatedMarkov(Markov):
    """The row of ``vanilla`` times a gate that sees the draft's state and the row.

    Args:
        before: [vocab_size, rank].
        after: [draft_vocab_size, rank].
        gate: [rank, hidden_size + rank], with a bias.
    """

    sees_state = True

    def __init__(
        self, before: Matrix, after: Matrix, rank: int, gate: Matrix, new: NewMatrix
    ) -> None:
        super().__init__(before, after, rank)
        self._gate, self._mean = gate, _GatedMean(rank, new)
        self.width = 5 * rank  # the columns of the mean: the row is its state, its candidate 0

    def corrected(self, draft: int, logits: Tensor, token_ids: Tensor, work: Work) -> Tensor:  # noqa: ARG002
        own, rank = self._own(work), self.rank
        self._put(token_ids, own[:, :rank])
        seen = work.rows[:, : work.rows.shape[1] - self.width + rank]
        _half_tanh(seen, self._gate, own[:, 2 * rank : 3 * rank])
        return product(
            self._mean(own, torch.empty_like(own[:, :rank])), self.after, residual=logits
        )


class RecurrentMarkov(Markov):
    """A recurrent cell over the block's tokens and states, with an output for each draft: ``rnn``.

    Args:
        before: [vocab_size, rank].
        after: [draft_vocab_size, rank].
        step: [2 * rank, hidden_size + 2 * rank], with a bias: the candidate and half of the gate,
            from the draft's state, the row and the cell's state.
        output: [rank, hidden_size + 2 * rank], with a bias: the output from the same.
    """

    sees_state = True

    def __init__(
        self,
        before: Matrix,
        after: Matrix,
        rank: int,
        step: Matrix,
        output: Matrix,
        new: NewMatrix,
    ) -> None:
        super().__init__(before, after, rank)
        self._step, self._output, self._mean = step, output, _GatedMean(rank, new)
        self.width, self.state_size = 7 * rank, rank  # the row, the state, the mean's columns

    def begin(self, work: Work) -> None:
        _copy(work.zeros, self._own(work)[:, self.rank : 2 * self.rank], work)

    def corrected(self, draft: int, logits: Tensor, token_ids: Tensor, work: Work) -> Tensor:  # noqa: ARG002
        own, rank = self._own(work), self.rank
        self._put(token_ids, own[:, :rank])
        seen = work.rows[:, : work.rows.shape[1] - self.width + 2 * rank]
        state, mean = own[:, rank : 2 * rank], own[:, 2 * rank :]
        taken = product(seen, self._output, soft_cap=1.0)
        product(seen, self._step, soft_cap=1.0, out=mean[:, rank : 3 * rank])
        _copy(state, mean[:, :rank], work)
        self._mean(mean, state)
        return product(taken, self.after, residual=logits)


class DominoGru(Correction):
    """A GRU over the block's tokens; two linear layers take its state and the draft's: Domino.

    Args:
        before: [vocab_size, hidden_size], the model's embeddings.
        after: [draft_vocab_size, emb_dim].
        inner: [2 * emb_dim, hidden_size + state_size]: rows of a gate, then rows of zeros with a
            bias of 1.
        of_input: [3 * state_size, hidden_size], the GRU's weights for the token: rows of reset,
            update and candidate.
        of_state: [3 * state_size, state_size], its weights for its state, likewise.
        first: the first draft that is corrected.
    """

    def __init__(
        self,
        before: Matrix,
        after: Matrix,
        inner: Matrix,
        of_input: Tensor,
        of_state: Tensor,
        first: int,
        new: NewMatrix,
    ) -> None:
        super().__init__(before, after)
        size = self.state_size = of_state.shape[1]
        self._hidden_size, self._first, self._inner = of_input.shape[1], first, inner
        one, none = torch.eye(size), torch.zeros(size, size)
        resets, updates, candidates = torch.cat((of_state, of_input), 1).chunk(3)
        self._reset, self._update = new(resets), new(updates)
        self._of_state = new(candidates[:, :size].contiguous())
        # tanh(input + (1 + t) / 2 * part) from the token, the part, t, and t * part in two terms.
        halves = (one / 2, none, one / 2, one / 2)
        self._candidate = new(torch.cat((candidates[:, size:].float(), *halves), 1))
        reset, part = torch.cat((none, one), 1), torch.cat((one, none), 1)
        self._times = new(torch.cat((reset, -reset, part, -part)))
        self._mean = _GatedMean(size, new)
        # The state; the token; the state's part of the candidate, the reset, their product in two
        # parts; the columns of the mean.
        self.width = size + self._hidden_size + 4 * size + 5 * size

    def begin(self, work: Work) -> None:
        _copy(work.zeros, self._own(work)[:, : self.state_size], work)

    def corrected(self, draft: int, logits: Tensor, token_ids: Tensor, work: Work) -> Tensor:
        own, size = self._own(work), self.state_size
        state, token_end = own[:, :size], size + self._hidden_size
        self._put(token_ids, own[:, size:token_end])
        turned, mean = own[:, token_end : token_end + 4 * size], own[:, token_end + 4 * size :]
        product(state, self._of_state, out=turned[:, :size])
        _half_tanh(own[:, :token_end], self._reset, turned[:, size : 2 * size])
        _half_tanh(own[:, :token_end], self._update, mean[:, 2 * size : 3 * size])
        gated_product(turned[:, : 2 * size], self._times, out=turned[:, 2 * size :])
        given = own[:, size : token_end + 4 * size]
        product(given, self._candidate, soft_cap=1.0, out=mean[:, size : 2 * size])
        _copy(state, mean[:, :size], work)
        self._mean(mean, state)
        if draft < self._first:
            return logits
        seen = work.rows[:, : work.rows.shape[1] - self.width + size]
        inner = seen.new_empty(len(seen), self.after_size)
        return product(gated_product(seen, self._inner, out=inner), self.after, residual=logits)

    @property
    def after_size(self) -> int:
        """emb_dim."""
        bias = self._inner.bias
        assert bias is not None
        return len(bias) // 2


class _GatedMean:
    """``z * state + (1 - z) * candidate`` of z = (1 + t) / 2: (state + candidate + t (state -
    candidate)) / 2.
    """

    def __init__(self, size: int, new: NewMatrix) -> None:
        one, none = torch.eye(size), torch.zeros(size, size)
        gate, less = torch.cat((none, none, one), 1), torch.cat((one, -one, none), 1)
        self._size, self._times = size, new(torch.cat((gate, -gate, less, -less)))
        self._sum = new(torch.cat((one, one, none, one, one), 1))

    def __call__(self, columns: Tensor, out: Tensor) -> Tensor:
        """The mean.

        Args:
            columns: [num_rows, 5 * size]: state, candidate, t, and room for twice as much.
            out: [num_rows, size], apart from them.
        """
        given = columns[:, : 3 * self._size]
        gated_product(given, self._times, out=columns[:, 3 * self._size :])
        return product(columns, self._sum, multiplier=0.5, out=out)


def _half_tanh(x: Tensor, matrix: Matrix, out: Tensor) -> None:
    """Write tanh(y / 2) of a linear layer y of x."""
    product(x, matrix, multiplier=0.5, soft_cap=1.0, out=out)


def _copy(source: Tensor, out: Tensor, work: Work) -> None:
    ops.embed_tokens(work.order, source, out=out)
