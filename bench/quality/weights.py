"""The loss of quality by weights, or by a KV cache, of fewer bits: SmolLM2 on prose.

python -m bench weights [--cache] [--tokens 512] [--max-tokens 64]

Perplexity and next-token agreement on the language reference that comes with Python
(pydoc_data.topics), and the length for which greedy texts stay the same, compared with float32.
Writes bench/results/weights.json, or cache.json, and the table in bench/results, in about 2
minutes.
"""

from __future__ import annotations

import platform
import pydoc_data.topics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import eecore
from bench.harness.command import parser, say
from bench.harness.machine import machine
from bench.harness.results import Figures, Report
from bench.harness.rows import Columns, Row, table_of
from bench.harness.smollm2 import WEIGHTS, get_smollm2
from bench.quality.perplexity import states_of
from eecore.models import KVCache, LlamaModel, cache_dtype

TOPICS = ("objects", "execmodel", "exceptions", "operator-summary", "class", "try", "strings")
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8, float32 states": {"dtype": "float32", "weights": "int8"},
    "int8, bfloat16 states": {"dtype": "bfloat16", "weights": "int8"},
    "int4, float32 states": {"dtype": "float32", "weights": "int4"},
}
CACHES: dict[str, dict[str, Any]] = {
    f"{states}, cache {cache}": {**WEIGHTS[states], "kv_cache_dtype": cache}
    for states, caches in {
        "float32": ("float32", "bfloat16", "fp8"),
        "bfloat16": ("bfloat16", "fp8"),
        "int8": ("float32", "bfloat16"),
        "int4": ("float32", "bfloat16"),
    }.items()
    for cache in caches
}
PROMPT_LENGTH = 32


class Text:
    """A text, and what float32 weights give for it: log probabilities and a greedy answer."""

    def __init__(self, model: eecore.Model, topic: str, num_tokens: int, max_tokens: int) -> None:
        assert model.tokenizer is not None
        ids = model.tokenizer.encode(pydoc_data.topics.topics[topic])[:num_tokens]
        self.token_ids = torch.tensor(ids)
        self.logprobs = logprobs_of(model, self.token_ids)
        self.answer = greedy(model, self.token_ids, max_tokens)


def logprobs_of(model: eecore.Model, token_ids: Tensor) -> Tensor:
    """Float32 [num_tokens, vocab_size] of one text, with the cache dtype of the engine."""
    network = model.network
    assert isinstance(network, LlamaModel)
    kept = cache_dtype(network, model.engine_config.kv_cache_dtype)
    return network.logits(states_of(network, token_ids, kept)).log_softmax(-1)


def greedy(model: eecore.Model, token_ids: Tensor, max_tokens: int) -> list[int]:
    """The greedy continuation of a text's beginning."""
    prompt = token_ids[:PROMPT_LENGTH].tolist()
    (output,) = eecore.generate(model, prompt, exit="full", max_tokens=max_tokens, ignore_eos=True)
    return output.token_ids


def measure(model: eecore.Model, texts: list[Text], max_tokens: int) -> dict[str, float]:
    """Measures of quality: means over every position of every text."""
    nats, agreed, divergence, alike, count = 0.0, 0, 0.0, 0, 0
    for text in texts:
        logprobs = logprobs_of(model, text.token_ids)
        following = text.token_ids[1:, None]
        nats -= float(logprobs[:-1].gather(1, following).sum())
        same = logprobs.argmax(-1) == text.logprobs.argmax(-1)
        agreed += int(same[:-1].sum())
        divergence += float(
            functional.kl_div(logprobs[:-1], text.logprobs[:-1], reduction="sum", log_target=True)
        )
        pairs = enumerate(zip(greedy(model, text.token_ids, max_tokens), text.answer, strict=True))
        alike += next((i for i, (a, b) in pairs if a != b), max_tokens)
        count += len(following)
    return {
        "perplexity": float(torch.tensor(nats / count).exp()),
        "top1_agreement": agreed / count,
        "kl_nats": divergence / count,
        "greedy_alike": alike / len(texts),
    }


def figures_of(kinds: Mapping[str, dict[str, Any]], num_tokens: int, max_tokens: int) -> Figures:
    """A row for each kind, given by its options of ``eecore.load``; the first is float32."""
    texts: list[Text] = []
    rows: list[Row] = []
    for name, options in kinds.items():
        model = eecore.load(
            get_smollm2(), device="cpu", prefix_cache=False, kv_cache_tokens=2048, **options
        )
        network = model.network
        texts = texts or [Text(model, topic, num_tokens, max_tokens) for topic in TOPICS]
        tensors = [t for t in tree_leaves(list(vars(network.weights).values())) if t is not None]
        dtype = cache_dtype(network, options.get("kv_cache_dtype", "auto"))
        rows.append(
            {
                "name": name,
                "weight_bytes": sum({t.data_ptr(): t.nbytes for t in tensors}.values()),
                "cache_bytes_per_token": KVCache.bytes_per_token(network.config, dtype),
                **measure(model, texts, max_tokens),
            }
        )
        say(rows[-1])
    return {
        "python": platform.python_version(),
        **machine(),
        "num_texts": len(texts),
        "num_tokens": sum(len(text.token_ids) for text in texts),
        "max_tokens": max_tokens,
        "kinds": rows,
    }


def table(result: Figures, columns: Columns, compared: str, more: str) -> str:
    length = result["max_tokens"]
    quality: Columns = (
        ("perplexity", "{perplexity:.3f}"),
        ("same likeliest token", "{top1_agreement:.1%}"),
        ("KL (nats)", "{kl_nats:.4f}"),
        ("greedy tokens alike", f"{{greedy_alike:.1f}} of {length}"),
    )
    about = (
        f"SmolLM2-135M-Instruct on {result['num_tokens']} tokens of Python {result['python']}'s "
        f"language reference, compared with {compared} Greedy: mean length of the common beginning "
        f"with the float32 text, {result['num_texts']} texts. `python -m bench weights{more}`"
    )
    return f"{table_of([*columns, *quality], result['kinds'])}\n\n{about}"


def weights_table(result: Figures) -> str:
    columns = [("weights", "{name}"), ("MB", lambda row: f"{row['weight_bytes'] / 1e6:.0f}")]
    compared = (
        "float32 weights, which come from blocks of 4 bits that int4 reproduces. int8 and int4: "
        "blocks of 32 numbers, states quantised to 8 bits in each product."
    )
    return table(result, columns, compared, "")


def cache_table(result: Figures) -> str:
    columns = [
        ("states", "{name}"),
        ("kB a token", lambda row: f"{row['cache_bytes_per_token'] / 1e3:.1f}"),
    ]
    compared = "float32 and a cache in float32; fp8: e4m3, scales of 1."
    return table(result, columns, compared, " --cache")


REPORTS = (
    Report("weights", {"weights": weights_table}, {"kinds": ("name",)}),
    Report("cache", {"cache": cache_table}, {"kinds": ("name",)}),
)


def main(words: Sequence[str]) -> None:
    made = parser("weights", __doc__)
    made.add_argument("--cache", action="store_true", help="KV caches instead of weights")
    made.add_argument("--tokens", type=int, default=512, help="of each text")
    made.add_argument("--max-tokens", type=int, default=64)
    arguments = made.parse_args(words)
    kinds = CACHES if arguments.cache else KINDS
    figures = figures_of(kinds, arguments.tokens, arguments.max_tokens)
    REPORTS[arguments.cache].finish(figures, arguments)
