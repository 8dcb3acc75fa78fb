"""A head that drafts a block in one pass, as it is trained: the form of DSpark (arXiv 2607.05147).

``norm`` is RMSNorm with the model's eps, and each layer is one of Qwen3::

    c = norm(fc cat(h_tap...); g_context)       at every position that the model has computed
    x = embed(last token, mask, ..., mask)      a block, at the positions after these
    x = layer(x)                                attends to c and to the whole block, in each layer
    logits_k = W_head norm(x_k; g) + W_after W_before[token k - 1]
    confidence_k = sigmoid(w . cat(norm(x_k; g), W_before[token k - 1]) + b)

with ``W_head`` the rows of the model's own LM head for the tokens that can be drafted, and token
-1 the text's last one, so that its own place gives the first draft. Attention is not causal within
a block. Parameters have the names that they have in a file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

TAP_GAIN = 0.3
"""The initial size of what the taps before the last one add, as a share of the last one's."""
ADDED = ("o_proj.weight", "down_proj.weight", "markov_w2.weight")
"""Weights of what is added to a state or to logits; they start at 0."""
MARKOV_SPREAD = 0.5
"""The initial spread of the Markov table by the token before; what it adds starts at 0."""


@dataclass(frozen=True)
class BlockSizes:
    """The sizes of a head's tensors."""

    hidden_size: int
    num_taps: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    """Query heads, each with keys and values of its own: a head has few layers to see text by."""
    head_dim: int
    rope_theta: float
    block_size: int
    """Tokens of a block: the text's last one, and masks; as many drafts."""
    vocab_size: int
    """The model's tokens."""
    vocabulary_size: int
    """Tokens that can be drafted."""
    markov_rank: int


@dataclass(frozen=True)
class TextBlocks:
    """Blocks after the rows of texts, whose texts follow one another.

    Attributes:
        states: float32 [num_rows, num_taps, hidden_size], of each text from its first row up to the
            last that a block starts from.
        lengths: the rows of each text.
        counts: the blocks of each text.
        rows: int64 [num_blocks], the row of its text that a block starts from: it sees the rows up
            to this one.
        block: float32 [num_blocks, block_size, hidden_size], embeddings.
    """

    states: Tensor
    lengths: list[int]
    counts: list[int]
    rows: Tensor
    block: Tensor


