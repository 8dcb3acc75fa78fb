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

