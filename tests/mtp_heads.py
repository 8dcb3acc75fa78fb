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

from plain_layers import PlainLayer
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
    layer, positions = PlainLayer(stored, LAYER, config), torch.arange(len(states))
    embedded = stored["model.embed_tokens.weight"][torch.tensor(tokens[1:])].clone()
    embedded[0] = 0
    drafts, probabilities = list[int](), list[float]()
    for _ in range(count):
        both = layer.norm(states, "hidden_layernorm"), layer.norm(embedded, "token_layernorm")
        x = layer(layer.linear(torch.cat(both, 1), "input_proj"), positions)
        states = layer.norm(x[-1:], "final_layernorm")
        chances = (states[0] @ stored["lm_head.weight"].T).softmax(0)
        drafts.append(int(chances.argmax()))
        probabilities.append(float(chances.max()))
        embedded = stored["model.embed_tokens.weight"][drafts[-1:]]
        positions = positions[-1:] + 1
    return drafts, probabilities
