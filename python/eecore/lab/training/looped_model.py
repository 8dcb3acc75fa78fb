"""A looped model (Ouro) to train: its stack of layers runs several times, and a gate says when to
stop.

In the format of Ouro's checkpoints: a layer is Llama's with an RMS norm of what attention gives and
one of what the MLP gives, the final norm ends each loop, and its output goes into the next one,
into the LM head and into the gate. (Zhu et al. 2025, "Scaling latent reasoning via looped language
models".) To import this module tells transformers' Auto classes of the model.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from eecore.lab.training.libraries import library

transformers = library("transformers")
llama = library("transformers.models.llama.modeling_llama")
Base: Any = transformers.PreTrainedModel
BaseConfig: Any = transformers.PretrainedConfig


class OuroConfig(BaseConfig):  # type: ignore[misc]
    """The fields of an Ouro's config.json.

    Args:
        **fields: of a Llama, ``total_ut_steps``, how many times the layers run, and
            ``early_exit_threshold``, the cumulative exit probability at which a token exits.
    """

    model_type = "ouro"

    def __init__(self, **fields: Any) -> None:
        usual: dict[str, Any] = {
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "initializer_range": 0.02,
            "total_ut_steps": 4,
            "early_exit_threshold": 1.0,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
        }
        super().__init__(**{**usual, **fields})
        if getattr(self, "head_dim", None) is None:
            self.head_dim = self.hidden_size // self.num_attention_heads


class PostNorm(nn.RMSNorm):
    """The norm of a sublayer's output."""


class OuroLayer(nn.Module):
    """A layer of the stack."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = llama.LlamaAttention(config, 0), llama.LlamaMLP(config)
        self.input_layernorm = _norm(config)
        self.input_layernorm_2 = PostNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = _norm(config)
        self.post_attention_layernorm_2 = PostNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """[batch, length, hidden_size], the residual stream after the layer."""
        attended, _ = self.self_attn(self.input_layernorm(x), cos_sin, mask)
        x = x + self.input_layernorm_2(attended)
        added: Tensor = self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))
        return x + added


class OuroBase(Base):  # type: ignore[misc]
    """A part of an Ouro, with its initial weights."""

    config_class = OuroConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def _init_weights(self, module: nn.Module) -> None:
        """As in transformers, except for the norms of sublayers' outputs: with weights of 1 the
        sublayers of one loop would drown the state that it begins with. (Yin et al. 2025, Pangu
        Ultra: norms scaled by depth.)
        """
        if not isinstance(module, PostNorm):
            super()._init_weights(module)
            return
        num_layers = self.config.num_hidden_layers * self.config.total_ut_steps
        nn.init.constant_(module.weight, (2 * num_layers) ** -0.5)


class OuroStack(OuroBase):
    """Embeddings, the stack of layers, the norm that ends each loop, and the exit gate."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OuroLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = _norm(config)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, **_: object
    ) -> list[Tensor]:
        """The normed state after each loop, [batch, length, hidden_size].

        Args:
            input_ids: int64 [batch, length].
            position_ids: int64 [batch, length], which begin at 0 with each of the texts of a row;
                None: a row is one text.
        """
        hidden, mask = self.embed_tokens(input_ids), None
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        else:
            text = (position_ids == 0).cumsum(1)
            mask = (text[:, :, None] == text[:, None, :]).tril()[:, None]
        cos_sin = self._cos_sin(position_ids, hidden.dtype)
        states = []
        for _loop in range(self.config.total_ut_steps):
            for layer in self.layers:
                hidden = layer(hidden, cos_sin, mask)
            hidden = self.norm(hidden)
            states.append(hidden)
        return states

    def _cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Both [batch, length, head_dim]."""
        head_dim = self.config.head_dim
        each = torch.arange(0, head_dim, 2, device=positions.device) / head_dim
        angles = positions[..., None] * _theta(self.config) ** -each
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class OuroForCausalLM(OuroBase):
    """The model with its LM head, which reads the normed state of any loop."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = OuroStack(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **_: object) -> Tensor:
        """Logits of the last loop, [batch, length, vocab_size]."""
        logits: Tensor = self.lm_head(self.model(input_ids, position_ids)[-1])
        return logits


def _norm(config: Any) -> nn.RMSNorm:
    return nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


def _theta(config: Any) -> float:
    """The base of the rotary embedding, in either spelling of transformers."""
    ropes = getattr(config, "rope_parameters", None) or {}
    return float(ropes.get("rope_theta") or config.rope_theta)


transformers.AutoConfig.register("ouro", OuroConfig, exist_ok=True)
transformers.AutoModelForCausalLM.register(OuroConfig, OuroForCausalLM, exist_ok=True)
