"""EAGLE-3 heads in the layouts that people publish, and their formula in plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

EPS = 1e-5


class Layout(NamedTuple):
    """How a head is written, and what it has."""

    listed: bool = False
    """As speculators writes it."""
    model_type: str = "llama"
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embeddings: bool = False
    vocabulary_size: int | None = None
    """Size of the draft vocabulary; None: all tokens, without d2t."""
    hidden_size: int | None = None
    """Width of the head; None: the model's."""
    num_heads: tuple[int, int] = (4, 2)
    """Numbers of query heads and of key heads, 64 features each."""
    window: int = 0
    """Keys that its layer sees; 0: all."""
    inner_size: int = 96
    """Width of the MLP."""


RAW = Layout()


def write_eagle(
    path: Path,
    target: dict[str, Any],
    layout: Layout = RAW,
    *,
    taps: tuple[int, ...] = (1, 2, 3),
    seed: int = 0,
    follows: dict[str, Tensor] | None = None,
    **fields: Any,
) -> Path:
    """Write a random head into a directory, which is returned.

    Args:
        path: of the directory.
        target: the config.json of the model.
        layout: what it has.
        taps: after so many layers it takes the states.
        seed: of its numbers.
        follows: tensors of the model; a head with ``norm_before_residual`` then gives what the
            model gives a token without its layers.
        fields: of config.json, in place of what would be there; None leaves one out.
    """
    draw = torch.Generator().manual_seed(seed)
    size = layout.hidden_size or target["hidden_size"]
    vocab, head_dim, inner = target["vocab_size"], 64, layout.inner_size
    q_size, kv_size = (count * head_dim for count in layout.num_heads)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw) * 1.5 / columns**0.5

    def norm(length: int) -> Tensor:
        return 1 + 0.2 * torch.randn(length, generator=draw)

    taken = len(taps) * target["hidden_size"]
    name = "layers.0." if layout.listed else "midlayer."
    tensors = {
        "fc.weight": matrix(size, taken),
        f"{name}hidden_norm.weight": norm(size),
        f"{name}input_layernorm.weight": norm(size),
        f"{name}post_attention_layernorm.weight": norm(size),
        f"{name}self_attn.q_proj.weight": matrix(q_size, 2 * size),
        f"{name}self_attn.k_proj.weight": matrix(kv_size, 2 * size),
        f"{name}self_attn.v_proj.weight": matrix(kv_size, 2 * size),
        f"{name}self_attn.o_proj.weight": matrix(size, q_size),
        f"{name}mlp.gate_proj.weight": matrix(inner, size),
        f"{name}mlp.up_proj.weight": matrix(inner, size),
        f"{name}mlp.down_proj.weight": matrix(size, inner),
        "norm.weight": norm(size),
    }
    if layout.model_type == "qwen3":
        tensors |= {f"{name}self_attn.{n}_norm.weight": norm(head_dim) for n in "qk"}
    if layout.norm_before_fc:
        tensors["input_norm.weight"] = norm(taken)
    if layout.fc_norm:
        tensors |= {f"fc_norm.{i}.weight": norm(target["hidden_size"]) for i in range(len(taps))}
    if layout.own_embeddings:
        tensors["embed_tokens.weight"] = 3 * matrix(vocab, size)
    count = layout.vocabulary_size or vocab
    tensors["lm_head.weight"] = 3 * matrix(count, size)
    chosen = torch.arange(count)
    if layout.vocabulary_size is not None:
        chosen = torch.randperm(vocab, generator=draw)[:count].sort().values
        tensors["d2t"] = chosen - torch.arange(count)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool)
        tensors["t2d"][chosen] = True
    if follows is not None:
        keys = torch.randn(head_dim, size, generator=draw)
        for part, rows in (("q", q_size), ("k", kv_size)):
            tensors[f"{name}self_attn.{part}_proj.weight"] = torch.cat(
                (keys.repeat(rows // head_dim, 1), torch.zeros(rows, size)), 1
            )
        values, output = torch.zeros(kv_size, 2 * size), torch.zeros(size, q_size)
        values[:size, :size], output[:, :size] = torch.eye(size), torch.eye(size)
        tensors |= {
            "fc.weight": torch.zeros(size, taken),
            f"{name}hidden_norm.weight": torch.zeros(size),
            f"{name}input_layernorm.weight": torch.ones(size),
            f"{name}self_attn.v_proj.weight": values,
            f"{name}self_attn.o_proj.weight": output,
            f"{name}mlp.down_proj.weight": torch.zeros(size, inner),
            "norm.weight": follows["model.norm.weight"],
            "lm_head.weight": follows["lm_head.weight"][chosen],
        }
    path.mkdir(parents=True, exist_ok=True)
    save_file({n: t.clone() for n, t in tensors.items()}, path / "model.safetensors")
    layer = {
        "model_type": layout.model_type,
        "hidden_size": size,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": layout.num_heads[0],
        "num_key_value_heads": layout.num_heads[1],
        "head_dim": head_dim,
        "vocab_size": vocab,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
    }
    if layout.window:
        layer |= {"layer_types": ["sliding_attention"], "sliding_window": layout.window}
    of_model = {"target_hidden_size": target["hidden_size"]} if layout.hidden_size else {}
    flags = {n: True for n in ("fc_norm", "norm_before_fc") if getattr(layout, n)}
    common = {"draft_vocab_size": count, **of_model, **flags}
    if layout.listed:
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "norm_before_residual": layout.norm_before_residual,
            "norm_output": layout.norm_output,
            "eagle_aux_hidden_state_layer_ids": list(taps),
            "speculators_config": {"verifier": {"name_or_path": None}},
            **common,
        }
    else:
        config = {
            **layer,
            **common,
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps],
                "use_aux_hidden_state": True,
            },
        }
    config |= fields
    config = {n: value for n, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    return path


def rotated(heads: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [num_rows, num_heads, head_dim], base 10000."""
    size = heads.shape[-1]
    turns = 10000.0 ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = positions[:, None, None].float() * turns
    a, b = heads.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def reference_drafts(
    path: Path,
    layout: Layout,
    embeddings: Tensor,
    states: list[Tensor],
    following: list[int],
    count: int,
) -> tuple[list[int], list[float], Tensor]:
    """What a head drafts, its probabilities, and the logits of each draft.

    Args:
        path: of the head.
        layout: what it has.
        embeddings: [vocab_size, hidden_size], of the model.
        states: [num_positions, hidden_size] after the layers of each tap.
        following: the token after each of these positions.
        count: of drafts.
    """
    p = load_file(path / "model.safetensors")
    name = "layers.0." if layout.listed else "midlayer."

    def norm(x: Tensor, weight: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], p[weight], EPS)

    def linear(x: Tensor, weight: str) -> Tensor:
        return x @ p[f"{name}{weight}.weight"].T

    if layout.fc_norm:
        states = [norm(state, f"fc_norm.{i}.weight") for i, state in enumerate(states)]
    taken = torch.cat(states, 1)
    if layout.norm_before_fc:
        taken = norm(taken, "input_norm.weight")
    x = taken @ p["fc.weight"].T
    table = p.get("embed_tokens.weight", embeddings)
    tokens = torch.tensor(following)
    positions = torch.arange(len(x))
    keys = values = torch.empty(0, layout.num_heads[1], 64)
    drafts, probabilities, logits = [], [], []
    for _ in range(count):
        h = norm(x, f"{name}hidden_norm.weight")
        residual = h if layout.norm_before_residual else x
        a = torch.cat((norm(table[tokens], f"{name}input_layernorm.weight"), h), 1)
        q, k, v = (linear(a, f"self_attn.{n}_proj").view(len(a), -1, 64) for n in "qkv")
        if layout.model_type == "qwen3":
            q = norm(q, f"{name}self_attn.q_norm.weight")
            k = norm(k, f"{name}self_attn.k_norm.weight")
        keys = torch.cat((keys, rotated(k, positions)))
        values = torch.cat((values, v))
        shared = layout.num_heads[0] // layout.num_heads[1]
        k, v = (each.repeat_interleave(shared, 1).transpose(0, 1) for each in (keys, values))
        scores = rotated(q, positions).transpose(0, 1) @ k.transpose(1, 2) / 8.0
        distance = positions[:, None] - torch.arange(len(keys))
        hidden = (distance < 0) | (distance >= (layout.window or len(keys)))
        found = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        x = residual + linear(found.transpose(0, 1).flatten(1), "self_attn.o_proj")
        inner = norm(x, f"{name}post_attention_layernorm.weight")
        gated = functional.silu(linear(inner, "mlp.gate_proj")) * linear(inner, "mlp.up_proj")
        x = (x + linear(gated, "mlp.down_proj"))[-1:]
        normed = norm(x, "norm.weight")
        logits.append((normed @ p["lm_head.weight"].T)[0])
        if layout.norm_output:
            x = normed
        probs = logits[-1].softmax(0)
        best = int(probs.argmax())
        drafts.append(best + int(p["d2t"][best]) if "d2t" in p else best)
        probabilities.append(float(probs[best]))
        tokens, positions = torch.tensor(drafts[-1:]), positions[-1:] + 1
    return drafts, probabilities, torch.stack(logits)
