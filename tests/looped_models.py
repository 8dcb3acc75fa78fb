"""Small looped models on disk (Ouro, Nanbeige), and the computation of an Ouro step by step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

import eecore
from tiny_models import write_model

CONFIG: dict[str, Any] = {
    "architectures": ["OuroForCausalLM"],
    "model_type": "ouro",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "total_ut_steps": 3,
    "early_exit_threshold": 0.6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
NANBEIGE = {"architectures": ["NanbeigeForCausalLM"], "model_type": "nanbeige", "num_loops": 2}
"""The fields of a config.json by which a Nanbeige differs from a Llama."""
PROMPTS = [[5, 9, 2, 7, 7, 1, 30, 31], [3, 88, 41], [70, 5, 9, 2]]
STACK, LOOPS = CONFIG["num_hidden_layers"], CONFIG["total_ut_steps"]
ENDS = tuple(STACK * loop for loop in range(1, LOOPS + 1))


def looped_tensors(config: dict[str, Any] = CONFIG, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of a checkpoint, of a spread that makes every layer and loop matter."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "model.early_exit_gate.weight": (1, hidden),
        "model.early_exit_gate.bias": (1,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        of_layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "input_layernorm_2": (hidden,),
            "post_attention_layernorm": (hidden,),
            "post_attention_layernorm_2": (hidden,),
        }
        shapes |= {f"model.layers.{layer}.{n}.weight": shape for n, shape in of_layer.items()}
    tensors = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator)
        if "norm" in name:
            drawn = 1 + drawn / 4
        elif len(shape) == 2:
            drawn *= 2 * shape[-1] ** -0.5
        tensors[name] = drawn
    tensors["model.early_exit_gate.bias"] -= 1
    return tensors


def write_looped(directory: Path, **changes: Any) -> dict[str, Tensor]:
    """Write a model directory; returns its tensors."""
    config = {**CONFIG, **changes}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = looped_tensors(config)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return tensors


def write_nanbeige(directory: Path, **changes: Any) -> Path:
    """Write a Nanbeige with a tokenizer of bytes into the directory, which is returned."""
    return write_model(directory, **{**NANBEIGE, **changes})


def outputs(
    model: eecore.Model,
    exit: eecore.Exit | None,
    max_tokens: int = 10,
    prompts: list[list[int]] = PROMPTS,
    **sampling: Any,
) -> list[eecore.RequestOutput]:
    """A model's answers to prompts, all in one batch."""
    settings = eecore.SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    return eecore.generate(model, prompts, exit=exit, sampling=settings)


def tokens(model: eecore.Model, exit: eecore.Exit | None, **settings: Any) -> list[list[int]]:
    """The tokens of the answers of :func:`outputs`."""
    return [out.token_ids for out in outputs(model, exit, **settings)]


