"""Tokens and confidences of states: a confidence at an exit point, a token from the LM head.

Rows of plain greedy requests go through the fused head, which never has logits in memory. Rows of
requests that sample, penalise or ask for log-probabilities go through a head with logits. Both take
the largest of the same float32 sums, the lowest id among equals.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from eecore import ops
from eecore.decoding.control import Control
from eecore.decoding.memory import Field
from eecore.decoding.sampling import HeadSizes
from eecore.exits import ExitClassifier
from eecore.models import Network

# The token of a row is known already.
KNOWN = 0
# The token of a row is made by the fused head.
GREEDY = 1
# The token of a row is made from logits.
LOGITS = 2


def state_measure(
    classifier: ExitClassifier | None, previous: Tensor
) -> ops.CosineMeasure | ops.MlpMeasure:
    """The measure ``classifier`` or, without one, ``state``, as an argument of ops.

    Args:
        classifier: the classifier of a policy, if any.
        previous: [num_rows, hidden_size], the states one layer earlier.
    """
    if classifier is None:
        return ops.CosineMeasure(previous)
    m = classifier.on(previous.device)
    return ops.MlpMeasure(m.weight1, m.bias1, m.weight2, m.bias2)


def head_fields(num_rows: int, sizes: HeadSizes) -> dict[str, Field]:
    """Fields for the results of heads for ``num_rows`` rows."""
    row = (num_rows,)
    fields: dict[str, Field] = {
        "token": (torch.int64, row),
        "gap": (torch.float32, row),
        "logprob": (torch.float32, row),
    }
    if sizes.logits:
        fields["logsumexp"] = (torch.float32, row)
    if sizes.top:
        fields["top_ids"] = (torch.int64, (num_rows, sizes.top))
        fields["top_logprobs"] = (torch.float32, (num_rows, sizes.top))
    return fields


@dataclass(frozen=True)
class HeadWork:
    """Settings for the rows that need logits; see ``sample_tokens``."""

    rows: ops.SamplingRows
    positions: Tensor
    """int64 [num_rows], the position of the token before the one that is made."""
    purpose: int
    probs: Tensor | None = None
    """The filtered distributions, by row, or ``probs_by_step`` of them for each request."""
    uniform: Tensor | None = None
    probs_by_step: int = 0
    round_tokens: Tensor | None = None
    first_position: Tensor | None = None


@dataclass(frozen=True)
class Logits:
    """The logits of some rows, until the program runs again."""

    values: Tensor
    """float32 [num_rows, vocab_size]"""
    index: Tensor | None
    """int32 [num_rows], the rows that have logits; None: all of them."""
    count: Tensor | None
    """int32 [1], the number of rows in ``index``."""

    def of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The rows that have logits, and the logit of one token in each of them.

        Args:
            tokens: int64 [num_rows], the token of each row of the program.
        """
        if self.index is None or self.count is None:
            rows = torch.arange(len(tokens), device=tokens.device)
        else:
            rows = self.index[: int(self.count)].long()
        return rows, self.values[: len(rows)].gather(1, tokens[rows, None])[:, 0]


class Heads:
    """The fused head and the head with logits of one model."""

    def __init__(self, model: Network, sizes: HeadSizes) -> None:
        self._model = model
        self.sizes = sizes

    def run(
        self,
        hidden: Tensor,
        kind: Tensor,
        out: dict[str, Tensor],
        control: Control,
        work: HeadWork | None = None,
        *,
        request: Tensor | None = None,
        as_probability: bool = False,
    ) -> Logits | None:
        """Write the tokens and confidences of the rows whose request is GREEDY or LOGITS.

        Args:
            hidden: [num_rows, hidden_size].
            kind: int32 [num_requests].
            out: tensors for the fields of :func:`head_fields`.
            control: the program's control, within a context of its rows.
            work: the settings of requests that need logits, if there are any.
            request: int32 [num_rows], the request of each row; None: row i is of request i.
            as_probability: write the probability of the token to ``gap``.

        Returns:
            The logits, if some rows need them.
        """
        if self.sizes.greedy:
            index, _, states, few = self._picked(hidden, kind, control, request, GREEDY)
            # With several rows to a request the head runs on all of them, also if LOGITS.
            with few:
                ops.place_head(
                    None,
                    ops.HeadRows(out["token"], out["gap"], out["logprob"]),
                    index=index,
                    kind=kind if index is None and request is None else None,
                    wanted=GREEDY,
                    as_probability=as_probability,
                    measure=self._model.measure,
                    hidden=states,
                )
        if not self.sizes.logits:
            return None
        assert work is not None
        index, count, states, few = self._picked(hidden, kind, control, request, LOGITS)
        with few:
            logits = self._model.logits(states)
            ops.sample_tokens(
                logits,
                work.rows,
                ops.SampledRows(
                    out["token"],
                    out["gap"],
                    out["logprob"],
                    out["logsumexp"],
                    work.probs,
                    work.uniform,
                    out.get("top_ids"),
                    out.get("top_logprobs"),
                ),
                purpose=work.purpose,
                positions=work.positions,
                index=index,
                row=request,
                kind=kind if index is None else None,
                wanted=LOGITS,
                round_tokens=work.round_tokens,
                first_position=work.first_position,
                as_probability=as_probability,
                probs_by_step=work.probs_by_step,
            )
        return Logits(logits, index, count)

    def _picked(
        self, hidden: Tensor, kind: Tensor, control: Control, request: Tensor | None, wanted: int
    ) -> tuple[Tensor | None, Tensor | None, Tensor, AbstractContextManager[None]]:
        """The indices, number and states of the rows of a kind, and a context for calls about them;
        all rows where the program does not compact.
        """
        if not control.compacts:
            return None, None, hidden, nullcontext()
        index, count, states = ops.select_rows(hidden, row=request, kind=kind, wanted=wanted)
        return index, count, states, control.rows(count)
