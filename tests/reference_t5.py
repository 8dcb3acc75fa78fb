"""T5 in plain PyTorch: the encoder over a whole input, the decoder one position at a time."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_decoding import ReferenceModel, ReferenceSequence


class ReferenceT5(ReferenceModel):
    """T5 and T5 v1.1 in float32; the semantics of the modes are those of the base class."""

    def __init__(self, directory: Path) -> None:
        self._read(directory)
        c = self.config
        self.num_layers = c.get("num_decoder_layers", c["num_layers"])
        self.num_heads, self.head_dim = c["num_heads"], c["d_kv"]

    @property
    def eps(self) -> float:
        return float(self.config["layer_norm_epsilon"])

    def embed(self, token: int) -> Tensor:
        return self.weights["shared.weight"][token]

    def bucket(self, distance: int, num_buckets: int) -> int:
        """The bucket of a distance of 0 or more, on one side (Raffel et al. 2020 §2.1)."""
        exact = num_buckets // 2
        if distance < exact:
            return distance
        most = self.config["relative_attention_max_distance"]
        log = math.log(distance / exact) / math.log(most / exact)
        return min(exact + int(log * (num_buckets - exact) + 1e-6), num_buckets - 1)

    def bias(self, stack: str, query: int, keys: int) -> Tensor:
        """The bias of one query, [heads, keys]."""
        name = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        table, num_buckets = self.weights[name], self.config["relative_attention_num_buckets"]
        if stack == "decoder":
            rows = [self.bucket(max(query - key, 0), num_buckets) for key in range(keys)]
        else:
            half = num_buckets // 2
            rows = [
                self.bucket(abs(query - key), half) + (half if key > query else 0)
                for key in range(keys)
            ]
        return table[rows].T

    def heads(self, x: Tensor, name: str) -> Tensor:
        """The heads of a projection, [..., heads, head_dim]."""
        return self.linear(x, name).view(*x.shape[:-1], self.num_heads, self.head_dim)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | float) -> Tensor:
        """Unscaled attention of q [heads, head_dim] to keys and values [n, heads, head_dim]."""
        weights = (torch.einsum("hd,nhd->hn", q, keys) + bias).softmax(-1)
        return torch.einsum("hn,nhd->hd", weights, values).reshape(-1)

    def mlp(self, h: Tensor, name: str) -> Tensor:
        x = self.norm(h, f"{name}.layer_norm.weight")
        dense = f"{name}.DenseReluDense"
        if self.config["feed_forward_proj"] == "relu":
            inner = self.linear(x, f"{dense}.wi").relu()
        else:
            gate = F.gelu(self.linear(x, f"{dense}.wi_0"), approximate="tanh")
            inner = gate * self.linear(x, f"{dense}.wi_1")
        return h + self.linear(inner, f"{dense}.wo")

    def encode(self, input_ids: list[int]) -> Tensor:
        """States after the encoder's last norm, [n, hidden_size]."""
        h = self.weights["shared.weight"][input_ids]
        for layer in range(self.config["num_layers"]):
            name = f"encoder.block.{layer}.layer.0.SelfAttention"
            x = self.norm(h, f"encoder.block.{layer}.layer.0.layer_norm.weight")
            q, k, v = (self.heads(x, f"{name}.{kind}") for kind in "qkv")
            count = len(input_ids)
            out = [self.attend(q[i], k, v, self.bias("encoder", i, count)) for i in range(count)]
            h = h + self.linear(torch.stack(out), f"{name}.o")
            h = self.mlp(h, f"encoder.block.{layer}.layer.1")
        return self.norm(h, "encoder.final_layer_norm.weight")

    def keys_values(self, layer: int, h: Tensor, position: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        name = f"decoder.block.{layer}.layer.0"
        x = self.norm(h, f"{name}.layer_norm.weight")
        k, v = (self.heads(x, f"{name}.SelfAttention.{kind}") for kind in "kv")
        return k, v

    def layer(self, layer: int, h: Tensor, position: int, sequence: ReferenceSequence) -> Tensor:
        sequence.executions += 1
        k, v = self.keys_values(layer, h, position)
        sequence.keys[layer].append(k)
        sequence.values[layer].append(v)
        block = f"decoder.block.{layer}.layer"
        q = self.heads(self.norm(h, f"{block}.0.layer_norm.weight"), f"{block}.0.SelfAttention.q")
        keys, values = torch.stack(sequence.keys[layer]), torch.stack(sequence.values[layer])
        out = self.attend(q, keys, values, self.bias("decoder", position, len(keys)))
        h = h + self.linear(out, f"{block}.0.SelfAttention.o")
        x = self.norm(h, f"{block}.1.layer_norm.weight")
        q = self.heads(x, f"{block}.1.EncDecAttention.q")
        out = self.attend(q, *sequence.memory[layer], 0.0)
        h = h + self.linear(out, f"{block}.1.EncDecAttention.o")
        return self.mlp(h, f"{block}.2")

    def head(self, h: Tensor) -> Tensor:
        x = self.norm(h, "decoder.final_layer_norm.weight")
        if self.config.get("scale_decoder_outputs", self.config.get("tie_word_embeddings", True)):
            x = x * self.config["d_model"] ** -0.5
        return F.linear(x, self.weights.get("lm_head.weight", self.weights["shared.weight"]))

    def start(
        self, prompt: list[int], num_layers: int | None = None
    ) -> tuple[ReferenceSequence, Tensor]:
        """The encoder over the prompt, then the decoder's start token."""
        states = self.encode(prompt)
        every = range(self.num_layers)
        sequence = ReferenceSequence(
            [self.config["decoder_start_token_id"]], 1, [[] for _ in every], [[] for _ in every]
        )
        for layer in every:
            name = f"decoder.block.{layer}.layer.1.EncDecAttention"
            k, v = (self.heads(states, f"{name}.{kind}") for kind in "kv")
            sequence.memory.append((k, v))
        return sequence, self.through(sequence, num_layers=num_layers)
