"""Perplexity as llama-perplexity computes it: over the second half of each window of a text.

Windows do not overlap, and each is a text of its own. The tokens from a window's middle on are
scored, so that each scored token has at least half a window of context.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from eecore.models import KVCache, LlamaModel


def states_of(
    model: LlamaModel, token_ids: Tensor, cache_dtype: torch.dtype | None = None
) -> Tensor:
    """States [num_tokens, hidden_size] of one text after the last layer.

    ``cache_dtype``: of the KV cache; None for the model's dtype.
    """
    count, dtype = len(token_ids), cache_dtype or model.dtype
    kv = KVCache.allocate(model.config, 1, count, device=model.device, dtype=dtype)
    batch = model.whole_text(count)
    return model.layers(0, model.config.num_layers, model.embed(token_ids), kv, batch)


def window_losses(model: LlamaModel, windows: Iterable[Sequence[int]]) -> list[float]:
    """Mean nats of the scored tokens of each window."""
    losses = []
    for window in windows:
        ids = torch.tensor(window)
        scored = slice(len(window) // 2, len(window) - 1)  # positions whose next token is scored
        logits = model.logits(states_of(model, ids)[scored])
        losses.append(float(functional.cross_entropy(logits.float(), ids[1:][scored])))
    return losses


def losses_of_output(text: str) -> list[float]:
    """Mean nats of each window, from the running perplexities of llama-perplexity's output."""
    running = [math.log(float(value)) for value in re.findall(r"\[\d+\](\d+\.\d+)", text)]
    totals = [0.0, *(count * mean for count, mean in enumerate(running, 1))]
    return [after - before for before, after in pairwise(totals)]


def perplexity(losses: Sequence[float]) -> float:
    """The perplexity of windows of equal length, from the mean nats of each."""
    return math.exp(sum(losses) / len(losses))
