"""Models with draft heads: of each kind one of noise, and some that are mostly right about the
model that they draft for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import eecore
from block_heads import write_block_head
from devices import load
from eagle_heads import Layout, write_eagle
from eecore.models import KVCache
from eecore.planning.proposal import MAX_AHEAD, Ahead
from head_packs import write_pack
from mtp_heads import write_mimo, write_qwen3_5
from tiny_models import random_prompts, scale_layers, write_model

PROMPTS = [[7, 8, 9] * 5, *random_prompts(1, 23, 9, 31, 4, seed=4), [3, 4, 5, 6, 3, 4]]
BLOCKS = {"dflash": "z-lab", "dspark": "DeepSpec"}
"""Layouts of heads that draft a block."""
ATTENDED = ((0, 1), (2, 0), (2, 1))
"""Layers and key heads that the head ``attending`` attends to, two of one layer among them."""
INSIDE: dict[str, Callable[..., Path]] = {
    "mtp": write_mimo,
    "qwen3_5": partial(write_qwen3_5, family="qwen3_5_grouped", factor=0.01),
}
"""Models with a head inside."""
KINDS = ("recurrent", "attending", "eagle3", *BLOCKS, *INSIDE)
FOLLOWING = ("recurrent", "eagle3", "dspark", "qwen3_5")
"""Kinds of which :func:`write_head` makes one that is mostly right."""


def write_target(directory: Path) -> Path:
    """Write a model whose layers add little: the next token hangs on the last one, mostly."""
    return scale_layers(write_model(directory, seed=5), dict.fromkeys(range(4), 0.04))


def write_head(directory: Path, kind: str, model: Path, *, follows: bool = False) -> Path:
    """Write a head into a directory, which is returned.

    Args:
        directory: of the head.
        kind: of :data:`KINDS` but for :data:`INSIDE`, or with ``follows`` of :data:`FOLLOWING`;
            ``recurrent`` and ``attending`` are packs of eecore's own.
        model: of :func:`write_target`.
        follows: whether it drafts about what the model gives a token without its layers.
    """
    if kind in ("recurrent", "attending"):
        own = load(model, exits=False)
        if kind == "attending":
            return write_pack(directory, own, taps=(2,), attended=ATTENDED)
        if follows:
            return write_pack(directory, own, follows_tokens=True)
        return write_pack(directory, own, taps=(1, 3), blocks=2, vocabulary_size=37)
    if kind == "eagle3":
        target = json.loads((model / "config.json").read_text())
        layout, given = Layout(vocabulary_size=200), None
        if follows:
            layout = Layout(listed=True, norm_before_residual=True)
            given = load_file(model / "model.safetensors")
        return write_eagle(directory, target, layout, follows=given)
    if not follows:
        return write_block_head(directory, BLOCKS[kind])
    return _write_following(directory, model)


def _write_following(directory: Path, model: Path) -> Path:
    """A DSpark whose table gives the model's LM head of the token before, about."""
    write_block_head(directory, BLOCKS["dspark"], markov_rank=64)
    file = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    of_model = load_file(model / "model.safetensors")
    tensors["norm.weight"] *= 0.01
    table = of_model["model.embed_tokens.weight"]
    tensors["markov_head.markov_w1.weight"] = torch.nn.functional.rms_norm(table, (64,))
    lm_head = of_model["lm_head.weight"] * of_model["model.norm.weight"]
    tensors["markov_head.markov_w2.weight"] = lm_head
    tensors["confidence_head.proj.weight"].zero_()
    tensors["confidence_head.proj.bias"].fill_(2.0)
    save_file(tensors, file)
    return directory


class Models:
    """Models with heads, each made when it is first asked for.

    Args:
        scratch: a directory of its own.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._made: dict[str, eecore.Model] = {}

    @property
    def target(self) -> Path:
        """The directory of the model that all but :data:`INSIDE` are for."""
        directory = self._scratch / "model"
        return directory if directory.exists() else write_target(directory)

    def head(self, name: str) -> Path:
        """The directory of a head: a kind, followed by `` that follows`` where it is to."""
        directory, (kind, *follows) = self._scratch / name.replace(" ", "_"), name.split()
        if directory.exists():
            return directory
        if kind in INSIDE:
            return INSIDE[kind](directory, **{"follows": True} if follows else {})
        return write_head(directory, kind, self.target, follows=bool(follows))

    def __getitem__(self, name: str) -> eecore.Model:
        """The model with a head, of 2048 tokens of cache."""
        if name not in self._made:
            self._made[name] = self.load(name, kv_cache_tokens=2048)
        return self._made[name]

    def load(self, name: str, **settings: Any) -> eecore.Model:
        """The same with other settings."""
        head = self.head(name)
        return load(head if name.split()[0] in INSIDE else self.target, draft_head=head, **settings)


NAMES = (*KINDS, *(f"{kind} following" for kind in FOLLOWING))


def states_of(model: eecore.Model, tokens: list[int]) -> list[torch.Tensor]:
    """[num_tokens, hidden_size] after the layers of the head's taps, at all positions of a text."""
    network, count = model.network, len(tokens)
    kv = KVCache.allocate(network.config, 1, count, device=network.device, dtype=network.dtype)
    hidden, states = network.embed(torch.tensor(tokens, device=network.device)), []
    for layer in range(network.config.num_layers):
        hidden = network.layers(layer, layer + 1, hidden, kv, network.whole_text(count))
        states.append(hidden.clone())
    return [states[tap - 1] for tap in network.draft_head.taps]


def drafts_of(engine: eecore.Engine) -> Iterator[tuple[list[int], int, Ahead]]:
    """The text of each request, drafts that it may have, and what the head has drafted after it."""
    for sequence in engine.requests.values():
        ahead = sequence.draft and sequence.draft.ahead
        if ahead is not None:
            assert ahead.num_tokens == sequence.num_tokens
            tokens = sequence.tokens(0, sequence.num_tokens)
            yield tokens, sequence.tokens_left - 1, ahead


Oracle = Callable[[list[torch.Tensor], list[int], int], tuple[list[int], list[float]]]
"""Drafts and their scores, in plain PyTorch, from the states of the head's taps at all positions of
a text but the last, its tokens, and the number of drafts."""


def check_drafts(engine: eecore.Engine, model: eecore.Model, oracle: Oracle) -> int:
    """Whatever requests have drafted is what the formula drafts; how many have."""
    checked, at_once = 0, model.network.draft_head.num_at_once
    for tokens, left, ahead in drafts_of(engine):
        count = len(ahead.tokens)
        if not at_once:
            assert count == min(MAX_AHEAD, left)
        elif count < at_once:
            continue  # a block is cut where the text is to end, or where pages are few
        drafts, scores = oracle(states_of(model, tokens[:-1]), tokens, count)
        assert ahead.tokens == drafts
        assert ahead.probabilities == pytest.approx(scores, rel=2e-3, abs=1e-5)
        checked += 1
    return checked
