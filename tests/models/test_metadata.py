"""Metadata of directories: each field is read, or is an error or a warning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from eecore.config import DeltaConfig, ModelConfig, RopeConfig, T5Config
from eecore.errors import CheckpointError, ModelNotFoundError
from eecore.models import Tokenizer, load_model
from eecore.models.readers.config_fields import ConfigFields
from eecore.models.readers.config_json import model_config, read_model_config
from tiny_models import write_model
from tiny_t5 import write_t5

SMALL = {"num_hidden_layers": 1}
MESSAGES = [{"role": "user", "content": "hi"}]
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


def edit(file: Path, **changes: Any) -> None:
    """Change fields of a JSON file, null included; ``...`` takes a field out."""
    fields = {**(json.loads(file.read_text()) if file.exists() else {}), **changes}
    file.write_text(json.dumps({name: v for name, v in fields.items() if v is not ...}))


def read(values: dict[str, Any]) -> ModelConfig | T5Config:
    none = ConfigFields({}, "generation_config.json", CheckpointError)
    return model_config(ConfigFields(values, "config.json", CheckpointError), none)


# What config.json leaves out

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_hidden_layers": 30,
    "num_attention_heads": 64,
    "vocab_size": 320,
}
T5_SIZES = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("LlamaForCausalLM", "LlamaConfig", SIZES),
    ("MistralForCausalLM", "MistralConfig", SIZES),
    ("Qwen2ForCausalLM", "Qwen2Config", SIZES),
    ("Qwen2ForCausalLM", "Qwen2Config", {**SIZES, "use_sliding_window": True}),
    ("Qwen3ForCausalLM", "Qwen3Config", {**SIZES, "use_sliding_window": True}),
    ("MinistralForCausalLM", "MinistralConfig", SIZES),
    ("Ministral3ForCausalLM", "Ministral3Config", SIZES),
    ("Gemma2ForCausalLM", "Gemma2Config", SIZES),
    ("Gemma3ForCausalLM", "Gemma3TextConfig", SIZES),
    ("SmolLM3ForCausalLM", "SmolLM3Config", SIZES),
    ("SmolLM3ForCausalLM", "SmolLM3Config", {**SIZES, "use_sliding_window": True}),
    ("Olmo2ForCausalLM", "Olmo2Config", SIZES),
    ("Olmo3ForCausalLM", "Olmo3Config", SIZES),
    ("GraniteForCausalLM", "GraniteConfig", SIZES),
    ("Phi3ForCausalLM", "Phi3Config", SIZES),
    ("Lfm2ForCausalLM", "Lfm2Config", SIZES),
    ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", SIZES),
    ("T5ForConditionalGeneration", "T5Config", {**T5_SIZES, "vocab_size": 320}),
    ("MT5ForConditionalGeneration", "MT5Config", {**T5_SIZES, "vocab_size": 320}),
]
REQUIRED = {*SIZES, *T5_SIZES}


def windows(config: Any) -> tuple[int, ...]:
    """The sliding window of each layer of a config of transformers."""
    size = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (size,) * config.num_hidden_layers
    return tuple(size if kind == "sliding_attention" else 0 for kind in kinds)


def ropes(config: Any, head_dim: int) -> tuple[RopeConfig, ...]:
    """The rotary embeddings of a config of transformers, that of full attention first."""
    given = config.rope_parameters
    nested = "full_attention" in given
    sets = [given[f"{kind}_attention"] for kind in ("full", "sliding")] if nested else [given]
    made = {}
    for each in sets:
        settings: dict[str, Any] = {"type": each["rope_type"], "theta": each["rope_theta"]}
        if each["rope_type"] == "yarn":
            settings |= {name: each[name] for name in ("factor", "beta_fast", "beta_slow")}
            settings["original_max_position"] = each["original_max_position_embeddings"]
            settings["query_scale_beta"] = each["llama_4_scaling_beta"]
        rotary_dim = int(head_dim * each.get("partial_rotary_factor", 1.0))
        made[RopeConfig(rotary_dim=rotary_dim, **settings)] = None
    return tuple(made)


def layer_ropes(config: Any) -> tuple[int | None, ...]:
    """The rotary embedding of each layer of a config of transformers."""
    layers = range(config.num_hidden_layers)
    if getattr(config, "no_rope_layers", None) is not None:
        return tuple(0 if config.no_rope_layers[layer] else None for layer in layers)
    if "full_attention" not in config.rope_parameters or len(ropes(config, 8)) == 1:
        return (0,) * len(layers)
    return tuple(int(config.layer_types[layer] == "sliding_attention") for layer in layers)


def attention_scale(config: Any) -> float | None:
    """The factor of the scores if it is not head_dim**-0.5."""
    if hasattr(config, "query_pre_attn_scalar"):
        return float(config.query_pre_attn_scalar**-0.5)
    return getattr(config, "attention_multiplier", None)


def delta(config: Any) -> DeltaConfig | None:
    """The gated delta rules of a config of transformers."""
    if not hasattr(config, "linear_num_key_heads"):
        return None
    kinds = enumerate(config.layer_types)
    return DeltaConfig(
        layers=tuple(layer for layer, kind in kinds if kind == "linear_attention"),
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        taps=config.linear_conv_kernel_dim,
    )


def expected(config: Any) -> dict[str, Any]:
    """The fields of our config that a config of transformers stands for."""
    ends = config.eos_token_id
    ends = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
    if isinstance(config, (transformers.T5Config, transformers.MT5Config)):
        return {
            "num_layers": config.num_decoder_layers,
            "num_buckets": config.relative_attention_num_buckets,
            "max_distance": config.relative_attention_max_distance,
            "rms_norm_eps": config.layer_norm_epsilon,
            "activation": {"gelu_new": "gelu_tanh"}.get(config.dense_act_fn, config.dense_act_fn),
            "scale_outputs": getattr(config, "scale_decoder_outputs", False),
            "decoder_start_token_id": getattr(config, "decoder_start_token_id", 0),
            "eos_token_ids": ends,
        }
    usual = config.hidden_size // config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or usual
    return {
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "max_position": config.max_position_embeddings,
        "rms_norm_eps": getattr(config, "norm_eps", None) or config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "mlp_bias": getattr(config, "mlp_bias", False),
        "output_bias": getattr(config, "attention_bias", False),
        "layer_windows": windows(config),
        "ropes": ropes(config, head_dim),
        "layer_ropes": layer_ropes(config),
        "attention_scale": attention_scale(config),
        "attention_soft_cap": getattr(config, "attn_logit_softcapping", None),
        "logits_soft_cap": getattr(config, "final_logit_softcapping", None),
        "residual_multiplier": getattr(config, "residual_multiplier", 1.0),
        "logits_divisor": getattr(config, "logits_scaling", 1.0),
        "delta": delta(config),
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": ends,
    }


@pytest.mark.parametrize(("architecture", "kind", "sizes"), CASES)
def test_an_absent_field_has_the_default_of_the_class(
    architecture: str, kind: str, sizes: dict[str, Any]
) -> None:
    made = getattr(transformers, kind)
    whole = {**made(**sizes).to_dict(), "architectures": [architecture]}
    whole.pop("layer_types", None)
    kept = {*sizes, "architectures"}
    for names in ([], *([name] for name in whole), [name for name in whole if name not in kept]):
        left = {name: value for name, value in whole.items() if name not in names}
        if set(names) & REQUIRED:
            with pytest.raises(CheckpointError, match=r"config.json: \w+: expected an integer"):
                read(left)
            continue
        got = vars(read(left))
        theirs = made.from_dict({key: value for key, value in left.items() if key != "dtype"})
        for field, value in expected(theirs).items():
            assert got[field] == value, (names, field)


def test_null_is_not_absent(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "mistral", num_attention_heads=8, **SMALL)
    file = directory / "config.json"
    edit(file, sliding_window=..., num_key_value_heads=..., eos_token_id=...)
    config = read_model_config(directory)
    assert (config.layer_windows, config.num_kv_heads) == ((4096,), 8)
    assert config.eos_token_ids == (2,)
    edit(file, sliding_window=None, num_attention_heads=4, num_key_value_heads=None)
    edit(file, eos_token_id=None)
    config = read_model_config(directory)
    assert (config.layer_windows, config.num_kv_heads, config.eos_token_ids) == ((0,), 4, ())


def test_a_mistral_may_have_windows_in_some_layers(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    directory = write_model(tmp_path, "mistral", num_hidden_layers=2, layer_types=kinds)
    assert read_model_config(directory).layer_windows == (7, 0)
    theirs = transformers.AutoConfig.from_pretrained(directory)
    assert windows(theirs) == (7, 0)
    edit(directory / "config.json", sliding_window=None)
    with pytest.raises(CheckpointError, match="sliding_window: expected a size for its layers"):
        read_model_config(directory)


@pytest.mark.parametrize("both", [{"rope_type": "linear", "factor": 4.0}, {"rope_theta": 5e5}])
def test_rope_scaling_beside_rope_parameters(both: dict[str, Any], tmp_path: Path) -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e6}
    directory = write_model(tmp_path, rope_theta=None, rope_parameters=parameters, **SMALL)
    edit(directory / "config.json", rope_scaling=both)
    theirs = transformers.AutoConfig.from_pretrained(directory).rope_parameters
    with pytest.warns(UserWarning, match="rope_parameters: expected what rope_scaling says"):
        rope = read_model_config(directory).ropes[0]
    assert (rope.type, rope.theta) == (theirs["rope_type"], theirs["rope_theta"])
    assert rope.factor == theirs.get("factor", 1.0)
    edit(directory / "config.json", rope_scaling={})
    assert read_model_config(directory).ropes[0].theta == 1e6


def test_a_field_that_the_type_of_rope_does_not_read_is_named(tmp_path: Path) -> None:
    directory = write_model(tmp_path, rope_scaling={"factor": 4.0}, **SMALL)
    with pytest.warns(UserWarning, match=r"rope_scaling.factor: expected no such field .*default"):
        assert read_model_config(directory).ropes[0].type == "default"


@pytest.mark.parametrize("changes", [{"dense_act_fn": "silu"}, {"is_gated_act": True}])
def test_a_t5_that_contradicts_itself(changes: dict[str, Any], tmp_path: Path) -> None:
    directory = write_t5(tmp_path, "t5")
    edit(directory / "config.json", dense_act_fn="relu", is_gated_act=False)
    read_model_config(directory)
    edit(directory / "config.json", **changes)
    with pytest.raises(CheckpointError, match=f"{next(iter(changes))}: expected"):
        read_model_config(directory)


def test_an_mt5_never_scales_its_outputs(tmp_path: Path) -> None:
    """However tied its config says that it is: transformers writes true for all of them."""
    directory = write_t5(tmp_path, "mt5")
    for tied in (..., True, False):
        edit(directory / "config.json", tie_word_embeddings=tied)
        assert not read_model_config(directory).scale_outputs


# Weights


def test_weights_twice_are_refused(tmp_path: Path) -> None:
    directory = write_model(tmp_path, num_shards=2, **SMALL)
    write_model(tmp_path / "other", seed=1, **SMALL)
    whole = directory / "model.safetensors"
    (tmp_path / "other" / "model.safetensors").rename(whole)
    with pytest.raises(CheckpointError, match=r"expected model.safetensors or .*json, got both"):
        load_model(directory, "cpu")
    tensors = load_file(whole)
    index = {"weight_map": dict.fromkeys(tensors, whole.name)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.warns(UserWarning, match=r"model-00001-of-00002.safetensors: .*not used"):
        loaded = load_model(directory, "cpu")[1]
    assert torch.equal(loaded.weights.embed_tokens.weight, tensors[EMBEDDINGS])


def test_weights_of_another_format_are_named(tmp_path: Path) -> None:
    directory = write_model(tmp_path, **SMALL)
    whole = directory / "model.safetensors"
    other = directory / "consolidated.safetensors"
    save_file({"x": torch.zeros(1)}, other)
    with pytest.warns(
        UserWarning, match="consolidated.safetensors: expected no weights but the model"
    ):
        load_model(directory, "cpu")
    whole.unlink()
    with pytest.raises(ModelNotFoundError, match=r"got neither \(only consolidated.safetensors:"):
        load_model(directory, "cpu")


@pytest.mark.parametrize("family", ["llama_tied", "t5"])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_tied_model_saved_as_its_head(family: str, weights: str | None, tmp_path: Path) -> None:
    llama = family == "llama_tied"
    directory = write_model(tmp_path, family, **SMALL) if llama else write_t5(tmp_path, family)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    before = load_model(directory, "cpu", weights=weights)
    tensors[HEAD] = tensors.pop(EMBEDDINGS if llama else "shared.weight")
    save_file(tensors, file, {"format": "pt"})
    after = load_model(directory, "cpu", weights=weights)
    assert after[0] == before[0]
    for name in ("embed_tokens", "lm_head"):
        got, wanted = (getattr(model[1].weights, name).weight for model in (after, before))
        assert torch.equal(got, wanted), name


# Roles of tokens


def rendered(directory: Path) -> str:
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer is not None
    return tokenizer.apply_chat_template(MESSAGES)


TOKEN = {"content": "</s>", "lstrip": False, "rstrip": False, "normalized": False}
ROLES = "{{ bos_token }}|{{ image_token }}|{{ eos_token }}"


@pytest.mark.parametrize(
    ("settings", "older", "text"),
    [
        ({}, {"bos_token": "<s>", "eos_token": TOKEN}, "<s>||</s>"),
        ({"bos_token": "</s>"}, {"bos_token": "<s>"}, "<s>||"),
        ({"added_tokens_decoder": {}, "bos_token": "</s>"}, {"bos_token": "<s>"}, "</s>||"),
        ({"image_token": "<s>", "add_bos_token": True}, {}, "|<s>|"),
        ({"extra_special_tokens": {"image_token": "<s>"}}, {}, "|<s>|"),
        ({}, {"image_token": "<s>"}, "|<s>|"),
    ],
)
def test_roles_are_where_transformers_finds_them(
    settings: dict[str, Any], older: dict[str, Any], text: str, tmp_path: Path
) -> None:
    directory = write_model(tmp_path, **SMALL)
    usual = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": ROLES}
    (directory / "tokenizer_config.json").write_text(json.dumps({**usual, **settings}))
    (directory / "special_tokens_map.json").write_text(json.dumps(older))
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    assert theirs.apply_chat_template(MESSAGES, tokenize=False) == text
    assert rendered(directory) == text
