"""A search for the sublayers that a draft can skip, on the user's own text.

Zhang et al. 2023 (Draft & Verify) search the set by Bayesian optimisation of the generation speed.
Here each sublayer's loss is measured once, then sublayers are skipped one after the other, each
time the best of a few promising candidates; the result is the prefix of that path with the highest
predicted speed-up.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from eecore.calibration.exit_scores import whole_sequences
from eecore.config import MAX_LAYERS, AnyModelConfig
from eecore.errors import RequestError
from eecore.exits import DraftAndVerify
from eecore.files.json_fields import JsonFields, read_json_value
from eecore.files.readable import path_of
from eecore.files.whole import write_text
from eecore.generation import Model
from eecore.models import KVCache, Network, T5Model
from eecore.values import INT32_MAX, shown

Sublayer = tuple[str, int]
PAGE_SIZE = 16
MAX_STEPS = 2 * MAX_LAYERS
CANDIDATES = 6
"""The most promising sublayers, which are tried at each step."""
MAX_DRAFTS = 8
"""The longest draft that the prediction considers."""


@dataclass(frozen=True)
class SkipStep:
    """A set on the path of the search."""

    skip_attention: tuple[int, ...]
    skip_mlp: tuple[int, ...]
    agreement: float
    """Share of positions at which draft and full model have the same argmax."""
    draft_cost: float
    """Weights that a draft token reads, over those of a full one."""
    predicted_speedup: float
    """Speed-up over full decoding, bound by weights read, at the best draft length."""
    num_drafts: int


@dataclass(frozen=True)
class SkipSearch:
    """The path of a search; ``best`` is its set with the highest predicted speed-up."""

    path: tuple[SkipStep, ...]

    @property
    def best(self) -> SkipStep:
        return max(self.path, key=lambda step: step.predicted_speedup)

    def policy(self, num_drafts: int | None = None) -> DraftAndVerify:
        """The exit policy of the best set."""
        best = self.best
        return DraftAndVerify(
            frozenset(best.skip_attention),
            frozenset(best.skip_mlp),
            num_drafts=num_drafts or best.num_drafts,
        )

    def save(self, path: str | Path) -> None:
        """Write the path as JSON."""
        write_text(path, json.dumps([asdict(step) for step in self.path], indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> SkipSearch:
        """Read a file of :meth:`save`; RequestError for anything else."""
        steps = read_json_value(path_of(path, RequestError), RequestError)
        if not isinstance(steps, list) or not 1 <= len(steps) <= MAX_STEPS:
            raise RequestError(
                f"{path}: expected the path of a search, a list of steps, got {shown(steps)}"
            )
        return SkipSearch(
            tuple(
                _read_step(JsonFields.of(step, str(path), RequestError, f"[{index}]."))
                for index, step in enumerate(steps)
            )
        )


def _read_step(read: JsonFields) -> SkipStep:
    read.only(*(field.name for field in fields(SkipStep)))
    step = SkipStep(
        skip_attention=read.integers("skip_attention", 0, MAX_LAYERS - 1, most=MAX_LAYERS),
        skip_mlp=read.integers("skip_mlp", 0, MAX_LAYERS - 1, most=MAX_LAYERS),
        agreement=read.number("agreement", 0.0, 1.0),
        draft_cost=read.number("draft_cost", 0.0, 1.0),
        predicted_speedup=read.number("predicted_speedup", 0.0, 1e6),
        num_drafts=read.integer("num_drafts", 1, INT32_MAX),
    )
    if not step.skip_attention and not step.skip_mlp:
        raise read.wrong("skip_attention", "a layer, or one of skip_mlp", [])
    return step


def predicted_speedup(agreement: float, draft_cost: float, max_drafts: int) -> tuple[float, int]:
    """The speed-up and the draft length, when every token costs the weights it reads.

    A round of d drafts costs ``d * draft_cost + 1`` full passes and gives
    ``(1 - a^(d+1)) / (1 - a)`` tokens in the mean (Leviathan et al. 2023, eq. 1).
    """
    a = min(agreement, 0.999)
    options = [
        ((1 - a ** (d + 1)) / (1 - a) / (d * draft_cost + 1), d) for d in range(1, max_drafts + 1)
    ]
    return max(options)


@torch.inference_mode()
def search_skipped_sublayers(
    model: Model,
    texts: Sequence[str | Sequence[int]],
    *,
    max_tokens: int = 256,
    max_skipped: int | None = None,
    progress: Callable[[SkipStep], None] | None = None,
) -> SkipSearch:
    """Find the sublayers that a :class:`eecore.DraftAndVerify` draft of this model can skip.

    Args:
        model: from :func:`eecore.load`.
        texts: a few hundred words similar to the model's intended texts, or their token ids.
        max_tokens: tokens of all texts that are used.
        max_skipped: sublayers to skip, at most; as many as the model has layers when None.
        progress: called with each set on the search's path.
    """
    if max_skipped is not None and max_skipped < 1:
        raise RequestError(f"max_skipped: expected 1 or more, got {max_skipped}")
    network, windows = model.network, list[list[int]]()
    for text in texts:
        left = max_tokens - sum(len(window) for window in windows)
        if not isinstance(text, str):
            tokens = list(text)
        elif model.tokenizer is None:
            raise RequestError("texts: expected a model with a tokenizer, got one without")
        else:
            tokens = model.tokenizer.encode(text)
        windows.append(tokens[: max(left, 0)])
    if isinstance(network, T5Model):
        raise RequestError(f"model: expected a decoder alone, got {network.config.architecture}")
    windows = [window for window in windows if len(window) >= 2]
    if not windows:
        raise RequestError("texts: expected at least one of two or more tokens, got none")
    longest = max(len(window) for window in windows)
    if longest > network.config.max_position:
        raise RequestError(
            f"texts: expected at most {network.config.max_position} tokens each, got {longest}"
        )
    config = network.config
    probe = _Probe(network, windows)
    free: list[Sublayer] = [
        (kind, i) for i in range(config.num_layers) for kind in ("attention", "mlp")
    ]
    alone = {sublayer: probe.score([sublayer])[0] for sublayer in free}
    skipped: list[Sublayer] = []
    path: list[SkipStep] = []
    while len(skipped) < (max_skipped or config.num_layers) and free:
        tried = sorted(free, key=lambda sublayer: -alone[sublayer])[:CANDIDATES]
        scored = [(probe.score([*skipped, sublayer]), sublayer) for sublayer in tried]
        (_, agreement), chosen = max(scored, key=lambda item: item[0])
        skipped.append(chosen)
        free.remove(chosen)
        step = _step(config, skipped, agreement)
        path.append(step)
        if progress is not None:
            progress(step)
        if step.predicted_speedup < 0.8 * max(s.predicted_speedup for s in path):
            break
    return SkipSearch(tuple(path))


def _step(config: AnyModelConfig, skipped: list[Sublayer], agreement: float) -> SkipStep:
    weights = {
        "attention": config.hidden_size * (2 * config.q_size + 2 * config.kv_size),
        "mlp": 3 * config.hidden_size * config.intermediate_size,
    }
    total = config.num_layers * sum(weights.values()) + config.vocab_size * config.hidden_size
    cost = 1 - sum(weights[kind] for kind, _ in skipped) / total
    speedup, num_drafts = predicted_speedup(agreement, cost, MAX_DRAFTS)
    return SkipStep(
        skip_attention=tuple(sorted(i for kind, i in skipped if kind == "attention")),
        skip_mlp=tuple(sorted(i for kind, i in skipped if kind == "mlp")),
        agreement=agreement,
        draft_cost=cost,
        predicted_speedup=speedup,
        num_drafts=num_drafts,
    )


class _Probe:
    """Runs all texts at once, teacher-forced, and compares with the full model."""

    def __init__(self, network: Network, texts: list[list[int]]) -> None:
        device = network.device
        ids = torch.tensor(list(itertools.chain(*texts)), device=device)
        self._network, self._embedded = network, network.embed(ids)
        self._batch = whole_sequences([len(text) for text in texts], PAGE_SIZE, device)
        num_pages = int(self._batch.page_table.max()) + 1
        self._kv = KVCache.allocate(
            network.config, num_pages, PAGE_SIZE, device=device, dtype=network.dtype
        )
        self._full = self._probs([])
        self._tokens = self._full.argmax(dim=-1)

    def score(self, skipped: list[Sublayer]) -> tuple[float, float]:
        """The mean acceptance probability, to rank by, and the agreement of the argmax."""
        probs = self._probs(skipped)
        agreement = float((probs.argmax(dim=-1) == self._tokens).float().mean())
        overlap = float(torch.minimum(probs, self._full).sum(dim=-1).mean())
        return agreement + overlap, agreement

    def _probs(self, skipped: list[Sublayer]) -> Tensor:
        """Probabilities, [num_tokens, vocab_size]."""
        hidden = self._network.layers(
            0,
            self._network.config.num_layers,
            self._embedded,
            self._kv,
            self._batch,
            skip_attention=frozenset(i for kind, i in skipped if kind == "attention"),
            skip_mlp=frozenset(i for kind, i in skipped if kind == "mlp"),
        )
        return self._network.logits(hidden).softmax(dim=-1)