@dataclass
class LoopedText:
    """One text through a looped model, a token at a time, in float32.

    Attributes:
        tensors: of the checkpoint.
        config: of it.
        keys: of each loop and layer of the stack, a row [num_kv_heads, head_dim] a token.
        values: likewise.
    """

    tensors: dict[str, Tensor]
    config: dict[str, Any] = field(default_factory=lambda: CONFIG)
    keys: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    values: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)

    def read(self, token: int, loops: int = LOOPS) -> list[Tensor]:
        """A token's normed states [hidden_size] after each of the first loops; keeps its keys."""
        x = self.tensors["model.embed_tokens.weight"][token]
        states = []
        for loop in range(loops):
            for layer in range(self.config["num_hidden_layers"]):
                x = self._layer(loop, layer, x)
            x = self._norm(x, "model.norm")
            states.append(x)
        return states

    def logits(self, state: Tensor) -> Tensor:
        """Logits [vocab_size] of a loop's state."""
        return self.tensors["lm_head.weight"] @ state

    def exit_probability(self, state: Tensor) -> float:
        """The exit probability (lambda) of a loop's state."""
        gate = self.tensors["model.early_exit_gate.weight"][0] @ state
        return float(torch.sigmoid(gate + self.tensors["model.early_exit_gate.bias"][0]))

    def fill(self, state: Tensor, loop: int) -> None:
        """Fill keys and values of the last token in a loop that it skipped."""
        position = len(self.keys[0, 0]) - 1
        for layer in range(self.config["num_hidden_layers"]):
            self._keep(loop, layer, self._key_and_value(layer, state, position))

    def _layer(self, loop: int, layer: int, x: Tensor) -> Tensor:
        position = len(self.keys.get((loop, layer), ()))
        self._keep(loop, layer, self._key_and_value(layer, x, position))
        keys, values = (torch.stack(kept[loop, layer]) for kept in (self.keys, self.values))
        q = self._heads(layer, "q", self._norm(x, self._name(layer, "input_layernorm")))
        q = self._turned(q, position)
        shared = len(q) // keys.shape[1]  # query heads of a key head
        heads = []
        for head, query in enumerate(q):
            scores = keys[:, head // shared] @ query * self.config["head_dim"] ** -0.5
            heads.append(scores.softmax(0) @ values[:, head // shared])
        attended = self._weight(layer, "self_attn.o_proj") @ torch.cat(heads)
        x = x + self._norm(attended, self._name(layer, "input_layernorm_2"))
        inner = self._norm(x, self._name(layer, "post_attention_layernorm"))
        gate = silu(self._weight(layer, "mlp.gate_proj") @ inner)
        given = self._weight(layer, "mlp.down_proj") @ (
            gate * (self._weight(layer, "mlp.up_proj") @ inner)
        )
        return x + self._norm(given, self._name(layer, "post_attention_layernorm_2"))

    def _key_and_value(self, layer: int, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        x = self._norm(x, self._name(layer, "input_layernorm"))
        return self._turned(self._heads(layer, "k", x), position), self._heads(layer, "v", x)

    def _keep(self, loop: int, layer: int, kept: tuple[Tensor, Tensor]) -> None:
        for place, one in zip((self.keys, self.values), kept, strict=True):
            place.setdefault((loop, layer), []).append(one)

    def _heads(self, layer: int, what: str, x: Tensor) -> Tensor:
        rows = self._weight(layer, f"self_attn.{what}_proj") @ x
        return rows.view(-1, self.config["head_dim"])

    def _turned(self, heads: Tensor, position: int) -> Tensor:
        half = self.config["head_dim"] // 2
        angles = position * self.config["rope_theta"] ** -(torch.arange(half) / half)
        a, b = heads[:, :half], heads[:, half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], 1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean() + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"]

    def _weight(self, layer: int, name: str) -> Tensor:
        return self.tensors[f"model.layers.{layer}.{name}.weight"]

    @staticmethod
    def _name(layer: int, name: str) -> str:
        return f"model.layers.{layer}.{name}"


Measure = Callable[[LoopedText, list[Tensor]], float]
"""The confidence of a token, of its embedding and its states after the loops so far."""


def exits_so_far(text: LoopedText, states: list[Tensor]) -> float:
    """The probability with which the gate exits after one of the loops so far."""
    return 1 - math.prod(1 - text.exit_probability(state) for state in states[1:])


def softmax_gap(text: LoopedText, states: list[Tensor]) -> float:
    """The gap of the two largest probabilities."""
    first, second = text.logits(states[-1]).softmax(0).topk(2).values.tolist()
    return float(first - second)


def cosine(_text: LoopedText, states: list[Tensor]) -> float:
    """The cosine of the state and the one before the loop."""
    return float(torch.cosine_similarity(states[-2], states[-1], 0))


def decode(
    tensors: dict[str, Tensor],
    prompt: list[int],
    max_tokens: int,
    *,
    threshold: float = 1.0,
    last_loop: int = LOOPS,
    measure: Measure | None = None,
) -> tuple[list[int], list[int], list[float]]:
    """Greedy tokens, the loop that each comes from, and its confidence, by default the cumulative
    exit probability, which is 1 after the last loop.

    A token exits after the first loop at which that reaches the threshold; the prompt goes through
    all loops. With ``last_loop`` the model is cut there, the prompt too.
    """
    text = LoopedText(tensors)
    for token in prompt:
        states = text.read(token, last_loop)
    tokens, loops, confidences = [int(text.logits(states[-1]).argmax())], [last_loop], [1.0]
    while len(tokens) < max_tokens:
        kept = ({name: list(each) for name, each in k.items()} for k in (text.keys, text.values))
        trial = replace(text, **dict(zip(("keys", "values"), kept, strict=True)))
        states, loop = trial.read(tokens[-1], last_loop), last_loop
        begin = tensors["model.embed_tokens.weight"][tokens[-1]]
        found = [
            (measure or exits_so_far)(text, [begin, *states[:number]])
            for number in range(1, last_loop + 1)
        ]
        if measure is None:
            found[-1] = 1.0
        for number, confidence in enumerate(found[:-1], 1):
            if threshold < 1 and confidence >= threshold:
                loop = number
                break
        text.read(tokens[-1], loop)
        for skipped in range(loop, last_loop):
            text.fill(states[loop - 1], skipped)
        tokens.append(int(text.logits(states[loop - 1]).argmax()))
        loops.append(loop)
        confidences.append(found[loop - 1])
    return tokens, loops, confidences
