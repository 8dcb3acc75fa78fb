"""What a state says: confidence at an exit point, and the token that the head gives.

Rows of plain greedy requests go through the fused head, which never has logits in memory; rows of
requests that sample, penalise or ask for log-probabilities through a head with logits.
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
from eecore.exits import ExitClassifier, Measure
from eecore.models import DraftHead, Network

__all__ = [
    "GREEDY",
    "KNOWN",
    "LOGITS",
    "HeadWork",
    "Heads",
    "Logits",
    "head_fields",
    "measure_states",
    "state_measure",
]

# How the token of a row is made: it is known already, by the fused head, from logits.
KNOWN = 0
GREEDY = 1
LOGITS = 2


def measure_states(
    model: Network,
    measure: Measure,
    classifier: ExitClassifier | None,
    previous: Tensor,
    hidden: Tensor,
) -> Tensor:
    """A measure other than ``softmax`` of [num_rows, hidden_size]: float32 [num_rows]."""
    if measure == "cut":
        assert isinstance(model.draft_head, DraftHead)
        return model.draft_head.gap(hidden)
    return state_measure(classifier, previous)(hidden)


def state_measure(
    classifier: ExitClassifier | None, previous: Tensor
) -> ops.CosineMeasure | ops.MlpMeasure:
    """``classifier``, or ``state`` without one, as ops take it; ``previous``: a layer before."""
    if classifier is None:
        return ops.CosineMeasure(previous)
    m = classifier.on(previous.device)
    return ops.MlpMeasure(m.weight1, m.bias1, m.weight2, m.bias2)


def head_fields(num_rows: int, sizes: HeadSizes) -> dict[str, Field]:
    """Memory for what heads say of ``num_rows`` rows."""
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
    """What the rows that need logits want of them; see ``sample_tokens``."""

    rows: ops.SamplingRows
    positions: Tensor
    """int64 [num_rows], of the token before."""
    purpose: int
    probs: Tensor | None = None
    """Their filtered distributions, by row, or by ``probs_by_step`` for each request."""
    uniform: Tensor | None = None
    probs_by_step: int = 0
    round_tokens: Tensor | None = None
    first_position: Tensor | None = None


@dataclass(frozen=True)
class Logits:
    """The logits of some rows, until the program runs again."""

    values: Tensor
    """[num_rows, vocab_size]"""
    index: Tensor | None
    """int32 [num_rows], which rows; None: all of them."""

    def of(self, row: int, token: int) -> float:
        """The logit of a token."""
        if self.index is not None:
            row = self.index.tolist().index(row)
        return float(self.values[row, token])


class Heads:
    """The heads of one model, for rows of both kinds."""

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
        """Write what the head says of the rows of ``hidden`` whose request is GREEDY or LOGITS.

        Args:
            hidden: [num_rows, hidden_size].
            kind: int32 [num_requests].
            out: of :func:`head_fields`.
            control: of the program, told how many rows there are.
            work: of the requests that need logits, if there are any.
            request: int32 [num_rows], each row's; None: row i is that of request i.
            as_probability: ``gap`` is to be the probability of the token.

        Returns:
            Where the logits are, if some rows need them.
        """
        if self.sizes.greedy:
            index, states, few = self._picked(hidden, kind, control, request, GREEDY)
            # Rows of several to a request are all placed, and those that need logits once more.
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
        index, states, few = self._picked(hidden, kind, control, request, LOGITS)
        with few:
            logits = self._model.logits(states, few=True)
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
        return Logits(logits, index)

    def _picked(
        self, hidden: Tensor, kind: Tensor, control: Control, request: Tensor | None, wanted: int
    ) -> tuple[Tensor | None, Tensor, AbstractContextManager[None]]:
        """The rows of a kind, by index and state, and a context for calls about them; all rows
        where a program does not compact.
        """
        if not control.compacts:
            return None, hidden, nullcontext()
        index, count, states = ops.select_rows(hidden, row=request, kind=kind, wanted=wanted)
        return index, states, control.rows(count)
