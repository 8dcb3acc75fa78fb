"""One entry to all benchmarks.

python -m bench --help            what there is
python -m bench NAME --help       what one of them does, and its options
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

BENCHMARKS = {
    "overview": "bench.overview",
    "tables": "bench.tables",
    "decode": "bench.decode.decode",
    "gguf": "bench.decode.gguf",
    "sizes": "bench.decode.sizes",
    "prefill": "bench.decode.prefill",
    "depth": "bench.depth.depth",
    "modes": "bench.exits.modes",
    "checks": "bench.exits.checks",
    "drafts": "bench.exits.drafts",
    "auto": "bench.exits.auto",
    "replay": "bench.exits.replay",
    "intents": "bench.intents.intents",
    "loops": "bench.depth.loops",
    "weights": "bench.quality.weights",
    "quality": "bench.quality.quality",
    "same-text": "bench.quality.same_text",
    "think": "bench.quality.think",
    "transformers": "bench.integrations.transformers",
    "vllm": "bench.integrations.vllm",
    "serve": "bench.serving.serve",
    "soak-serve": "bench.serving.soak",
    "thoughts-served": "bench.serving.thoughts",
    "ops-table": "bench.ops.table",
    "attention": "bench.ops.attention",
    "capabilities": "bench.ops.capabilities",
    "gpu": "bench.gpu.gpu",
    "gpu-decode": "bench.gpu.decode",
    "peers": "bench.harness.peers",
    "coder-files": "bench.harness.coder_files",
}
"""Modules that have a ``main(words)``, by name; none is imported before it is asked for."""


def about(module: str) -> str:
    """The first line of a module's docstring."""
    file = Path(__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py")
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


def listing() -> str:
    width = max(map(len, BENCHMARKS))
    lines = [f"  {name:{width}}  {about(module)}" for name, module in BENCHMARKS.items()]
    head = "usage: python -m bench NAME [OPTION ...], from the checkout's root\n"
    return "\n".join([head, *lines])


def main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(listing())
        return 0
    name, *rest = words
    if name not in BENCHMARKS:
        print(f"expected one of {', '.join(BENCHMARKS)}, got {name}", file=sys.stderr)
        return 2
    return importlib.import_module(BENCHMARKS[name]).main(rest) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