class BlockHead(nn.Module):
    """The weights of a head, in float32, and its pass over blocks.

    Args:
        norm: [hidden_size], the initial value of the output norm: the model's own, scaled.
        tap_sizes: the root mean square of each tap's states.
    """

    def __init__(
        self,
        sizes: BlockSizes,
        eps: float,
        norm: Tensor,
        tap_sizes: Tensor,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        hidden, rank = sizes.hidden_size, sizes.markov_rank
        self.fc = _linear(sizes.num_taps * hidden, hidden)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(_Layer(sizes, eps) for _ in range(sizes.num_layers))
        self.norm = nn.RMSNorm(hidden, eps)
        self.markov_head = nn.ModuleDict(
            {
                "markov_w1": nn.Embedding(sizes.vocab_size, rank),
                "markov_w2": _linear(rank, sizes.vocabulary_size),
            }
        )
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(hidden + rank, 1)})
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.fill_(1.0)
                elif name.startswith("confidence_head") or name.endswith(ADDED):
                    parameter.zero_()
                else:
                    parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
            self.get_parameter("markov_head.markov_w1.weight").mul_(MARKOV_SPREAD * rank**0.5)
            self.norm.weight.copy_(norm)
            # All taps' states have one size here; the last tap's are what the LM head reads.
            parts = self.fc.weight.view(hidden, sizes.num_taps, hidden)
            parts.mul_(TAP_GAIN * sizes.num_taps**0.5)
            parts[:, -1] = torch.diag(norm / norm.square().mean().sqrt())
            parts.div_(tap_sizes[:, None])
        half = torch.arange(sizes.head_dim // 2, dtype=torch.float32) * 2 / sizes.head_dim
        self._frequencies = sizes.rope_theta**-half

    def forward(self, texts: TextBlocks) -> Tensor:
        """Normed states after the layers, float32 [num_blocks, block_size, hidden_size]."""
        size = self.sizes.block_size
        context = self.hidden_norm(self.fc(texts.states.flatten(1)).float())
        places = torch.cat([torch.arange(length) for length in texts.lengths])
        block = texts.rows[:, None] + 1 + torch.arange(size)
        seen = [
            self._seen(length, rows)
            for length, rows in zip(
                texts.lengths, torch.split(texts.rows, texts.counts), strict=True
            )
        ]
        rotations = self._rotation(places), self._rotation(block.flatten())
        hidden = texts.block.flatten(0, 1)
        for layer in self.layers:
            hidden = layer(hidden, context, rotations, texts.lengths, seen)
        normed: Tensor = self.norm(hidden)
        return normed.view(len(texts.rows), size, -1)

    def before(self, tokens: Tensor) -> Tensor:
        """The Markov table's rows of the tokens before drafts: [..., markov_rank]."""
        found: Tensor = self.markov_head["markov_w1"](tokens)
        return found

    def correction(self, before: Tensor) -> Tensor:
        """What the tokens before add to the logits: float32 [n, vocabulary_size]."""
        added: Tensor = self.markov_head["markov_w2"](before)
        return added.float()

    def confidence(self, states: Tensor, before: Tensor) -> Tensor:
        """The logit of the chance that a draft is accepted, float32 [n].

        Args:
            states: [n, hidden_size], of :meth:`forward`.
            before: [n, markov_rank], of :meth:`before`.
        """
        found: Tensor = self.confidence_head["proj"](torch.cat((states, before), -1))
        return found[..., 0].float()

    def tensors(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        """The tensors by their names in a head's file."""
        return {
            name: parameter.detach().to(dtype).contiguous()
            for name, parameter in self.named_parameters()
        }

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [n, 1, head_dim / 2] each."""
        angles = positions[:, None, None] * self._frequencies
        return angles.cos(), angles.sin()

    def _seen(self, length: int, rows: Tensor) -> Tensor:
        """Whether the queries of a text's blocks see a key: those of the text, then the blocks'."""
        size = self.sizes.block_size
        text = torch.arange(length) <= rows.repeat_interleave(size)[:, None]
        which = torch.arange(len(rows)).repeat_interleave(size)
        return torch.cat((text, which[:, None] == which), 1)


class _Layer(nn.Module):
    def __init__(self, sizes: BlockSizes, eps: float) -> None:
        super().__init__()
        hidden, inner = sizes.hidden_size, sizes.intermediate_size
        width, self._head_dim = sizes.num_heads * sizes.head_dim, sizes.head_dim
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.self_attn = nn.ModuleDict(
            {
                **{f"{name}_proj": _linear(hidden, width) for name in "qkv"},
                "o_proj": _linear(width, hidden),
                "q_norm": nn.RMSNorm(sizes.head_dim, eps),
                "k_norm": nn.RMSNorm(sizes.head_dim, eps),
            }
        )
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": _linear(hidden, inner),
                "up_proj": _linear(hidden, inner),
                "down_proj": _linear(inner, hidden),
            }
        )

    def forward(
        self,
        hidden: Tensor,
        context: Tensor,
        rotations: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
        lengths: list[int],
        seen: list[Tensor],
    ) -> Tensor:
        """The layer's output [n, hidden_size], of all texts' blocks."""
        attention, mlp = self.self_attn, self.mlp
        normed = self.input_layernorm(hidden)
        q = _rotated(attention["q_norm"](self._heads("q", normed)), *rotations[1])
        keys = [
            _rotated(attention["k_norm"](self._heads("k", each)), *rotation)
            for each, rotation in zip((context, normed), rotations, strict=True)
        ]
        values = [self._heads("v", each) for each in (context, normed)]
        counts = [len(mask) for mask in seen]
        in_text = [torch.split(each[0], lengths) for each in (keys, values)]
        in_blocks = [torch.split(each[1], counts) for each in (keys, values)]
        found = [
            functional.scaled_dot_product_attention(
                queries.transpose(0, 1),
                torch.cat((text_keys, block_keys)).transpose(0, 1),
                torch.cat((text_values, block_values)).transpose(0, 1),
                attn_mask=mask,
            ).transpose(0, 1)
            for queries, text_keys, text_values, block_keys, block_values, mask in zip(
                torch.split(q, counts), *in_text, *in_blocks, seen, strict=True
            )
        ]
        hidden = hidden + attention["o_proj"](torch.cat(found).flatten(1)).float()
        normed = self.post_attention_layernorm(hidden)
        gated = functional.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed)
        after: Tensor = hidden + mlp["down_proj"](gated).float()
        return after

    def _heads(self, name: str, normed: Tensor) -> Tensor:
        """Queries, keys or values, float32 [n, num_heads, head_dim]."""
        made: Tensor = self.self_attn[f"{name}_proj"](normed).float()
        return made.view(len(made), -1, self._head_dim)


def _linear(in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = heads.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
