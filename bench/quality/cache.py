"""The loss of quality by a KV cache of fewer bits: SmolLM2 on prose, compared with float32.

python -m bench cache [--tokens 512] [--max-tokens 64]

The texts and measures of ``python -m bench weights``. Writes bench/results/cache.json and the
table in bench/results, in about 2 minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import eecore
from bench.harness.results import Figures, Report
from bench.harness.smollm2 import WEIGHTS, get_smollm2
from bench.quality.weights import QUALITY, figures_of, parsed, quality_cells
from eecore.lab.evaluation.tables import markdown_table
from eecore.models import KVCache, cache_dtype

KINDS: dict[str, dict[str, Any]] = {
    f"{states}, cache {cache}": {**WEIGHTS[states], "kv_cache_dtype": cache}
    for states, caches in {
        "float32": ("float32", "bfloat16", "fp8"),
        "bfloat16": ("bfloat16", "fp8"),
        "int8": ("float32", "bfloat16"),
        "int4": ("float32", "bfloat16"),
    }.items()
    for cache in caches
}


def bytes_per_token() -> dict[str, int]:
    """Bytes per token of the cache of each kind."""
    sizes = {}
    for name, options in KINDS.items():
        network = eecore.load(get_smollm2(), device="cpu", **options).network
        dtype = cache_dtype(network, options["kv_cache_dtype"])
        sizes[name] = KVCache.bytes_per_token(network.config, dtype)
    return sizes


def markdown(result: Figures) -> str:
    lines = [
        [
            row["name"],
            f"{result['bytes_per_token'][row['name']] / 1e3:.1f}",
            *quality_cells(row, result["max_tokens"]),
        ]
        for row in result["kinds"]
    ]
    about = (
        f"SmolLM2-135M-Instruct on {result['num_tokens']} tokens of Python {result['python']}'s "
        "language reference, compared with float32 and a cache in float32; fp8: e4m3, scales of 1. "
        "Greedy: mean length of the common beginning with the float32 text, "
        f"{result['num_texts']} texts. `python -m bench cache`"
    )
    return f"{markdown_table(['states', 'kB a token', *QUALITY], lines)}\n\n{about}"


REPORTS = (Report("cache", {"cache": markdown}, {"kinds": ("name",)}),)


def main(words: Sequence[str]) -> None:
    arguments = parsed("cache", __doc__, words)
    figures = {**figures_of(KINDS, arguments), "bytes_per_token": bytes_per_token()}
    REPORTS[0].finish(figures, arguments)
