"""The files and folders that benchmarks read and write."""

from __future__ import annotations

import lzma
from pathlib import Path

from eecore.files.whole import replacing

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
"""The figures, as JSON."""
RESULTS_PAGE = ROOT / "bench" / "RESULTS.md"
README = ROOT / "README.md"
MODELS = ROOT / ".models"
T5 = ROOT / "bench" / "models" / "calm-intents"
PAGES = ROOT / "build" / "bench"
"""Pages and figures that are made from the results and not committed."""


def unpacked_t5() -> Path:
    """The directory of the trained T5, with the weights unpacked; git has them compressed."""
    weights = T5 / "model.safetensors"
    if not weights.exists():
        with replacing(weights) as partial:
            partial.write_bytes(lzma.decompress((T5 / "model.safetensors.xz").read_bytes()))
    return T5
