"""Where benchmarks find and leave things."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
"""The figures, as JSON."""
RESULTS_PAGE = ROOT / "bench" / "RESULTS.md"
README = ROOT / "README.md"
MODELS = ROOT / ".models"
T5 = ROOT / "bench" / "models" / "calm-intents"
PAGES = ROOT / "build" / "bench"
"""Pages and figures that are made of the results and kept nowhere."""
