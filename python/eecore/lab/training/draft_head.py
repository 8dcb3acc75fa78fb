"""A draft head: predicts the next tokens, one after another, from the states of a frozen model.

It is recurrent, as in Hydra (Ankner et al. 2024) and ReDrafter (Zhang et al. 2024), and starts from
states of several layers, as EAGLE-3 does (Li et al. 2025). ``norm`` is RMSNorm with the model's
eps::

    s = sum_i W_tap[i] norm(h_tap[i]; g_tap[i])           at the last position that the model saw
    u = W_state norm(s; g_state) + W_token norm(embed(t); g_token)          for each next token t
    u = u + sum_a W_out[a] attention(W_query[a] norm(u; g_attention))       to keys a of the model
    u = u + W_down (silu(W_gate norm(u; g_mlp)) * W_up norm(u; g_mlp))      for each block
    logits = W_head norm(u; g),  s = u

with ``W_head`` the rows of the model's own LM head for the tokens that can be drafted. A head
attends through some of the model's own key heads, to the keys that the model has computed (GLIDE,
Du et al. 2024); drafts have no keys of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from eecore.lab.training.head_keys import TextKeys


@dataclass(frozen=True)
class HeadSizes:
    """The sizes of a head's tensors."""

    hidden_size: int
    num_taps: int
    intermediate_size: int
    num_blocks: int
    num_attended: int = 0
    """Key heads of the model that it attends to."""
    queries: int = 0
    """Features of the queries to each key head."""


class DraftHead(nn.Module):
    """The weights of a head, in float32, and its two operations, :meth:`begin` and :meth:`step`.

    Args:
        final_norm: the model's, [hidden_size], the initial value of the head's output norm.
    """

    def __init__(self, sizes: HeadSizes, eps: float, final_norm: Tensor, seed: int = 0) -> None:
        super().__init__()
        self.sizes = sizes
        self._eps = eps
        hidden, taps = sizes.hidden_size, sizes.num_taps
        inner, blocks = sizes.intermediate_size, sizes.num_blocks
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int, gain: float = 1.0) -> nn.Parameter:
            values = torch.randn(*shape, generator=generator)
            return nn.Parameter(values * (gain * shape[-1] ** -0.5))

        def ones(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.ones(*shape))

        # The last tap and the state start as identities; the other weights add a little to them.
        tap_weight, state_weight = random(taps, hidden, hidden, gain=0.1), random(hidden, hidden)
        with torch.no_grad():
            tap_weight[-1] = torch.eye(hidden)
            state_weight.copy_(torch.eye(hidden))
        self.tap_norm = ones(taps, hidden)
        self.tap_weight = tap_weight
        self.state_norm = ones(hidden)
        self.state_weight = state_weight
        self.token_norm = ones(hidden)
        self.token_weight = random(hidden, hidden, gain=0.3)
        self.mlp_norm = ones(blocks, hidden)
        self.mlp_gate = random(blocks, inner, hidden)
        self.mlp_up = random(blocks, inner, hidden)
        self.mlp_down = nn.Parameter(torch.zeros(blocks, hidden, inner))
        self.norm = nn.Parameter(final_norm.detach().float().clone())
        if sizes.num_attended:
            count, queries = sizes.num_attended, sizes.queries
            self.attention_norm = ones(hidden)
            self.attention_query = random(count, queries, hidden)
            self.attention_output = nn.Parameter(torch.zeros(count, hidden, queries))

    def begin(self, states: Tensor) -> Tensor:
        """The state s [n, hidden_size] from the taps' states, float32 [n, num_taps,
        hidden_size].
        """
        total = torch.zeros_like(states[:, 0])
        for tap in range(self.sizes.num_taps):
            normed = self._normed(states[:, tap], self.tap_norm[tap])
            total = total + _product(normed, self.tap_weight[tap])
        return total

    def step(self, state: Tensor, embedded: Tensor, seen: TextKeys | None = None) -> Tensor:
        """The next s [n, hidden_size] from s and the next token's embedding, both [n,
        hidden_size].

        :meth:`output` reads it, too. A head that attends needs the keys that the rows see.
        """
        u = self.asked(state, embedded)
        if self.sizes.num_attended:
            assert seen is not None
            queries = self.queries(u)
            weight = self.attention_output.transpose(0, 1).flatten(1)
            u = u + _product(seen.found(queries).flatten(1), weight)
        for block in range(self.sizes.num_blocks):
            normed = self._normed(u, self.mlp_norm[block])
            gate = functional.silu(_product(normed, self.mlp_gate[block]))
            up = _product(normed, self.mlp_up[block])
            u = u + _product(gate * up, self.mlp_down[block])
        return u

    def asked(self, state: Tensor, embedded: Tensor) -> Tensor:
        """u before it attends: [n, hidden_size]."""
        u = _product(self._normed(state, self.state_norm), self.state_weight)
        return u + _product(self._normed(embedded, self.token_norm), self.token_weight)

    def queries(self, asked: Tensor) -> Tensor:
        """Queries from :meth:`asked`, not rotated: [n, num_attended, queries]."""
        normed = self._normed(asked, self.attention_norm)
        asked = _product(normed, self.attention_query.flatten(0, 1))
        return asked.view(len(asked), self.sizes.num_attended, -1)

    def output(self, state: Tensor) -> Tensor:
        """The states that the rows of the LM head are multiplied with: [n, hidden_size]."""
        return self._normed(state, self.norm)

    @property
    def tensor_names(self) -> dict[str, str]:
        """The names in a head's file, such as ``taps.norm``, by parameter."""
        names = (name for name, _ in self.named_parameters())
        return {name: name.replace("_", ".", 1).replace("tap.", "taps.") for name in names}

    def tensors(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        """The tensors by their names in a head's file."""
        return {
            stored: self.get_parameter(name).detach().to(dtype).contiguous()
            for name, stored in self.tensor_names.items()
        }

    def _normed(self, values: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(values, weight.shape, weight, self._eps)


def _product(values: Tensor, weight: Tensor) -> Tensor:
    """The product in float32, whatever autocast says."""
    return functional.linear(values, weight).float()
