"""A small random MiMo with the layer that drafts further tokens, and that layer in plain PyTorch.

The formula is that of MiMo's own model file and of vLLM's: the state after the model's final norm
comes before the embedding, which is left out at a text's first position.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tiny_models import random_tensors, write_model

LAYER = "model.mtp_layers.0."


def write_mimo(directory: Path, seed: int = 0) -> Path:
    """Write a model into a directory, and return it."""
    write_model(directory, "qwen2", seed=seed)
    file, weights = directory / "config.json", directory / "model.safetensors"
    config = json.loads(file.read_text())
    tensors = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    start = "model.layers.0."
    for name, tensor in random_tensors({**config, "num_hidden_layers": 1}, seed + 1).items():
        if name.startswith(start):
            tensors[LAYER + name.removeprefix(start)] = tensor
    generator, hidden = torch.Generator().manual_seed(seed + 2), config["hidden_size"]
    for name in ("hidden", "token", "final"):
        norm = 1 + 0.2 * torch.randn(hidden, generator=generator)
        tensors[f"{LAYER}{name}_layernorm.weight"] = norm
    projection = torch.randn(hidden, 2 * hidden, generator=generator) / math.sqrt(hidden)
    tensors[f"{LAYER}input_proj.weight"] = projection
    own = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    file.write_text(json.dumps({**config, **own, "num_nextn_predict_layers": 1}))
    save_file(tensors, weights)
    return directory


def reference_drafts(
    directory: Path, states: Tensor, tokens: list[int], count: int
) -> tuple[list[int], list[float]]:
    """Drafts and their probabilities.

    Args:
        directory: of the model.
        states: [num_tokens - 1, hidden_size], normed, at all positions of a text but the last.
        tokens: of the text.
        count: how many drafts.
    """
    config = json.loads((directory / "config.json").read_text())
    stored = load_file(directory / "model.safetensors")
    t = {n.removeprefix(LAYER): x for n, x in stored.items() if n.startswith(LAYER)}
    eps, width = config["rms_norm_eps"], config["head_dim"]

    def norm(x: Tensor, name: str) -> Tensor:
        weight = t[f"{name}.weight"]
        return functional.rms_norm(x, weight.shape, weight, eps)

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))

    def rotated(x: Tensor) -> Tensor:
        half = width // 2
        periods = config["rope_theta"] ** (torch.arange(half, dtype=torch.float32) / half)
        angles = torch.arange(len(x), dtype=torch.float32)[:, None] / periods
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    given, following = states, list(tokens[1:])
    drafts, probabilities = list[int](), list[float]()
    for _ in range(count):
        embedded = stored["model.embed_tokens.weight"][torch.tensor(following)].clone()
        embedded[0] = 0
        both = torch.cat((norm(given, "hidden_layernorm"), norm(embedded, "token_layernorm")), 1)
        x = linear(both, "input_proj")
        q, k, v = (
            linear(norm(x, "input_layernorm"), f"self_attn.{name}_proj").unflatten(1, (-1, width))
            for name in "qkv"
        )
        q, k = rotated(q), rotated(k)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(width)
        hides = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        found = torch.einsum("hqk,khd->qhd", scores.masked_fill(hides, -torch.inf).softmax(-1), v)
        x = x + linear(found.flatten(1), "self_attn.o_proj")
        y = norm(x, "post_attention_layernorm")
        gated = functional.silu(linear(y, "mlp.gate_proj")) * linear(y, "mlp.up_proj")
        state = norm(x + linear(gated, "mlp.down_proj"), "final_layernorm")[-1]
        chances = (stored["lm_head.weight"] @ state).softmax(0)
        drafts.append(int(chances.argmax()))
        probabilities.append(float(chances.max()))
        given, following = torch.cat((given, state[None])), [*following, drafts[-1]]
    return drafts, probabilities
