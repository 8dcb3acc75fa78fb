"""Small random models with the layer that drafts further tokens, and that layer in plain PyTorch.

The formula of MiMo's is that of its own model file and of vLLM's: the state after the model's final
norm comes before the embedding, which is left out at a text's first position. The formula of
Qwen3.5's is that of vLLM's model file and of llama.cpp's: the embedding comes first, and is never
left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.qwen3_5 import Qwen3_5TextConfig, modeling_qwen3_5

from plain_layers import PlainLayer
from tiny_families import fill, stored_tensors, write_family, write_family_gguf
from tiny_models import random_tensors, write_model

LAYER = "model.mtp_layers.0."
NEXTN = {
    "mtp.fc.weight": "eh_proj",
    "mtp.pre_fc_norm_embedding.weight": "enorm",
    "mtp.pre_fc_norm_hidden.weight": "hnorm",
    "mtp.norm.weight": "shared_head_norm",
}
"""What llama.cpp calls tensors of Qwen3.5's layer."""


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


class _QwenLayer(torch.nn.Module):
    """The parts of Qwen3.5's layer, with the names of its tensors."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        norm = modeling_qwen3_5.Qwen3_5RMSNorm
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        self.layers = torch.nn.ModuleList([modeling_qwen3_5.Qwen3_5DecoderLayer(config, 0)])
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (
            norm(size, eps=eps) for _ in range(3)
        )

    def together(self, embedded: Tensor, states: Tensor) -> Tensor:
        """What the decoder layer takes."""
        both = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)
        return self.fc(torch.cat(both, 1))


def _qwen_layer(directory: Path) -> _QwenLayer:
    config = Qwen3_5TextConfig(**json.loads((directory / "config.json").read_text()))
    config.layer_types, config._attn_implementation = ["full_attention"], "eager"
    return _QwenLayer(config)


def write_qwen3_5(
    directory: Path, family: str = "qwen3_5", *, factor: float = 1.0, follows: bool = False
) -> Path:
    """Write a model of one of the shapes of a family into a directory, and return it.

    Args:
        factor: multiplies what each layer adds to the residual stream.
        follows: whether the layer drafts about what the model gives a token without its layers.
    """
    write_family(directory, family)
    layer = _qwen_layer(directory)
    fill(layer, seed=1)
    file, weights = directory / "config.json", directory / "model.safetensors"
    own = {f"mtp.{name}": tensor.detach() for name, tensor in layer.state_dict().items()}
    tensors = load_file(weights) | own
    if follows:
        size = tensors["model.norm.weight"].numel()
        tensors["mtp.fc.weight"] = torch.eye(size, 2 * size)
        tensors["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(size)
        tensors["mtp.norm.weight"] = tensors["model.norm.weight"].clone()
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor *= factor
    file.write_text(json.dumps({**json.loads(file.read_text()), "mtp_num_hidden_layers": 1}))
    save_file(tensors, weights, {"format": "pt"})
    return directory


def as_part(directory: Path) -> None:
    """Turn a directory of a text model into that of a multimodal model."""
    file, weights = directory / "config.json", directory / "model.safetensors"
    text = json.loads(file.read_text())
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    whole |= {"text_config": text, "tie_word_embeddings": text.pop("tie_word_embeddings")}
    file.write_text(json.dumps(whole))
    stored = load_file(weights).items()
    part = "model.language_model."
    tensors = {re.sub(r"^model\.", part, name): tensor for name, tensor in stored}
    save_file(tensors, weights, {"format": "pt"})


def write_gguf(
    directory: Path,
    family: str = "qwen3_5",
    *,
    alone: bool = False,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Write the model of a directory as a GGUF file, as llama.cpp's converter does.

    Args:
        alone: leave out the layers that do not draft.
        kinds: the types of matrices by the parts of their names after the layer.
    """
    config = json.loads((directory / "config.json").read_text())
    layer = config["num_hidden_layers"]
    recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    settings: dict[str, Any] = {"block_count": layer + 1, "nextn_predict_layers": 1}
    settings["attention.recurrent_layers"] = [*recurrent, False]
    extra, tensors = {}, load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        own = name.removeprefix("mtp.layers.0.")
        if own != name:
            named = f"model.layers.{layer}.{own}", tensor, "qwen35", config
            extra |= {stored: values.numpy() for stored, values in stored_tensors(*named)}
        elif own.startswith("mtp."):
            values = tensor + 1 if tensor.ndim == 1 else tensor
            extra[f"blk.{layer}.nextn.{NEXTN[own]}.weight"] = values.numpy()
    file = directory / "m.gguf"
    if alone:
        directory = directory / "alone"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        kept = {name: t for name, t in tensors.items() if not name.startswith("model.layers.")}
        save_file(kept, directory / "model.safetensors")
    return write_family_gguf(file, directory, family, settings, kinds=kinds, extra=extra)


@torch.no_grad()
def reference_qwen3_5(
    directory: Path, states: Tensor, tokens: list[int], count: int
) -> tuple[list[int], list[float]]:
    """Drafts and their probabilities, as :func:`reference_drafts`; all positions are computed for
    each draft. ``directory`` may be a GGUF file in it."""
    directory = directory.parent if directory.is_file() else directory
    stored, layer = load_file(directory / "model.safetensors"), _qwen_layer(directory)
    layer.load_state_dict(
        {name.removeprefix("mtp."): t for name, t in stored.items() if name.startswith("mtp.")}
    )
    table = stored["model.embed_tokens.weight"]
    rotary = modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(layer.layers[0].self_attn.config)
    taken = layer.together(table[torch.tensor(tokens[1:])], states)
    drafts, probabilities = list[int](), list[float]()
    for _ in range(count):
        length = len(taken)
        mask = torch.full((length, length), -torch.inf).triu(1)
        rotated = rotary(taken[None], torch.arange(length)[None])
        made = layer.layers[0](taken[None], rotated, attention_mask=mask[None, None])[0]
        states = layer.norm(made[-1:])
        chances = (states[0] @ stored.get("lm_head.weight", table).T).softmax(0)
        drafts.append(int(chances.argmax()))
        probabilities.append(float(chances.max()))
        taken = torch.cat((taken, layer.together(table[drafts[-1:]], states)))
    return drafts, probabilities
