"""The runtime's semantics in plain PyTorch: one position at a time, keys and values in lists.

Nothing here knows of pages, batches, chunks or fused kernels. Weights come from the safetensors of
a Hugging Face directory of the Llama family.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from eecore.exits import ConfidentExit


@dataclass
class ReferenceSequence:
    """Tokens, and per layer the keys and values of every position so far."""

    tokens: list[int]
    num_prompt_tokens: int
    keys: list[list[Tensor]]
    values: list[list[Tensor]]
    exit_layers: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    executions: int = 0
    memory: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Per layer the encoder's keys and values, where there is an encoder."""

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]


class ReferenceModel:
    """Llama, Qwen2 or Qwen3 with default rotary embeddings, in float32.

    Args:
        directory: the model's directory.
        vocabulary: int64 [n], the tokens that the ``cut`` measure knows.
    """

    def __init__(self, directory: Path, vocabulary: Tensor | None = None) -> None:
        self._read(directory)
        self.vocabulary = vocabulary
        c = self.config
        self.num_layers: int = c["num_hidden_layers"]
        self.num_q_heads: int = c["num_attention_heads"]
        self.num_kv_heads: int = c.get("num_key_value_heads") or self.num_q_heads
        self.head_dim: int = c.get("head_dim") or c["hidden_size"] // self.num_q_heads
        rope = c.get("rope_parameters") or {}
        theta = rope.get("rope_theta") or c.get("rope_theta", 10000.0)
        self.inv_freq = theta ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)

    def _read(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.weights: dict[str, Tensor] = {}
        for file in sorted(directory.glob("*.safetensors")):
            self.weights |= {name: w.float() for name, w in load_file(file).items()}

    @property
    def eps(self) -> float:
        return float(self.config["rms_norm_eps"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * scale * self.weights[name]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def rotate(self, x: Tensor, position: int) -> Tensor:
        """Rotary embedding of x, [heads, head_dim]."""
        angle = position * self.inv_freq
        cos, sin = angle.cos().repeat(2), angle.sin().repeat(2)
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    def keys_values(self, layer: int, h: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Layer ``layer``'s own norm, projection, k-norm and rotary of a state."""
        prefix = f"model.layers.{layer}"
        x = self.norm(h, f"{prefix}.input_layernorm.weight")
        k = self.linear(x, f"{prefix}.self_attn.k_proj").view(self.num_kv_heads, self.head_dim)
        v = self.linear(x, f"{prefix}.self_attn.v_proj").view(self.num_kv_heads, self.head_dim)
        if f"{prefix}.self_attn.k_norm.weight" in self.weights:
            k = self.norm(k, f"{prefix}.self_attn.k_norm.weight")
        return self.rotate(k, position), v

    def layer(self, layer: int, h: Tensor, position: int, sequence: ReferenceSequence) -> Tensor:
        """One position through one layer; its key and value are appended."""
        sequence.executions += 1
        prefix = f"model.layers.{layer}"
        k, v = self.keys_values(layer, h, position)
        sequence.keys[layer].append(k)
        sequence.values[layer].append(v)
        x = self.norm(h, f"{prefix}.input_layernorm.weight")
        q = self.linear(x, f"{prefix}.self_attn.q_proj").view(self.num_q_heads, self.head_dim)
        if f"{prefix}.self_attn.q_norm.weight" in self.weights:
            q = self.norm(q, f"{prefix}.self_attn.q_norm.weight")
        q = self.rotate(q, position)
        group = self.num_q_heads // self.num_kv_heads
        keys = torch.stack(sequence.keys[layer]).repeat_interleave(group, dim=1)  # [n, Hq, D]
        values = torch.stack(sequence.values[layer]).repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,nhd->hn", q, keys) / math.sqrt(self.head_dim)
        out = torch.einsum("hn,nhd->hd", scores.softmax(-1), values).reshape(-1)
        h = h + self.linear(out, f"{prefix}.self_attn.o_proj")
        x = self.norm(h, f"{prefix}.post_attention_layernorm.weight")
        gate = F.silu(self.linear(x, f"{prefix}.mlp.gate_proj"))
        return h + self.linear(
            gate * self.linear(x, f"{prefix}.mlp.up_proj"), f"{prefix}.mlp.down_proj"
        )

    def embed(self, token: int) -> Tensor:
        return self.weights["model.embed_tokens.weight"][token]

    def head(self, h: Tensor) -> Tensor:
        x = self.norm(h, "model.norm.weight")
        weight = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return F.linear(x, weight)

    def start(
        self, prompt: list[int], num_layers: int | None = None
    ) -> tuple[ReferenceSequence, Tensor]:
        """Prefill; returns the sequence and its last state after ``num_layers`` layers."""
        sequence = ReferenceSequence(
            list(prompt),
            len(prompt),
            [[] for _ in range(self.num_layers)],
            [[] for _ in range(self.num_layers)],
        )
        h = torch.empty(0)
        for position in range(len(prompt)):
            h = self.through(sequence, position, num_layers)
        return sequence, h

    def through(
        self, sequence: ReferenceSequence, position: int = -1, num_layers: int | None = None
    ) -> Tensor:
        """The state of the token at a position, by default the last, after its layers."""
        position %= len(sequence.tokens)
        h = self.embed(sequence.tokens[position])
        for layer in range(num_layers or self.num_layers):
            h = self.layer(layer, h, position, sequence)
        return h

    def generate(
        self, prompt: list[int], max_tokens: int, num_layers: int | None = None
    ) -> list[int]:
        """Greedy decoding with the first ``num_layers`` layers, all of them when None."""
        sequence, h = self.start(prompt, num_layers)
        while True:
            sequence.tokens.append(int(self.head(h).argmax()))
            if len(sequence.new_tokens) == max_tokens:
                return sequence.new_tokens
            h = self.through(sequence, num_layers=num_layers)

    def confidence(
        self, policy: ConfidentExit, previous: Tensor, h: Tensor, *, is_last: bool = False
    ) -> float:
        """The measure of one state; ``cut`` is that of the whole head after the last layer."""
        if policy.measure in ("softmax", "cut"):
            logits = self.head(h)
            if policy.measure == "cut" and not is_last:
                logits = logits[self.vocabulary]
            best = logits.softmax(-1).topk(2).values
            return float(best[0] - best[1])
        if policy.measure == "state":
            return float(F.cosine_similarity(previous, h, dim=0))
        m = policy.classifier
        assert m is not None
        x = F.linear(h, m.weight1, m.bias1)
        if m.weight2 is not None:
            x = F.linear(x.relu(), m.weight2, m.bias2)
        return float(x.softmax(-1)[1])

    def generate_confident(
        self, prompts: list[list[int]], policy: ConfidentExit, max_tokens: int
    ) -> list[ReferenceSequence]:
        """Algorithm 1 of the early-exit framework (``batch="all"``), and its per-row variant."""
        sequences = []
        for prompt in prompts:
            sequence, h = self.start(prompt)
            logits = self.head(h)
            best = logits.softmax(-1).topk(2).values
            sequence.tokens.append(int(logits.argmax()))
            sequence.exit_layers.append(self.num_layers)
            sequence.confidences.append(float(best[0] - best[1]))
            sequence.executions = 0
            sequences.append(sequence)
        for t in range(1, max_tokens):
            self._confident_step(sequences, policy, t, max_tokens)
        return sequences

    def _confident_step(
        self, sequences: list[ReferenceSequence], policy: ConfidentExit, t: int, max_tokens: int
    ) -> None:
        points = policy.exit_points or range(1, self.num_layers)
        states = [self.embed(s.tokens[-1]) for s in sequences]
        previous = list(states)
        status = [False] * len(sequences)
        exit_layer = [0] * len(sequences)
        for layer in range(self.num_layers):
            for i, sequence in enumerate(sequences):
                if exit_layer[i]:
                    continue
                previous[i] = states[i]
                states[i] = self.layer(layer, states[i], len(sequence.tokens) - 1, sequence)
            run = layer + 1
            if run in points and policy.min_exit_layer <= run < self.num_layers:
                for i in range(len(sequences)):
                    if not status[i]:
                        base = policy.thresholds.get(run, policy.threshold)
                        threshold = base
                        if policy.decay_tau and base < 1:
                            decay = math.exp(-policy.decay_tau * t / max_tokens)
                            threshold = min(max(0.9 * base + 0.1 * decay, 0), 1)
                        value = self.confidence(policy, previous[i], states[i])
                        status[i] = base < 1 and value >= threshold
            for i in range(len(sequences)):
                alone = policy.batch == "each" and status[i]
                together = policy.batch == "all" and all(status)
                if not exit_layer[i] and (alone or together or run == self.num_layers):
                    exit_layer[i] = run
        for i, sequence in enumerate(sequences):
            position = len(sequence.tokens) - 1
            for layer in range(exit_layer[i], self.num_layers):
                k, v = self.keys_values(layer, states[i], position)
                sequence.keys[layer].append(k)
                sequence.values[layer].append(v)
            is_last = exit_layer[i] == self.num_layers
            sequence.confidences.append(
                self.confidence(policy, previous[i], states[i], is_last=is_last)
            )
            sequence.exit_layers.append(exit_layer[i])
            sequence.tokens.append(int(self.head(states[i]).argmax()))
