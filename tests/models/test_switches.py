"""A layer described by data: each switch through stretches, single ops, fills, exits and drafts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import eecore
import emulated
from devices import as_on_cuda
from eecore import ConfidentExit, ModelError, SamplingParams, SelfSpeculative
from eecore.config import ModelConfig, RopeConfig
from eecore.generation import engine_limits
from eecore.models import LlamaModel
from eecore.models.llama import LlamaWeights
from eecore.models.weights import Filling, NewWeights
from tiers import in_all

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
ROPE = RopeConfig(rotary_dim=16)
OTHER_ROPE = RopeConfig("linear", 1e6, 16, 8.0)
SCALED_ROPE = RopeConfig(rotary_dim=16, original_max_position=5, query_scale_beta=0.5)
SWITCHES: dict[str, dict[str, Any]] = {
    "post norms": {
        "architecture": "Gemma3ForCausalLM",
        "post_norm": True,
        "norm_offset": 1.0,
        "embedding_multiplier": 8.0,
    },
    "post norms alone": {"pre_norm": False, "post_norm": True, "qk_norm": "projection"},
    "ropes": {"ropes": (ROPE, OTHER_ROPE), "layer_ropes": (0, 1, None, 0)},
    "scaled queries": {"ropes": (SCALED_ROPE,), "qk_norm": "head"},
    "numbers": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_scale": 0.3,
        "logits_divisor": 3.0,
        "activation": "gelu_tanh",
    },
    "caps": {"attention_soft_cap": 2.0, "logits_soft_cap": 3.0, "layer_windows": (5, 0, 5, 0)},
}
PROMPTS = [[5, 9, 2, 7, 7, 1], [3, 88, 41]]


def config_of(**switches: Any) -> ModelConfig:
    return ModelConfig(
        **{
            "architecture": "LlamaForCausalLM",
            "num_layers": 4,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_q_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "vocab_size": 96,
            "rms_norm_eps": 1e-5,
            "max_position": 128,
            "ropes": (ROPE,),
            **switches,
        }
    )


def tensors_of(config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a checkpoint, with a spread that makes every layer matter."""
    generator = torch.Generator().manual_seed(0)
    views = LlamaWeights.empty(config, NewWeights("meta", torch.float32)).by_checkpoint_name(config)
    tensors = {}
    for name, view in views.items():
        shape = tuple(view.weight.shape)
        drawn = torch.randn(shape, generator=generator)
        norm = 1 - config.norm_offset + drawn / 4
        tensors[name] = norm if len(shape) == 1 else drawn * shape[-1] ** -0.5 * 2
    return tensors


def model_of(config: ModelConfig, dtype: torch.dtype = torch.float32) -> LlamaModel:
    weights = LlamaWeights.empty(config, NewWeights(CPU, dtype))
    filling, tensors = Filling(), tensors_of(config)
    for name, view in weights.by_checkpoint_name(config).items():
        filling.fill(view, tensors[name])
    return LlamaModel(config, weights)


def loaded(network: LlamaModel) -> eecore.Model:
    return eecore.Model(network, None, engine_limits(network, None, kv_cache_tokens=256))


def answers(model: eecore.Model, exit: eecore.Exit, max_tokens: int = 12) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [out.token_ids for out in eecore.generate(model, PROMPTS, exit=exit, sampling=sampling)]


@pytest.mark.parametrize(
    "switch",
    ["post norms alone", "ropes", *in_all("post norms", "scaled queries", "numbers", "caps")],
)
def test_the_cuda_path_gives_the_tokens_of_the_cpu(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the emulator, with programs as on a GPU: exits of each row, and drafts."""
    config = config_of(**SWITCHES[switch])
    exits = ConfidentExit(0.005), SelfSpeculative(2, 2)
    expected = [answers(loaded(model_of(config)), exit, max_tokens=3) for exit in exits]
    emulated.route(monkeypatch)
    for exit, wanted in zip(exits, expected, strict=True):
        model = as_on_cuda(loaded(model_of(config)))
        assert answers(model, exit, max_tokens=3) == wanted


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"pre_norm": False}, "pre_norm, post_norm: expected one or both, got neither"),
        ({"activation": "relu"}, "activation: expected that of a gate, gelu_tanh or silu, got"),
        ({"activation": "gelu"}, "activation: expected relu, gelu_tanh or silu, got 'gelu'"),
        ({"qk_norm": True}, "qk_norm: expected none, head or projection, got True"),
        ({"ropes": ()}, "ropes: expected 1 to 4096 objects of RopeConfig, got"),
        ({"ropes": ROPE}, "ropes: expected 1 to 4096 objects of RopeConfig, got"),
        ({"ropes": (ROPE, RopeConfig(rotary_dim=8))}, "ropes: expected one or more of one rotary"),
        (
            {"ropes": (RopeConfig(rotary_dim=18),)},
            "rotary_dim: expected at most head_dim=16, got 18",
        ),
        ({"layer_ropes": (0, 1, 0, 0)}, "layer_ropes: expected 4 places below 1, or None, got"),
        ({"layer_ropes": (0, 0)}, "layer_ropes: expected 4 places below 1, or None, got"),
        ({"norm_offset": 9.0}, "norm_offset: expected -1..1, got 9"),
        ({"residual_multiplier": 0.0}, "residual_multiplier: expected a positive number, got 0"),
        ({"attention_soft_cap": -1.0}, "attention_soft_cap: expected None or "),
    ],
)
def test_contradicting_switches_are_refused(switches: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_of(**switches)


def test_a_scale_of_queries_wants_whole_heads_and_a_context() -> None:
    partial = dataclasses.replace(SCALED_ROPE, rotary_dim=8)
    with pytest.raises(ModelError, match=r"rope\.query_scale_beta: expected 0 unless"):
        config_of(ropes=(partial,))
    with pytest.raises(ModelError, match=r"rope\.original_max_position: expected a whole"):
        RopeConfig(rotary_dim=16, query_scale_beta=0.5)
