"""EAGLE-3 heads in the layouts that people publish, and in plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.plain_layers import PlainLayer, normed, random_layer

EPS, WIDTH = 1e-5, 64


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
    """Numbers of query heads and of key heads, of :data:`WIDTH` features each."""
    window: int = 0
    """Keys that its layer sees; 0: all."""
    inner_size: int = 96
    """Width of the MLP."""

    @property
    def prefix(self) -> str:
        """How the names of its layer begin."""
        return "layers.0." if self.listed else "midlayer."


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
        follows: tensors of the model; a head with ``norm_before_residual`` then
            gives what the model gives a token without its layers.
        fields: of config.json, in place of what would be there; None leaves one out.
    """
    draw = torch.Generator().manual_seed(seed)
    size = layout.hidden_size or target["hidden_size"]
    vocab, inner, name = target["vocab_size"], layout.inner_size, layout.prefix
    q_size, kv_size = (count * WIDTH for count in layout.num_heads)
    layer = {
        "model_type": layout.model_type,
        "hidden_size": size,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": layout.num_heads[0],
        "num_key_value_heads": layout.num_heads[1],
        "head_dim": WIDTH,
        "vocab_size": vocab,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
    }

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw) * 1.5 / columns**0.5

    def norm(length: int) -> Tensor:
        return 1 + 0.2 * torch.randn(length, generator=draw)

    taken = len(taps) * target["hidden_size"]
    tensors = {
        "fc.weight": matrix(size, taken),
        f"{name}hidden_norm.weight": norm(size),
        "norm.weight": norm(size),
        **random_layer(name, layer, draw, columns=2 * size),
    }
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
        keys = torch.randn(WIDTH, size, generator=draw)
        for part, rows in (("q", q_size), ("k", kv_size)):
            tensors[f"{name}self_attn.{part}_proj.weight"] = torch.cat(
                (keys.repeat(rows // WIDTH, 1), torch.zeros(rows, size)), 1
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


class EagleOracle:
    """A head in plain PyTorch.

    Args:
        path: of the head.
        layout: what it has.
        embeddings: [vocab_size, hidden_size], of the model.
    """

    def __init__(self, path: Path, layout: Layout, embeddings: Tensor) -> None:
        self.layout, self.tensors = layout, load_file(path / "model.safetensors")
        self.table = self.tensors.get("embed_tokens.weight", embeddings)
        self.sizes = {
            "head_dim": WIDTH,
            "rms_norm_eps": EPS,
            "rope_theta": 10000.0,
            "sliding_window": layout.window,
        }

    def norm(self, x: Tensor, name: str) -> Tensor:
        return normed(x, self.tensors[f"{name}.weight"], EPS)

    def begin(self, states: list[Tensor]) -> Tensor:
        """[num_rows, hidden_size] of states of each tap."""
        if self.layout.fc_norm:
            states = [self.norm(state, f"fc_norm.{i}") for i, state in enumerate(states)]
        taken = torch.cat(states, 1)
        if self.layout.norm_before_fc:
            taken = self.norm(taken, "input_norm")
        return taken @ self.tensors["fc.weight"].T

    def layer(self) -> PlainLayer:
        """The layer, without keys."""
        return PlainLayer(self.tensors, self.layout.prefix, self.sizes)

    def after(self, layer: PlainLayer, x: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        """States after the layer."""
        h = layer.norm(x, "hidden_norm")
        residual = h if self.layout.norm_before_residual else x
        both = torch.cat((layer.norm(self.table[tokens], "input_layernorm"), h), 1)
        return layer.mlp(residual + layer.attend(both, positions))

    def chosen(self, normed: Tensor) -> tuple[list[int], list[float]]:
        """Drafts of normed states, and their probabilities."""
        logits = normed @ self.tensors["lm_head.weight"].T
        found = logits.softmax(1).max(1)
        best = found.indices
        if "d2t" in self.tensors:
            best = best + self.tensors["d2t"][best]
        return best.tolist(), found.values.tolist()


def reference_drafts(
    path: Path,
    layout: Layout,
    embeddings: Tensor,
    states: list[Tensor],
    following: list[int],
    count: int,
) -> tuple[list[int], list[float]]:
    """What a head drafts, and the probabilities.

    Args:
        path: of the head.
        layout: what it has.
        embeddings: [vocab_size, hidden_size], of the model.
        states: [num_positions, hidden_size] after the layers of each tap.
        following: the token after each of these positions.
        count: of drafts.
    """
    oracle = EagleOracle(path, layout, embeddings)
    x, layer = oracle.begin(states), oracle.layer()
    tokens, positions = torch.tensor(following), torch.arange(len(following))
    drafts, probabilities = [], []
    for _ in range(count):
        x = oracle.after(layer, x, tokens, positions)[-1:]
        normed_state = oracle.norm(x, "norm")
        x = normed_state if layout.norm_output else x
        found = oracle.chosen(normed_state)
        drafts, probabilities = drafts + found[0], probabilities + found[1]
        tokens, positions = torch.tensor(drafts[-1:]), positions[-1:] + 1
    return drafts, probabilities
