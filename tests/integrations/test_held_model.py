"""Changes of a transformers model while eecore holds it: followed, or refused with a reason."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

import eecore
from eecore import ModelError
from tiny_models import random_prompts, write_model
from tiny_t5 import write_t5

IDS = torch.tensor(random_prompts(6, seed=5))
CALL: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
EARLY: dict[str, Any] = {"custom_generate": eecore.generate_for_transformers, "exit": "full"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("held")
    for family in ("llama", "llama_tied"):
        write_model(root / family, family)
    for family in ("t5", "mt5"):
        write_t5(root / family, family)
    return root


def loaded(path: Path) -> PreTrainedModel:
    kind = AutoModelForSeq2SeqLM if "t5" in path.name else AutoModelForCausalLM
    return kind.from_pretrained(path, dtype=torch.float32).eval()


def assert_followed(model: PreTrainedModel) -> None:
    expected = model.generate(IDS, **CALL)
    assert torch.equal(model.generate(IDS, **CALL, **EARLY), expected)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))


def other_head(model: PreTrainedModel) -> None:
    model.lm_head = nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)


def other_weight(model: PreTrainedModel) -> None:
    model.lm_head.weight = parameter(*model.lm_head.weight.shape)


def assigned(model: PreTrainedModel) -> None:
    state = {name: -tensor for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def fewer_layers(model: PreTrainedModel) -> None:
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2


def tied(model: PreTrainedModel) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def other_data(model: PreTrainedModel) -> None:
    weight = model.get_parameter("model.layers.0.self_attn.o_proj.weight")
    weight.data = weight.data.flip(0)


def config_of_rope(model: PreTrainedModel) -> None:
    """Fields of the config that transformers itself does not read again."""
    model.config.rope_parameters["rope_theta"] = 50.0


def frequencies(model: PreTrainedModel) -> None:
    model.get_buffer("model.rotary_emb.inv_freq").mul_(3.0)


def there_and_back(model: PreTrainedModel) -> None:
    """The rotary embedding's frequencies stay rounded."""
    model.bfloat16().float()


def hidden_states(model: PreTrainedModel) -> None:
    """Hooks that transformers leaves in place and that change nothing."""
    model(IDS, output_hidden_states=True)


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        other_head,
        other_weight,
        assigned,
        fewer_layers,
        tied,
        other_data,
        config_of_rope,
        frequencies,
        there_and_back,
        hidden_states,
    ],
)
def test_what_a_model_has_become_is_followed(
    directory: Path, change: Callable[[PreTrainedModel], None], used_before: bool
) -> None:
    model = loaded(directory / "llama")
    if used_before:
        model.generate(IDS, **CALL, **EARLY)
    change(model)
    assert_followed(model)


@pytest.mark.parametrize("family", ["t5", "mt5"])
def test_what_is_made_of_weights_is_made_again(directory: Path, family: str) -> None:
    model = loaded(directory / family)
    model.generate(IDS, **CALL, **EARLY)
    for stack in ("encoder", "decoder"):
        model.get_parameter(f"{stack}.final_layer_norm.weight").data.copy_(parameter(64))
    assert_followed(model)


def lm_head_bias(model: PreTrainedModel) -> None:
    model.lm_head.bias = parameter(len(model.lm_head.weight))


def norm_eps(model: PreTrainedModel) -> None:
    model.model.norm.variance_epsilon = 3.0


def config_of_norms(model: PreTrainedModel) -> None:
    model.config.rms_norm_eps = 0.5


