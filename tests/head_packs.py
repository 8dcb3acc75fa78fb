"""Packs of draft heads for small models: random ones, and one for layers that add little."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

import eecore
from eecore import ops
from eecore.models import head_vocabulary, network_digest, recurrent_head

EPS = 1e-5


def write_pack(
    path: Path,
    model: eecore.Model,
    *,
    taps: tuple[int, ...] = (),
    inner: int = 24,
    blocks: int = 1,
    vocabulary_size: int = 0,
    follows_tokens: bool = False,
    attended: tuple[tuple[int, int], ...] = (),
    seed: int = 0,
    **fields: Any,
) -> Path:
    """A pack of random weights.

    Args:
        path: the pack's directory.
        model: the model of the head.
        taps: layers whose states the head sees, in addition to the last.
        inner: width of its MLPs.
        blocks: the number of MLPs.
        vocabulary_size: how many tokens it knows, drawn at random; 0: all.
        attended: layers and key heads of the model that it attends to.
        follows_tokens: its drafts are those of the model whose layers add nothing.
        seed: seeds the weights.
        fields: fields that replace those of its JSON.
    """
    network = model.network
    config = network.config
    generator = torch.Generator().manual_seed(seed)
    hidden, count = config.hidden_size, len(taps) + 1

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    def ones(*shape: int) -> Tensor:
        return 1.0 + 0.1 * torch.randn(shape, generator=generator)

    tensors = {
        "taps.norm": ones(count, hidden),
        "taps.weight": normal(count, hidden, hidden),
        "state.norm": ones(hidden),
        "state.weight": normal(hidden, hidden),
        "token.norm": ones(hidden),
        "token.weight": normal(hidden, hidden),
        "mlp.norm": ones(blocks, hidden),
        "mlp.gate": normal(blocks, inner, hidden),
        "mlp.up": normal(blocks, inner, hidden),
        "mlp.down": normal(blocks, hidden, inner),
        "norm": ones(hidden),
    }
    if attended:
        queries = config.num_q_heads // config.num_kv_heads * config.head_dim
        tensors["attention.norm"] = ones(hidden)
        tensors["attention.query"] = normal(len(attended), queries, hidden)
        tensors["attention.output"] = normal(len(attended), hidden, queries)
        layers, key_heads = zip(*attended, strict=True)
        attention = {"layers": layers, "key_heads": key_heads, "queries": queries}
        fields = {"version": 2, "attention": attention, **fields}
    if follows_tokens:
        tensors["state.weight"].zero_()
        tensors["mlp.down"].zero_()
        tensors["token.norm"].fill_(1.0)
        tensors["token.weight"].copy_(torch.eye(hidden))
        tensors["norm"].copy_(network.weights.final_norm)
    size = vocabulary_size or config.vocab_size
    chosen = torch.randperm(config.vocab_size, generator=generator)[:size].sort().values
    content = {
        "version": 1,
        "kind": "state and token",
        "model": {
            "digest": network_digest(network),
            "num_layers": config.num_layers,
            "hidden_size": hidden,
            "vocab_size": config.vocab_size,
        },
        "weights": "float32",
        "taps": [*taps, config.num_layers],
        "intermediate_size": inner,
        "num_blocks": blocks,
        "vocabulary_size": size,
        "training": {},
        "agreement": {"by_position": [0.5, 0.4, 0.3]},
        "policy": {"num_drafts": 4, "threshold": 0.4},
    }
    path.mkdir(parents=True, exist_ok=True)
    save_file({**tensors, "vocabulary": chosen.int()}, path / "head.safetensors")
    (path / "head.json").write_text(json.dumps({**content, **fields}))
    return path


class Seen(NamedTuple):
    """The keys and values that a head attends to, [num_keys, head_dim] per key head."""

    keys: list[tuple[Tensor, Tensor]]
    cos_sin: Tensor


def attention(
    seen: Seen, p: dict[str, Tensor], state: Tensor, position: int, *, packed: bool
) -> Tensor:
    """The attention of a state's queries, through the output of each key head."""
    norm, found = normed(state, p["attention.norm"]), torch.zeros_like(state)
    cos, sin = seen.cos_sin[position].chunk(2)
    for i, (keys, values) in enumerate(seen.keys):
        heads = (p["attention.query"][i] @ norm).view(-1, keys.shape[1])
        a, b = heads.chunk(2, 1)
        heads = torch.cat((a * cos - b * sin, b * cos + a * sin), 1)
        weights = (heads @ keys.T * keys.shape[1] ** -0.5).softmax(1)
        output = p["attention.output"][i]
        found += (rounded(output, recurrent_head.LAYERS) if packed else output) @ (
            weights @ values
        ).flatten()
    return found


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


def reference_drafts(
    pack: Path,
    model: eecore.Model,
    states: list[Tensor],
    token: int,
    count: int,
    *,
    packed: bool = False,
    seen: Seen | None = None,
    tokens: Tensor | None = None,
) -> tuple[list[int], list[float]]:
    """The drafts of a head, and their probabilities.

    Args:
        pack: the head's directory.
        model: in float32, its LM head not quantised.
        states: [hidden_size] after each tap's layers, at the last position that was computed.
        token: the token after that position.
        count: the number of drafts.
        packed: the head's matrices are rounded as the CPU keeps them.
        seen: the keys and values that it attends to.
        tokens: the tokens that it may draft; None: those of the pack.
    """
    p, weights = load_file(pack / "head.safetensors"), model.network.weights
    vocabulary = p["vocabulary"].long() if tokens is None else tokens
    head = weights.lm_head.weight[vocabulary]
    if packed:
        own = len(p["vocabulary"])
        parts = rounded(head[:own], head_vocabulary.FORMAT), head[own:]
        head = torch.cat((parts[0], rounded(parts[1], head_vocabulary.SPARE_FORMAT)))
        for name in set(p) - {"vocabulary"}:
            if not name.endswith("norm") and name != "attention.output":
                p[name] = rounded(p[name], recurrent_head.LAYERS)
    taps = zip(states, p["taps.norm"], p["taps.weight"], strict=True)
    state = sum(weight @ normed(tap, norm) for tap, norm, weight in taps)
    drafts, probabilities = [], []
    for step in range(count):
        embedded = weights.embed_tokens.weight[token]
        state = p["state.weight"] @ normed(state, p["state.norm"])
        state = state + p["token.weight"] @ normed(embedded, p["token.norm"])
        if seen is not None:
            position = len(seen.keys[0][0]) + step
            state = state + attention(seen, p, state, position, packed=packed)
        blocks = zip(p["mlp.norm"], p["mlp.gate"], p["mlp.up"], p["mlp.down"], strict=True)
        for norm, gate, up, down in blocks:
            x = normed(state, norm)
            state = state + down @ (functional.silu(gate @ x) * (up @ x))
        probs = (head @ normed(state, p["norm"])).softmax(0)
        best = int(probs.argmax())
        token = int(vocabulary[best])
        drafts.append(token)
        probabilities.append(float(probs[best]))
    return drafts, probabilities


def rounded(weight: Tensor, format: str) -> Tensor:
    """A weight [..., in_features] rounded to blocks of a format; unchanged if no blocks fit."""
    if weight.shape[-1] % 32:
        return weight
    rows = weight.float().reshape(-1, weight.shape[-1]).contiguous()
    matrix = ops.pack_weight(ops.quantise_weight(rows, format), format)
    assert matrix.table is not None
    return ops.unpack_weight(matrix.weight, matrix.table).view_as(weight)
