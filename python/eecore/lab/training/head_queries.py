"""What the queries of a draft head begin as: what the model itself asks the same keys.

As nearly as a linear layer can say it from what the head knows.

Random ones would find nothing to learn from for a long time: keys are looked for long before what
is found there is of use.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from eecore.lab.training.draft_head import DraftHead
from eecore.lab.training.head_loss import FrozenSide
from eecore.lab.training.head_states import HeadStates

__all__ = ["begin_queries"]

ROWS_AT_ONCE = 4096
RIDGE = 1e-2
"""Of the mean square of what is known, added to its squares."""


@torch.no_grad()
def begin_queries(head: DraftHead, frozen: FrozenSide, data: HeadStates, rows: Tensor) -> None:
    """Fit a head's queries to the model's own, by least squares.

    Args:
        head: its ``attention_query`` is written; its other weights are what it begins with.
        frozen: of the model.
        data: all of it, with queries.
        rows: bool [n], which of it may be learnt from.
    """
    hidden = head.sizes.hidden_size
    squares = torch.zeros(hidden, hidden)
    products = torch.zeros(hidden, head.attention_query.shape[:2].numel())
    for first, queries in data.queries:
        for begin in range(0, len(queries), ROWS_AT_ONCE):
            asked = torch.arange(max(1, begin), min(begin + ROWS_AT_ONCE, len(queries)))
            before = asked + first - 1
            inside = (data.text[before] == data.text[before + 1]) & rows[before]
            asked, before = asked[inside], before[inside]
            if not len(asked):
                continue
            state = head.begin(data.states[before].float())
            known = head.asked(state, frozen.embeddings[data.token[before]])
            known = functional.rms_norm(known, head.attention_norm.shape, None, frozen.eps)
            squares += known.T @ known
            products += known.T @ queries[asked].float().flatten(1)
    scale = squares.diagonal().mean()
    if not scale > 0:
        return
    ridge = RIDGE * scale * torch.eye(hidden)
    fitted = torch.linalg.solve(squares + ridge, products)
    head.attention_query.copy_(fitted.T.view_as(head.attention_query))