def activation(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.act_fn = nn.Tanh()


def own_forward(model: PreTrainedModel) -> None:
    forward = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: 3.0 * forward(x)


def forward_hook(model: PreTrainedModel) -> None:
    model.model.layers[1].register_forward_hook(lambda *_: None)


def forward_pre_hook(model: PreTrainedModel) -> None:
    model.model.register_forward_pre_hook(lambda *_: None)


def parametrized(model: PreTrainedModel) -> None:
    nn.utils.parametrizations.weight_norm(model.lm_head)


def shared_layer(model: PreTrainedModel) -> None:
    model.model.layers[1] = model.model.layers[0]


def missing_layers(model: PreTrainedModel) -> None:
    model.model.layers = model.model.layers[:2]


def dropout(model: PreTrainedModel) -> None:
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()


def prompt_tuning(model: PreTrainedModel) -> None:
    prepare = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *args, **more: prepare(*args, **more)


def other_attention(model: PreTrainedModel) -> None:
    AttentionInterface.register("other", lambda *_, **__: None)
    model.set_attn_implementation("other")


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lm_head_bias, r"lm_head\.bias: expected none, got Parameter"),
        (norm_eps, r"model\.norm: variance_epsilon: expected .* as the config says, got 3\.0"),
        (config_of_norms, r"variance_epsilon: expected 0\.5 as the config says"),
        (activation, r"layers\.0\.mlp\.act_fn: expected .*SiLU.*, got .*Tanh"),
        (own_forward, r"layers\.0\.mlp: forward: expected that of .*LlamaMLP, got another"),
        (forward_hook, r"model\.layers\.1: expected no hooks"),
        (forward_pre_hook, r"LlamaForCausalLM: model: expected no hooks"),
        (parametrized, r"lm_head: expected torch\.nn\..*Linear, got .*ParametrizedLinear"),
        (shared_layer, r"layers\.1\..*: expected memory of its own, got that of model\.layers\.0"),
        (missing_layers, r"layers\.2: expected .*LlamaDecoderLayer as the config says, got none"),
        (dropout, r"attention_dropout: expected 0 in training, or model\.eval\(\), got 0\.5"),
        (prompt_tuning, r"LlamaForCausalLM: prepare_inputs_for_generation: expected that of"),
        (other_attention, "attn_implementation: expected one of transformers, got <function"),
    ],
)
def test_what_cannot_be_followed_is_an_error(
    directory: Path, change: Callable[[PreTrainedModel], None], message: str, used_before: bool
) -> None:
    model = loaded(directory / "llama")
    if used_before:
        model.generate(IDS, **CALL, **EARLY)
    change(model)
    with pytest.raises(ModelError, match=message):
        model.generate(IDS, **CALL, **EARLY)


def saved_sizes(model: PreTrainedModel, directory: Path) -> dict[str, int]:
    """Bytes of what torch and safetensors write of a model and of its parts."""
    state = model.state_dict()
    parts = {
        "a layer": {name: each for name, each in state.items() if ".1." in name},
        "a matrix": model.get_input_embeddings().weight.detach(),
        "norms": {name: each for name, each in state.items() if "norm" in name},
        "a half": next(each for each in state.values() if each.dim() == 2)[::2],
        "all": state,
        "the module": model,
        "a copy": copy.deepcopy(model),
    }
    sizes = {}
    for name, part in parts.items():
        file = io.BytesIO()
        torch.save(part, file)
        sizes[name] = file.tell()
    model.save_pretrained(directory)
    return sizes | {each.name: each.stat().st_size for each in directory.iterdir()}


@pytest.mark.parametrize("family", ["llama", "llama_tied", "t5", "mt5"])
def test_what_is_saved_is_as_large_as_before(directory: Path, family: str, tmp_path: Path) -> None:
    model = loaded(directory / family)
    before = saved_sizes(model, tmp_path / "before")
    model.generate(IDS, **CALL, **EARLY)
    after = saved_sizes(model, tmp_path / "after")
    assert after == pytest.approx(before, rel=0.01)
    again = type(model).from_pretrained(tmp_path / "after")
    for name, each in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], each), name


def test_eecores_model_says_that_it_has_become_another(directory: Path) -> None:
    model = loaded(directory / "llama")
    ours = eecore.from_transformers(model)
    again = eecore.from_transformers(model, prefix_cache=True)
    assert again.network.weights is ours.network.weights
    prompt = IDS[0].tolist()
    for each in (ours, again):
        eecore.generate(each, prompt, max_tokens=2)
    engine = ours.engine()
    other_weight(model)
    with pytest.raises(ModelError, match=r"lm_head\.weight: .* call it again"):
        eecore.generate(ours, prompt, max_tokens=2)
    with pytest.raises(ModelError, match=r"lm_head\.weight: .* call it again"):
        engine.add_request(prompt)
    forward_hook(model)
    with pytest.raises(ModelError, match="expected no hooks"):
        eecore.generate(ours, prompt, max_tokens=2)


def test_autocast_is_refused(directory: Path) -> None:
    model = loaded(directory / "llama")
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(eecore.RequestError, match="autocast: expected none"),
    ):
        model.generate(IDS, **CALL, **EARLY)


def test_a_calibration_ends_where_data_is_written() -> None:
    """Merging an adapter writes through ``.data``, which autograd does not count."""
    where = eecore.default_model()
    model = loaded(where)
    policy = eecore.ConfidentExit.calibrated(where / "calibration-softmax.json")
    given: dict[str, Any] = {**CALL, "custom_generate": EARLY["custom_generate"], "exit": policy}
    ids = torch.tensor([[5, 6, 7]])
    model.generate(ids, **given)
    model.get_parameter("model.layers.0.mlp.down_proj.weight").data *= 1.01
    with pytest.raises(eecore.ExitError, match="calibrate again"):
        model.generate(ids, **given)
