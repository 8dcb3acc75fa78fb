"""Decoder layers of small draft heads: random tensors, and the layers in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def random_layer(
    place: str, sizes: Mapping[str, Any], draw: torch.Generator, *, columns: int = 0
) -> dict[str, Tensor]:
    """Random tensors of a layer, float32.

    Args:
        place: how their names begin.
        sizes: the config of the layer; a Qwen3's has norms of queries and keys.
        draw: gives the numbers.
        columns: what attention takes; 0: hidden_size.
    """
    hidden, inner, width = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    q_size, kv_size = (sizes[f"num_{n}_heads"] * width for n in ("attention", "key_value"))
    columns = columns or hidden
    shapes = {
        "self_attn.q_proj": (q_size, columns),
        "self_attn.k_proj": (kv_size, columns),
        "self_attn.v_proj": (kv_size, columns),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    if sizes["model_type"] == "qwen3":
        shapes |= {f"self_attn.{n}_norm": (width,) for n in "qk"}
    made = {}
    for name, shape in shapes.items():
        numbers = torch.randn(*shape, generator=draw)
        is_norm = len(shape) == 1
        gain = 0.2 if is_norm else 1.5 / math.sqrt(shape[-1])
        made[f"{place}{name}.weight"] = is_norm + gain * numbers
    return made


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


class PlainLayer:
    """A layer with its keys and values.

    Args:
        tensors: of the checkpoint.
        place: how the names of the layer's begin.
        sizes: the config of the layer.
    """

    def __init__(self, tensors: Mapping[str, Tensor], place: str, sizes: Mapping[str, Any]) -> None:
        self._tensors, self._place, self._sizes = tensors, place, sizes
        self._window = sizes.get("sliding_window") or 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._positions: list[Tensor] = []

    def norm(self, x: Tensor, name: str) -> Tensor:
        return normed(x, self._tensors[f"{self._place}{name}.weight"], self._sizes["rms_norm_eps"])

    def linear(self, x: Tensor, name: str) -> Tensor:
        bias = self._tensors.get(f"{self._place}{name}.bias")
        return functional.linear(x, self._tensors[f"{self._place}{name}.weight"], bias)

    def remember(self, x: Tensor, positions: Tensor) -> None:
        """Keep the keys and values of normed states."""
        self._keys.append(self._heads(x, "k", positions))
        self._values.append(self.linear(x, "self_attn.v_proj").unflatten(1, (-1, self._width)))
        self._positions.append(positions)

    def attend(self, x: Tensor, positions: Tensor, *, causal: bool = True) -> Tensor:
        """What attention gives normed states, whose keys and values are kept."""
        self.remember(x, positions)
        q = self._heads(x, "q", positions)
        k, v, places = map(torch.cat, (self._keys, self._values, self._positions))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self._width)
        distance = positions[:, None] - places
        hidden = causal & (distance < 0)
        if self._window:
            hidden |= distance >= self._window
        found = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        return self.linear(found.flatten(1), "self_attn.o_proj")

    def mlp(self, x: Tensor) -> Tensor:
        """States after the MLP."""
        inner = self.norm(x, "post_attention_layernorm")
        gated = functional.silu(self.linear(inner, "mlp.gate_proj"))
        return x + self.linear(gated * self.linear(inner, "mlp.up_proj"), "mlp.down_proj")

    def __call__(self, x: Tensor, positions: Tensor, *, causal: bool = True) -> Tensor:
        """States after the layer."""
        return self.mlp(x + self.attend(self.norm(x, "input_layernorm"), positions, causal=causal))

    @property
    def _width(self) -> int:
        width: int = self._sizes["head_dim"]
        return width

    def _heads(self, x: Tensor, name: str, positions: Tensor) -> Tensor:
        """[num_rows, num_heads, head_dim] of queries or keys, rotated."""
        heads = self.linear(x, f"self_attn.{name}_proj").unflatten(1, (-1, self._width))
        if f"{self._place}self_attn.{name}_norm.weight" in self._tensors:
            heads = self.norm(heads, f"self_attn.{name}_norm")
        half = self._width // 2
        exponents = torch.arange(half, dtype=torch.float32, device=x.device) / half
        angles = positions[:, None, None].float() / self._sizes["rope_theta"] ** exponents
        a, b = heads.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
