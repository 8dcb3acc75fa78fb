"""A decoding engine in plain PyTorch on eecore's ops: a batch of prompts, each token its own depth.

python examples/nano_engine.py MODEL "The capital of France is" "2 + 2 =" --threshold 0.9

MODEL is a directory of a Llama in Hugging Face layout (config.json, model.safetensors and
tokenizer.json), such as .models/smollm2-135m-instruct, which scripts/get_smollm2.py makes. There is
no scheduler, no sampling and no server here; ``eecore.generate`` has them, and is faster.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch
from safetensors.torch import load_file
from torch import Tensor

from eecore import ops

PAGE = 16  # positions a page


class Layer(NamedTuple):
    """Weights of one layer; Q, K and V rows, and gate and up rows, in one matrix each."""

    norm: Tensor
    qkv: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class NanoEngine:
    """A model, and a KV cache with so many positions for each of so many prompts."""

    def __init__(self, directory: Path, num_rows: int, max_length: int) -> None:
        c = json.loads((directory / "config.json").read_text())
        w = {name: t.float() for name, t in load_file(directory / "model.safetensors").items()}
        self.num_layers, hidden = c["num_hidden_layers"], c["hidden_size"]
        self.num_heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.head_dim, self.eps = c.get("head_dim") or hidden // self.num_heads, c["rms_norm_eps"]
        self.stops = {c["eos_token_id"]}
        names = [f"model.layers.{i}." for i in range(self.num_layers)]

        def stacked(*parts: str) -> Tensor:  # [num_layers, rows, columns]
            return torch.stack([torch.cat([w[f"{n}{p}.weight"] for p in parts]) for n in names])

        qkv = stacked("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        columns = (
            stacked("input_layernorm"),
            qkv,
            stacked("self_attn.o_proj"),
            stacked("post_attention_layernorm"),
            stacked("mlp.gate_proj", "mlp.up_proj"),
            stacked("mlp.down_proj"),
        )
        self.layers = [Layer(*weights) for weights in zip(*columns, strict=True)]
        self.norms, self.kv = columns[0], ops.Matrix(qkv[:, self.num_heads * self.head_dim :])
        self.embeddings, self.final_norm = w["model.embed_tokens.weight"], w["model.norm.weight"]
        self.lm_head = w.get("lm_head.weight", self.embeddings)
        theta = (c.get("rope_parameters") or c)["rope_theta"]
        steps = theta ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angles = torch.arange(max_length).float()[:, None] * steps
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
        pages = -(-max_length // PAGE)
        self.page_table = torch.arange(num_rows * pages, dtype=torch.int32).view(num_rows, pages)
        shape = (self.num_layers, num_rows * pages, PAGE, self.kv_heads, self.head_dim)
        self.k_cache, self.v_cache = torch.zeros(shape), torch.zeros(shape)

    def layer(
        self, i: int, hidden: Tensor, rows: Tensor, positions: Tensor, queries: Tensor
    ) -> Tensor:
        """Layer ``i`` of tokens [n]; sequence s has queries ``queries[s]..queries[s + 1]`` and is
        row ``rows[queries[s]]`` of the cache."""
        weights, k_cache, v_cache = self.layers[i], self.k_cache[i], self.v_cache[i]
        qkv = ops.skinny_linear(hidden, weights.qkv, norm_weight=weights.norm, eps=self.eps)
        sizes = (self.num_heads, self.kv_heads, self.kv_heads)
        q, k, v = qkv.view(len(hidden), sum(sizes), self.head_dim).split(sizes, 1)
        slots = self.slots(rows, positions)
        ops.append_kv(q, k, v, k_cache, v_cache, slots, positions=positions, cos_sin=self.cos_sin)
        last = queries[1:].long() - 1
        attended = ops.paged_attention(
            q,
            k_cache,
            v_cache,
            self.page_table[rows[last]],
            (positions[last] + 1).int(),
            queries,
            scale=self.head_dim**-0.5,
        )
        hidden = ops.skinny_linear(attended.flatten(1), weights.o, residual=hidden)
        gated = ops.skinny_gated_linear(
            hidden, weights.gate_up, norm_weight=weights.mlp_norm, eps=self.eps
        )
        return ops.skinny_linear(gated, weights.down, residual=hidden)

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        return self.page_table[rows, positions // PAGE] * PAGE + positions % PAGE

    def head(self, hidden: Tensor) -> ops.SoftmaxConfidence:
        """Token and confidence of each state; the logits are never in memory."""
        return ops.exit_confidence_softmax(hidden, self.final_norm, self.lm_head, self.eps)

    def prefill(self, row: int, prompt: list[int]) -> int:
        """A prompt through all layers, and its first token."""
        positions = torch.arange(len(prompt))
        rows, queries = torch.full_like(positions, row), torch.tensor([0, len(prompt)]).int()
        hidden = self.embeddings[torch.tensor(prompt)]
        for i in range(self.num_layers):
            hidden = self.layer(i, hidden, rows, positions, queries)
        return int(self.head(hidden[-1:]).token)

    def decode(
        self, rows: Tensor, tokens: Tensor, positions: Tensor, points: set[int], threshold: float
    ) -> tuple[Tensor, Tensor]:
        """One token more for each row: the tokens, and after how many layers each exited.

        A row whose confidence reaches the threshold at an exit point exits there: the rest goes on
        without it, and the layers it skips get keys and values of its last state.
        """
        hidden = self.embeddings[tokens]
        final, exits = hidden.clone(), torch.zeros(len(rows), dtype=torch.int32)
        new, active = torch.zeros_like(tokens), torch.arange(len(rows))
        for i in range(self.num_layers):
            queries = torch.arange(len(active) + 1, dtype=torch.int32)
            hidden = self.layer(i, hidden, rows[active], positions[active], queries)
            if i + 1 not in points and i + 1 < self.num_layers:
                continue
            head = self.head(hidden)
            ends = head.confidence >= threshold
            ends |= torch.tensor(i + 1 == self.num_layers)
            exited = active[ends]
            final[exited], exits[exited], new[exited] = hidden[ends], i + 1, head.token[ends]
            hidden, active = hidden[~ends], active[~ends]
            if not len(active):
                break
        ops.kv_fill(
            final,
            exits,
            self.norms,
            self.kv,
            self.k_cache,
            self.v_cache,
            self.slots(rows, positions),
            positions=positions,
            cos_sin=self.cos_sin,
            eps=self.eps,
        )
        return new, exits

    def generate(
        self, prompts: list[list[int]], max_tokens: int, points: set[int], threshold: float
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Greedy answers, and the depth of each token."""
        texts = [[self.prefill(row, prompt)] for row, prompt in enumerate(prompts)]
        depths = [[self.num_layers] for _ in prompts]
        while rows := [
            r for r, t in enumerate(texts) if len(t) < max_tokens and t[-1] not in self.stops
        ]:
            positions = torch.tensor([len(prompts[r]) + len(texts[r]) - 1 for r in rows])
            tokens = torch.tensor([texts[r][-1] for r in rows])
            new, exits = self.decode(torch.tensor(rows), tokens, positions, points, threshold)
            for r, token, depth in zip(rows, new.tolist(), exits.tolist(), strict=True):
                texts[r].append(token)
                depths[r].append(depth)
        return texts, depths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--threshold", type=float, default=0.9)
    arguments = parser.parse_args()
    tokenizer = tokenizers.Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids for prompt in arguments.prompts]
    longest = max(map(len, prompts)) + arguments.max_tokens
    engine = NanoEngine(arguments.model, len(prompts), longest)
    points = {engine.num_layers * i // 4 for i in (2, 3)}
    texts, depths = engine.generate(prompts, arguments.max_tokens, points, arguments.threshold)
    for prompt, text, depth in zip(arguments.prompts, texts, depths, strict=True):
        print(f"{prompt}{tokenizer.decode(text)}\n  layers: {depth}\n")


if __name__ == "__main__":
    main()
