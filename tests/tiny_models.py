"""Small random model directories in Hugging Face layout, one per family and setting.

Written without transformers, so that a test pays only for the model that it needs. Weights are
large enough that logits spread and every layer matters; the same arguments give the same bytes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BASE: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "torch_dtype": "float32",
}

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

CHAT_TEMPLATE = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# The fields of config.json that differ from BASE.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama_tied": {**LLAMA, "tie_word_embeddings": True},
    "llama_no_gqa": {**LLAMA, "num_key_value_heads": 4},
    "llama_one_kv_head": {**LLAMA, "num_key_value_heads": 1},
    "llama_biased": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama3": {**LLAMA, "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
    "llama_linear_rope": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_rope_parameters": {
        **LLAMA,
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "torch_dtype": None,
        "dtype": "float32",
    },
    "smollm2": {
        **LLAMA,
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "mistral": {**MISTRAL, "sliding_window": 7},
    "qwen2": QWEN2,
    "qwen2_yarn": {**QWEN2, "rope_scaling": YARN},
    "qwen2_windows": {
        **QWEN2,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "qwen3": {**QWEN3, "head_dim": 128, "tie_word_embeddings": True},
}


def shape(num_layers: int, hidden_size: int) -> Any:
    """The fields of a config without loops that an exit policy reads."""
    return SimpleNamespace(
        architecture="LlamaForCausalLM",
        hidden_size=hidden_size,
        exit_layers=range(1, num_layers + 1),
        num_loops=1,
        gate_threshold=None,
    )


def write_model(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    num_shards: int = 1,
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write a random model of the family into the directory, which is returned.

    ``overrides`` are fields of config.json; ``num_shards`` above 1 writes that many files and
    an index.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = {**BASE, **FAMILIES[family], **overrides}
    config = {name: value for name, value in config.items() if value is not None}
    key = "dtype" if "dtype" in config else "torch_dtype"
    config[key] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors(config, seed).items()}
    _write_shards(directory, tensors, num_shards)
    if tokenizer:
        write_byte_tokenizer(directory)
    return directory


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of the config, float32, named as transformers names them."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    qwen2, qwen3 = config["model_type"] == "qwen2", config["model_type"] == "qwen3"
    attention_bias = config.get("attention_bias", False)

    tensors: dict[str, torch.Tensor] = {}

    def linear(name: str, rows: int, columns: int, *, gain: float, bias: bool = False) -> None:
        weight = torch.randn(rows, columns, generator=generator)
        tensors[f"{name}.weight"] = weight * (gain / math.sqrt(columns))
        if bias:
            tensors[f"{name}.bias"] = 0.3 * torch.randn(rows, generator=generator)

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)

    linear("model.embed_tokens", config["vocab_size"], hidden, gain=3)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norm(f"{prefix}.input_layernorm", hidden)
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            bias = attention_bias or qwen2
            linear(f"{prefix}.self_attn.{name}_proj", size, hidden, gain=1.2, bias=bias)
        linear(f"{prefix}.self_attn.o_proj", hidden, q_size, gain=0.7, bias=attention_bias)
        if qwen3:
            norm(f"{prefix}.self_attn.q_norm", head_dim)
            norm(f"{prefix}.self_attn.k_norm", head_dim)
        norm(f"{prefix}.post_attention_layernorm", hidden)
        mlp_bias = config.get("mlp_bias", False)
        linear(f"{prefix}.mlp.gate_proj", inner, hidden, gain=1, bias=mlp_bias)
        linear(f"{prefix}.mlp.up_proj", inner, hidden, gain=1, bias=mlp_bias)
        linear(f"{prefix}.mlp.down_proj", hidden, inner, gain=1, bias=mlp_bias)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        linear("lm_head", config["vocab_size"], hidden, gain=3)
    return tensors


def scale_layers(directory: Path, factors: dict[int, float]) -> Path:
    """Multiply what a layer adds to the residual stream, both sublayers, by a factor.

    With small factors in the deeper layers the shallow ones mostly agree with the whole model.
    """
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for layer, factor in factors.items():
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.{layer}.{name}.weight"] *= factor
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


def random_prompts(*lengths: int, seed: int = 0, vocab_size: int = 256) -> list[list[int]]:
    """Prompts of random token ids (bytes, with the byte tokenizer)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


def write_byte_tokenizer(directory: Path) -> None:
    """A tokenizer of 256 bytes, <s>, </s> and two chat marks, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _write_shards(directory: Path, tensors: dict[str, torch.Tensor], num_shards: int) -> None:
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        held = names[shard::num_shards]
        save_file({name: tensors[name] for name in held}, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
