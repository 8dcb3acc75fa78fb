"""Finds the sublayers that SmolLM2's drafts can skip, for the benchmark of all modes.

Writes smollm2_skips.json. The search uses the model's own answers to questions that are neither in
the demo nor in a benchmark. Takes a few minutes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import eecore
from eecore.cli.app import run
from get_smollm2 import get_smollm2

OUT = Path(__file__).parent / "smollm2_skips.json"
QUESTIONS = (
    "What are the benefits of regular exercise?",
    "Write a Python function that reverses a string.",
    "Tell me a short story about a lighthouse.",
    "How does a bicycle stay upright?",
)


def main() -> int:
    directory = get_smollm2()
    model = eecore.load(directory, kv_cache_tokens=1024)
    tokenizer = model.tokenizer
    assert tokenizer is not None
    asked = [tokenizer.apply_chat_template([{"role": "user", "content": q}]) for q in QUESTIONS]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in asked]
    outputs = eecore.generate(model, prompts, exit="full", max_tokens=64)
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch) / "text.txt"
        answers = zip(asked, outputs, strict=True)
        text.write_text("\n".join(f"{question}{output.text}" for question, output in answers))
        options = ["--max-tokens", "320", "--max-skipped", "12"]
        return run(["search", str(directory), "--text", str(text), "--out", str(OUT), *options])


if __name__ == "__main__":
    sys.exit(main())
