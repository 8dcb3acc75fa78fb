"""The only lists of shapes: correctness tests and benchmarks draw from here.

Sizes are chosen to be awkward: zero and one rows, page edges, odd vocabularies, ragged batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Tolerance:
    rtol: float
    atol: float


# Of results computed in float32 and stored in the dtype, against a float64 or float32 oracle.
TOLERANCES = {
    torch.float32: Tolerance(rtol=2e-5, atol=2e-5),
    torch.bfloat16: Tolerance(rtol=1.6e-2, atol=1e-2),
}

BATCH_SIZES = (0, 1, 2, 7, 64, 257)

# Hidden sizes of the per-row confidence measures: below, at and beside every vector width.
HIDDEN_SIZES = (1, 7, 16, 33, 64, 576, 4096)

# Hidden layers of the early-exit classifier; None is the linear one.
CLASSIFIER_INNER_SIZES = (None, 1, 5, 64, 1000)

# Drafts of each sequence in a verification: none at all, ragged, one sequence, a full batch.
DRAFT_LENGTHS: tuple[tuple[int, ...], ...] = (
    (),
    (0,),
    (5,),
    (0, 0, 0),
    (3, 0, 1, 7, 0),
    (4,) * 33,
)

# Vocabularies of verification: one token, odd, and past one block of the cumulative sum.
ACCEPT_VOCAB_SIZES = (1, 17, 257, 49153)
