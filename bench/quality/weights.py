"""The loss of quality by weights of fewer bits: SmolLM2 on prose, compared with float32 weights.

python -m bench weights [--tokens 512] [--max-tokens 64]

Perplexity and next-token agreement on the language reference that comes with Python
(pydoc_data.topics), and the length for which greedy texts stay the same. Writes
bench/results/weights.json and the table in bench/results, in about 2 minutes.
"""

from __future__ import annotations

import argparse
import platform
import pydoc_data.topics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import eecore
from bench.harness.command import parser, say
from bench.harness.machine import machine
from bench.harness.results import Figures, Report
from bench.harness.smollm2 import get_smollm2
from bench.quality.perplexity import states_of
from eecore.lab.evaluation.tables import markdown_table
from eecore.models import LlamaModel, cache_dtype

TOPICS = ("objects", "execmodel", "exceptions", "operator-summary", "class", "try", "strings")
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8, float32 states": {"dtype": "float32", "weights": "int8"},
    "int8, bfloat16 states": {"dtype": "bfloat16", "weights": "int8"},
    "int4, float32 states": {"dtype": "float32", "weights": "int4"},
}
QUALITY = ("perplexity", "same likeliest token", "KL (nats)", "greedy tokens alike")
PROMPT_LENGTH = 32


def logits_of(model: eecore.Model, token_ids: Tensor) -> Tensor:
    """Float32 logits [num_tokens, vocab_size] of one text, with the cache dtype of the engine."""
    network = model.network
    assert isinstance(network, LlamaModel)
    kept = cache_dtype(network, model.engine_config.kv_cache_dtype)
    return network.logits(states_of(network, token_ids, kept))


@dataclass
class Text:
    """A text, and its log probabilities by float32 weights."""

    token_ids: Tensor
    logprobs: Tensor


def measure(model: eecore.Model, texts: list[Text]) -> dict[str, float]:
    """Measures of quality: means over every position of every text."""
    nats, agreed, divergence, count = 0.0, 0, 0.0, 0
    for text in texts:
        logprobs = logits_of(model, text.token_ids).log_softmax(-1)
        following = text.token_ids[1:, None]
        nats -= float(logprobs[:-1].gather(1, following).sum())
        same = logprobs.argmax(-1) == text.logprobs.argmax(-1)
        agreed += int(same[:-1].sum())
        divergence += float(
            functional.kl_div(logprobs[:-1], text.logprobs[:-1], reduction="sum", log_target=True)
        )
        count += len(following)
    return {
        "perplexity": float(torch.tensor(nats / count).exp()),
        "top1_agreement": agreed / count,
        "kl_nats": divergence / count,
    }


def greedy(model: eecore.Model, texts: list[Text], max_tokens: int) -> list[list[int]]:
    """Greedy continuations of each text's beginning."""
    prompts = [text.token_ids[:PROMPT_LENGTH].tolist() for text in texts]
    outputs = eecore.generate(model, prompts, exit="full", max_tokens=max_tokens, ignore_eos=True)
    return [output.token_ids for output in outputs]


def same_prefix(a: list[int], b: list[int]) -> int:
    """The number of equal tokens at the beginning of both lists."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def weight_bytes(model: LlamaModel) -> int:
    """Bytes of all parameters, each counted once."""
    tensors = tree_leaves(list(vars(model.weights).values()))
    tensors = [tensor for tensor in tensors if tensor is not None]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def rows_of(
    kinds: Mapping[str, dict[str, Any]], num_tokens: int, max_tokens: int
) -> tuple[list[dict[str, Any]], list[Text]]:
    """A row for each kind, given by its options of ``eecore.load``, and the texts to score."""
    directory = get_smollm2()
    texts: list[Text] = []
    expected: list[list[int]] = []
    rows = []
    for name, options in kinds.items():
        model = eecore.load(
            directory, device="cpu", prefix_cache=False, kv_cache_tokens=2048, **options
        )
        if not texts:
            assert model.tokenizer is not None
            for topic in TOPICS:
                ids = model.tokenizer.encode(pydoc_data.topics.topics[topic])
                token_ids = torch.tensor(ids[:num_tokens])
                texts.append(Text(token_ids, logits_of(model, token_ids).log_softmax(-1)))
        tokens = greedy(model, texts, max_tokens)
        expected = expected or tokens
        alike = [same_prefix(*pair) for pair in zip(tokens, expected, strict=True)]
        rows.append(
            {
                "name": name,
                "weight_bytes": weight_bytes(model.network),
                **measure(model, texts),
                "greedy_alike": sum(alike) / len(alike),
            }
        )
        say(rows[-1])
    return rows, texts


def figures_of(kinds: Mapping[str, dict[str, Any]], arguments: argparse.Namespace) -> Figures:
    rows, texts = rows_of(kinds, arguments.tokens, arguments.max_tokens)
    return {
        "python": platform.python_version(),
        **machine(),
        "num_texts": len(texts),
        "num_tokens": sum(len(text.token_ids) for text in texts),
        "max_tokens": arguments.max_tokens,
        "kinds": rows,
    }


def quality_cells(row: dict[str, Any], max_tokens: int) -> list[str]:
    """The cells of a row under :data:`QUALITY`."""
    return [
        f"{row['perplexity']:.3f}",
        f"{row['top1_agreement']:.1%}",
        f"{row['kl_nats']:.4f}",
        f"{row['greedy_alike']:.1f} of {max_tokens}",
    ]


def markdown(result: Figures) -> str:
    lines = [
        [
            row["name"],
            f"{row['weight_bytes'] / 1e6:.0f}",
            *quality_cells(row, result["max_tokens"]),
        ]
        for row in result["kinds"]
    ]
    about = (
        f"SmolLM2-135M-Instruct on {result['num_tokens']} tokens of Python {result['python']}'s "
        "language reference, compared with float32 weights, which come from blocks of 4 bits that "
        "int4 reproduces. int8 and int4: blocks of 32 numbers, states quantised to 8 bits in "
        "each product. Greedy: mean length of the common beginning with the float32 text, "
        f"{result['num_texts']} texts. `python -m bench weights`"
    )
    return f"{markdown_table(['weights', 'MB', *QUALITY], lines)}\n\n{about}"


REPORTS = (Report("weights", {"weights": markdown}, {"kinds": ("name",)}),)


def parsed(name: str, about: str | None, words: Sequence[str]) -> argparse.Namespace:
    made = parser(name, about)
    made.add_argument("--tokens", type=int, default=512, help="of each text")
    made.add_argument("--max-tokens", type=int, default=64)
    return made.parse_args(words)


def main(words: Sequence[str]) -> None:
    arguments = parsed("weights", __doc__, words)
    REPORTS[0].finish(figures_of(KINDS, arguments), arguments)
