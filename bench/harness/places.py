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
THINKER = ROOT / "bench" / "models" / "thinker"
PAGES = ROOT / "build" / "bench"
"""Pages and figures that are made from the results and not committed."""


def unpacked(directory: Path) -> Path:
    """A directory of bench/models, with the weights unpacked; git has them compressed."""
    weights = directory / "model.safetensors"
    if not weights.exists():
        with replacing(weights) as partial:
            partial.write_bytes(lzma.decompress((directory / "model.safetensors.xz").read_bytes()))
    return directory
