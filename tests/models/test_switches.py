"""A layer described by data: each switch through stretches, single ops, fills, exits and drafts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import eecore
import emulated
from devices import as_on_cuda
from eecore import ConfidentExit, FixedExit, Full, ModelError, SamplingParams, SelfSpeculative
from eecore.config import ModelConfig, RopeConfig
from eecore.generation import engine_limits
from eecore.models import AttentionBatch, KVCache, LlamaModel
from eecore.models.llama import LlamaWeights
from eecore.models.readers.adopt import Adopted
from eecore.models.rope import RopeTables, cos_sin_table, query_scales
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
each_switch = pytest.mark.parametrize("switch", SWITCHES)
SAMPLING = SamplingParams(max_tokens=12, ignore_eos=True)
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


def run(network: LlamaModel, tokens: list[int]) -> tuple[list[Tensor], KVCache, AttentionBatch]:
    """States of a text before the first layer and after each; its cache and its batch."""
    config, batch = network.config, network.whole_text(len(tokens))
    kv = KVCache.allocate(config, 1, len(tokens), device=network.device, dtype=network.dtype)
    states = [network.embed(torch.tensor(tokens))]
    for layer in range(config.num_layers):
        states.append(network.layers(layer, layer + 1, states[-1], kv, batch))
    return states, kv, batch


def loaded(network: LlamaModel) -> eecore.Model:
    return eecore.Model(network, None, engine_limits(network, None, kv_cache_tokens=256))


def answers(model: eecore.Model, exit: eecore.Exit, max_tokens: int = 12) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [out.token_ids for out in eecore.generate(model, PROMPTS, exit=exit, sampling=sampling)]


@each_switch
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_stretch_is_its_single_ops(switch: str, dtype: torch.dtype) -> None:
    network = model_of(config_of(**SWITCHES[switch]), dtype)
    states, kv, batch = run(network, list(range(1, 24)))
    whole = network.layers(0, 4, states[0], kv, batch)
    assert torch.equal(whole, states[-1])
    network.calls_single_ops = True
    one_by_one, _, _ = run(network, list(range(1, 24)))
    for got, wanted in zip(one_by_one, states, strict=True):
        assert torch.equal(got, wanted)


@each_switch
def test_filled_keys_are_those_that_a_layer_makes_of_the_state(switch: str) -> None:
    network = model_of(config_of(**SWITCHES[switch]))
    states, kv, batch = run(network, list(range(1, 12)))
    for layer in range(4):
        filled = KVCache.allocate(network.config, 1, 11, device=CPU, dtype=torch.float32)
        exit_layer = torch.full((11,), layer, dtype=torch.int32)
        network.fill_kv(states[layer], exit_layer, filled, batch.positions, batch.slot_mapping)
        for got, wanted in zip((filled.k, filled.v), (kv.k, kv.v), strict=True):
            torch.testing.assert_close(got[layer], wanted[layer], rtol=1e-5, atol=1e-6)


@each_switch
def test_confidence_is_that_of_the_logits(switch: str) -> None:
    network = model_of(config_of(**SWITCHES[switch]))
    hidden = run(network, PROMPTS[0])[0][-1]
    logits, confidence = network.logits(hidden), network.confidence(hidden)
    best = logits.softmax(-1).topk(2).values
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(confidence.confidence, best[:, 0] - best[:, 1], **close)
    torch.testing.assert_close(confidence.logsumexp, logits.logsumexp(-1), **close)
    assert torch.equal(confidence.token, logits.argmax(-1))


@each_switch
def test_exits_and_drafts_keep_their_promises(switch: str) -> None:
    config = config_of(**SWITCHES[switch])
    network = model_of(config)
    model = loaded(network)
    whole = answers(model, Full())
    assert whole[0] != whole[1]
    assert answers(model, SelfSpeculative(2, 3)) == whole
    assert answers(model, ConfidentExit(1.0)) == whole
    cut = LlamaModel(config.first_layers(2), first_layers(network.weights, 2))
    assert answers(model, FixedExit(2)) == answers(loaded(cut), Full())
    early = eecore.generate(model, PROMPTS, exit=ConfidentExit(0.005), sampling=SAMPLING)
    assert min(layer for out in early for layer in out.exit_layers) < 4


def first_layers(weights: LlamaWeights, count: int) -> LlamaWeights:
    """The weights of the first layers: copies, since a stack of them is contiguous."""
    kept = {"embed_tokens", "lm_head", "final_norm"}
    cut = {}
    for field in dataclasses.fields(weights):
        value = getattr(weights, field.name)
        if field.name not in kept and value is not None:
            if isinstance(value, Tensor):
                value = value[:count].clone()
            else:
                value = value._replace(weight=value.weight[:count].clone())
        cut[field.name] = value
    return LlamaWeights(**cut)


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


def test_an_offset_is_folded_into_norms_and_followed_when_it_is_adopted() -> None:
    config = config_of(**SWITCHES["post norms"])
    tensors = tensors_of(config)
    weights = model_of(config).weights
    assert torch.equal(weights.final_norm, tensors["model.norm.weight"] + 1)
    adopted = Adopted(config, tensors, "theirs")
    network = adopted.network(config, None)
    assert isinstance(network, LlamaModel)
    assert torch.equal(network.weights.final_norm, weights.final_norm)
    tensors["model.norm.weight"] += 0.5
    tensors["model.layers.0.mlp.down_proj.weight"].zero_()
    adopted.refresh(network)
    assert torch.equal(network.weights.final_norm, tensors["model.norm.weight"] + 1)
    assert not network.weights.down.weight[0].any()


def test_queries_are_scaled_by_position() -> None:
    tables = RopeTables(config_of(**SWITCHES["scaled queries"]), CPU)
    made, (of_queries, of_keys) = tables.reaching(64), tables.places[0]
    plain = cos_sin_table(SCALED_ROPE, 64, CPU)
    assert torch.equal(made[of_keys], plain)
    factors = [1 + 0.5 * math.log(1 + position // 5) for position in range(64)]
    torch.testing.assert_close(query_scales(SCALED_ROPE, 64), torch.tensor(factors))
    torch.testing.assert_close(made[of_queries], plain * torch.tensor(factors)[:, None])


def test_a_layer_without_a_rope_is_turned_by_nothing() -> None:
    tables = RopeTables(config_of(**SWITCHES["ropes"]), CPU)
    assert tables.places == ((0, 0), (1, 1), (2, 2), (0, 0))
    assert tables.reaching(3)[2].tolist() == [[1.0] * 8 + [0.0] * 8] * 4
    assert RopeTables(config_of(), CPU).by_layer is None


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
