"""Files that cannot be read: one error that names the file and the field, before any work."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_quantised_load import CASES, SIZES

import tiny_families
from eecore.config import ModelConfig
from eecore.errors import ModelError
from eecore.models import LlamaWeights, load_model
from eecore.models.weights import NewWeights
from looped_models import write_looped, write_nanbeige
from quantised_models import write_quantised
from tiny_families import write_family, write_family_gguf
from tiny_gguf import ALPHABET, SPECIAL, write_gguf
from tiny_models import write_model
from tiny_t5 import write_t5

Tensors = dict[str, torch.Tensor]
Change = dict[str, Any] | Callable[[Path], object]
"""Fields of config.json, or of a GGUF file; or what is done to a directory."""


class Raw(str):
    """JSON text that is written as it is."""


def edit(path: Path, **changes: Any) -> None:
    """Set fields of a JSON file to what JSON can say, or to a text as it is; ``...`` is none."""
    values = json.loads(path.read_text()) | changes
    raw = {name: value for name, value in values.items() if isinstance(value, Raw)}
    values |= {name: f"raw {name}" for name in raw}
    text = json.dumps({name: value for name, value in values.items() if value is not ...})
    for name, value in raw.items():
        text = text.replace(f'"raw {name}"', value)
    path.write_text(text)


def file(name: str, content: Any) -> Change:
    """A file of this content, a text or JSON."""
    text = content if isinstance(content, str) else json.dumps(content)
    return lambda directory: (directory / name).write_text(text)


def quantisation(changes: dict[str, Any]) -> Change:
    """Fields of ``quantization_config``."""

    def change(directory: Path) -> None:
        fields = json.loads((directory / "config.json").read_text())["quantization_config"]
        edit(directory / "config.json", quantization_config={**fields, **changes})

    return change


def groups(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def tensors(change: Callable[[Tensors], Tensors]) -> Change:
    """Other tensors."""

    def changed(directory: Path) -> None:
        path = directory / "model.safetensors"
        save_file(change(load_file(path)), path)

    return changed


def of_layer(**parts: Any) -> Change:
    """Other parts of the quantised queries of the first layer; None removes one."""
    new = {f"model.layers.0.self_attn.q_proj.{part}": value for part, value in parts.items()}
    return tensors(lambda old: {n: v for n, v in (old | new).items() if v is not None})


def header(changes: dict[str, Any]) -> Change:
    """Fields of a tensor in the header of the weights."""

    def change(directory: Path) -> None:
        path = directory / "model.safetensors"
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        fields = json.loads(content[8 : 8 + size])
        fields["model.norm.weight"] |= changes
        packed = json.dumps(fields).encode()
        path.write_bytes(len(packed).to_bytes(8, "little") + packed + content[8 + size :])

    return change


def bytes_of(change: Callable[[bytes], bytes]) -> Change:
    """Other bytes of the weights."""

    def changed(directory: Path) -> None:
        path = directory / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return changed


def index(weight_map: Any) -> Change:
    return file("model.safetensors.index.json", {"weight_map": weight_map})


def tokenizer(parts: dict[str, Any]) -> Change:
    """Other parts of tokenizer.json."""

    def change(directory: Path) -> None:
        path = directory / "tokenizer.json"
        whole = json.loads(path.read_text())
        if "model" in parts:
            parts["model"] = {**whole["model"], **parts["model"]}
        path.write_text(json.dumps({**whole, **parts}))

    return change


def template(name: str) -> dict[str, Any]:
    """A post-processor that puts a special token before a text, which the file does not have."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single = [{"SpecialToken": {"id": name, "type_id": 0}}, text]
    pair = [text, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {}}


def replacing(count: int) -> list[dict[str, Any]]:
    """A normalizer of so many doublings of a letter."""
    return [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * count


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
I32 = torch.int32
ACTIVATIONS = {"group_0": {"weights": {}, "input_activations": {"num_bits": 8}}}
TOKENS = [*ALPHABET[:254], "ll", "he", *SPECIAL]
DOWN = "model.layers.0.mlp.down_proj.weight"
WHOLE = "expected a whole safetensors file"

NANBEIGE_SWITCHES = {
    **dict.fromkeys(
        "attention_bias mlp_bias qk_layernorm skip_loop_final_norm enable_double_loop_split "
        "loop_share_kv ngram_insert_all_layers enable_hyper_connection enable_mhc "
        "enable_h_res_identity enable_depth_attention".split(),
        True,
    ),
    "emb_neighbor_num": 3,
    "insert_ngram_layer_idx": [0],
    "loop_loss_weights": [0.5],
    "loop_middle_layers": 2,
}
REFUSED: dict[str, list[tuple[Change, str]]] = {
    "llama": [
        ({"num_hidden_layers": 10**9},
         r"num_hidden_layers: expected an integer of 1\.\.4096, got 100"),
        ({"num_hidden_layers": 4096},
         r"expected tensors of num_layers=4096 layers, got 39 tensors"),
        ({"num_hidden_layers": Raw("9" * 5000)}, "expected JSON, got: an integer of 5000 digits"),
        ({"num_hidden_layers": 4.0}, r"num_hidden_layers: expected an integer of .*, got 4\.0"),
        ({"hidden_size": -64}, r"hidden_size: expected .*, got -64"),
        ({"hidden_size": 2**63}, r"hidden_size: expected .*, got 9223372036854775808"),
        ({"hidden_size": 10**200}, r"hidden_size: expected an integer of 1\.\.1048576, got 100"),
        ({"hidden_size": [64]}, r"hidden_size: expected .*, got \[64\]"),
        ({"vocab_size": 1}, "vocab_size: expected"),
        ({"vocab_size": 2**30},
         r"weight: expected \[1073741824, 64\] as config.json says, got \[320"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected"),
        ({"num_key_value_heads": 0}, r"num_key_value_heads: expected an integer of 1\.\.4, got 0"),
        ({"num_key_value_heads": 3}, "num_kv_heads: expected a divisor of num_q_heads=4, got 3"),
        ({"head_dim": 12}, "head_dim: supported are multiples of 8 up to 256, got 12"),
        ({"head_dim": 32},
         r"q_proj.weight: expected \[128, 64\] as config.json says, got \[256, 64\]"),
        ({"head_dim": None, "hidden_size": 4},
         "head_dim: supported are multiples of 8 up to 256, got"),
        ({"max_position_embeddings": 0}, "max_position_embeddings: expected"),
        ({"rms_norm_eps": math.nan}, r"rms_norm_eps: expected a number of 0\.\.1, got nan"),
        ({"rms_norm_eps": Raw("1e999")}, r"rms_norm_eps: expected a number of 0\.\.1, got inf"),
        ({"rms_norm_eps": "1e-6"}, r"rms_norm_eps: expected a number of 0\.\.1, got '1e-6'"),
        ({"rope_theta": 0}, "rope_theta: expected a number of 1"),
        ({"rope_theta": 1, "rope_scaling": YARN},
         "rope.theta: expected more than 1 for yarn, got 1"),
        ({"rope_scaling": [YARN]}, "rope_scaling: expected an object, got"),
        ({"rope_scaling": YARN | {"factor": -4}}, "rope_scaling.factor: expected"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 2**31 - 1}},
         "max_position: exp"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 0}},
         "original_max_position_em"),
        ({"rope_scaling": YARN | {"beta_slow": 64}},
         r"beta_slow: expected at most beta_fast=32.0, go"),
        ({"rope_scaling": YARN | {"mscale": -10, "mscale_all_dim": -10}}, "mscale: expected"),
        ({"rope_scaling": YARN | {"truncate": "no"}}, "truncate: expected true or false, got 'no'"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "low_freq_factor: expected less than"),
        ({"eos_token_id": [257, -1]}, "eos_token_id: expected a list of integers of 0"),
        ({"eos_token_id": 2**63}, "eos_token_id: expected an integer of 0"),
        ({"eos_token_id": [257] * 2000}, "eos_token_id: expected a list of at most 1024 integers"),
        ({"bos_token_id": "<s>"}, "bos_token_id: expected an integer"),
        ({"architectures": "LlamaForCausalLM"},
         "architectures: expected a list of strings, got 'Lla"),
        ({"architectures": ["x" * 10**5]}, r"architectures: supported are .*xxx.*\.\.\."),
        ({"architectures": None, "model_type": 7}, "model_type: expected a string, got 7"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, got 1"),
        ({"attention_bias": "yes"}, "attention_bias: expected true or false, got 'yes'"),
        ({"quantization_config": []}, r"quantization_config: expected an object, got \[\]"),
        ({"x": Raw("[" * 10**5 + "]" * 10**5)}, "expected JSON, got brackets nested too deeply"),
        ({"x": Raw('1, "hidden_size": 64')}, "expected JSON, got: the field 'hidden_size' twice"),
        ({"architectures": ["GPT2LMHeadModel"]}, r"Llama.*, .*GPT2"),
        ({"architectures": ..., "model_type": "gpt2"}, r"got 'gpt2'"),
        ({"hidden_act": "gelu"}, r"hidden_act: supported are silu, .*got 'ge"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"got 'fp8'"),
        ({"hidden_size": True}, r"hidden_size: expected an int.*, got True"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor: .*1, got"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}},
         r"rope_scaling.rope_type: supported are default, .*longrope, got 'dynamic'"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}},
         r"rope_parameters: supported are one set for all layers"),
        ({"rope_scaling": {"type": "linear"}},
         r"rope_scaling.factor: expected a number of 1.*, got None"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}},
         r"rope_scaling.factor: expected a number of 1.*, got 0.5"),
        ({"model_type": "mistral"}, "model_type: supported are that of LlamaForCausalLM, got 'mis"),
        ({"per_layer_config": {"0": {}}}, "per_layer_config: supported are one for all layers"),
        (file("generation_config.json", "[]"),
         r"generation_config.json: expected a JSON object, got \[\]"),
        (file("generation_config.json", '{"eos_token_id": {}}'),
         "generation_config.json: eos_token_id: expected"),
        (file("generation_config.json", '{"eos_token_id": [1e3]}'),
         "generation_config.json: eos_token_id: expected"),
        (file("generation_config.json", '{"bos_token_id": 99999999999}'),
         "generation_config.json: bos_token_id: expected"),
        (file("generation_config.json", ""), "generation_config.json: expected JSON"),
        (file("generation_config.json", "{}" + " " * (5 << 20)),
         "generation_config.json: expected at most 4194304 bytes, got 52"),
        (file("generation_config.json", {"temperature": -1}), r"temperature: expected"),
        (file("generation_config.json", {"top_p": 2.0}), r"top_p: expected"),
        (file("generation_config.json", {"do_sample": "yes"}),
         r"do_sample: expected true or false, got 'yes'"),
        (file("generation_config.json", {"do_sample": False, "min_p": True}), r"min_p: expected"),
        (header({"dtype": "F7"}), r"model\.safetensors"),
        (header({"dtype": "I64"}), r"model\.safetensors"),
        (header({"shape": [2**62, 2**62]}), r"model\.safetensors"),
        (header({"shape": [64.0]}), r"model\.safetensors"),
        (header({"data_offsets": [0, 256]}), r"model\.safetensors"),
        (header({"data_offsets": [2**63, 2**63 + 256]}), r"model\.safetensors"),
        (tokenizer({"post_processor": template("<x>")}),
         "expected '<x>' among its special_tokens, got none"),
        (tokenizer({"normalizer": {"type": "Sequence", "normalizers": replacing(9)}}),
         "normalizer: .* grow"),
        (tokenizer({"decoder": {"type": "Sequence", "decoders": replacing(9)}}),
         "decoder: .* grow"),
        (tokenizer({"normalizer": {**replacing(1)[0], "pattern": {"Regex": ""},
                                   "content": "a" * 9999}}), "got 10000"),
        (tokenizer({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////fwAA"}}),
         "precompiled_charsmap: expected a trie of 2147483647 bytes, got 2"),
        (tokenizer({"model": {"type": "Unknown"}}), "expected a tokenizer, got"),
        (tokenizer({"model": {"merges": [["a", "nothing"]]}}), "out of vocabulary"),
        (tokenizer({"model": {"vocab": 5}}), "expected a tokenizer, got"),
        (bytes_of(lambda whole: whole[:4]), WHOLE),
        (bytes_of(lambda whole: whole[:100]), WHOLE),
        (bytes_of(lambda whole: whole[: len(whole) * 999 // 1000]), WHOLE),
        *((bytes_of(lambda whole, size=size: size.to_bytes(8, "little") + whole[8:]), WHOLE)
          for size in (0, 7, 2**20, 2**40, 2**63, 2**64 - 1)),
        (index(None), "weight_map: expected an object of tensor to file, got nothing"),
        (index({"x": "../../etc/passwd"}), r"x: expected a file's name, got '\.\./"),
        (index({"x": "gone.safetensors"}), r"gone\.safetensors: expected a file"),
        (index({"x": "model.safetensors"}), r"expected tensor x as model.*, got none"),
        *((index({"model.norm.weight": value}), r"model\.norm\.weight: expected a string, got")
          for value in (None, 7, ["model.safetensors"], {})),
        *((index({"model.norm.weight": shard}), "expected a file")
          for shard in ("..", ".", "", "a\0b", "./model.safetensors", "a" * 300)),
        (tensors(lambda _: {}), r"model\.safetensors: expected tensors, got none"),
        (tensors(lambda old: {n: v for n, v in old.items() if "2.mlp.up_proj" not in n}),
         r"expected 39 tensors, model\.layers\.2\.mlp\.up_proj\.weight missing"),
        ({"num_hidden_layers": 6}, r"expected 57 tensors, model\.layers\.4.* and 15 more missing"),
        ({"intermediate_size": 128}, r"gate_proj.weight: expected \[128, 64\] .*, got \[96, 64\]"),
        (tensors(lambda old: old | {DOWN: torch.zeros(64, 96, dtype=I32)}),
         "down_proj.weight: supported are F32, BF16, F16, got I32"),
        (tensors(lambda old: old | {"model.layers.1.self_attn.q_proj.bias": torch.zeros(256)}),
         r"config\.json knows no model\.layers\.1\.self_attn\.q_proj\.bias"),
        (tensors(lambda old: old | {"model.layers.0.\x1b[3m" + "x" * 999: torch.ones(1)}),
         "knows no"),
        (lambda directory: (directory / "config.json").unlink(), "a directory without config.json"),
        (lambda directory: (directory / "model.safetensors").unlink(), "index.json, got neither$"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
         r"got neither \(only pytorch_model.bin: convert it"),
        (file("config.json", '{"hidden_size": 64,'), r"config\.json: expected JSON, got: .*line 1"),
        (file("config.json", [1, 2]), r"config\.json: expected a JSON object, got \[1, 2\]"),
        (lambda directory: (directory / "config.json").write_bytes(b"\xff\xfe"),
         r"config\.json: expected JSON, got: 'utf-8'"),
        (file("adapter_config.json", {}), r"got an adapter \(adapter_config.json\): merge it"),
        (file("tokenizer.json", ""), "expected a tokenizer, got"),
        (file("tokenizer.json", "[" * 100_000), "expected a tokenizer, got"),
        (file("tokenizer.json", None), "expected a tokenizer, got"),
        (file("tokenizer_config.json", []), r"zer_config\.json: expected a JSON object, got \[\]"),
        (file("tokenizer_config.json", {"bos_token": 5}), "bos_token: expected a string, got 5"),
        (file("special_tokens_map.json", {"bos_token": 5}), "bos_token: expected a st"),
        *((file("tokenizer_config.json", {"chat_template": value}), r"chat_template\S*: expected")
          for value in (5, True, [5], [{"name": "default"}], {"default": 5}, [{"name": 5}], [[]])),
    ],
    "gemma3": [
        ({"rope_parameters": {"rope_type": "default"}}, "one set for each of full_att"),
        ({"use_bidirectional_attention": True}, "supported are false, a causal model"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected a list of 4 kinds"),
        ({"sliding_window": None}, "sliding_window: expected a size for its layers"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]},
         "text_config: expected the config of the text part, got None"),
    ],
    "gemma2": [
        ({"hidden_activation": "gelu"}, "supported are silu, swish, gelu_pytorch_tanh"),
        ({"final_logit_softcapping": 0}, "expected a number above 0"),
    ],
    "smollm3": [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers: expected a list of 4 numbers"),
    ],
    "granite4": [
        ({"num_local_experts": 8}, "0, a dense model .*MoE.*, got 8"),
        ({"layer_types": ...}, r"hybrid layers \(Mamba\).*dense Granite 4.*'mamba'"),
        ({"position_embedding_type": "alibi"}, "supported are rope, nope, got 'alibi'"),
    ],
    "phi3": [
        ({"rope_parameters": {"rope_type": "longrope"}}, "short_factor: expected a list"),
        ({"rope_parameters": {"rope_type": "su", "short_factor": [1], "long_factor": [1]}},
         "short_factor: expected 8 numbers, one a pair of dimensions, got 1"),
        ({"partial_rotary_factor": 1.5, "rope_parameters": {}}, "partial_rotary_factor"),
    ],
    "olmo2": [
        ({"rope_parameters": {"rope_type": "spiral"}}, "yarn, longrope, got 'spiral'"),
        ({"architectures": ["Gemma3nForCausalLM"]}, "shared keys and values; .*Gemma 3"),
        ({"architectures": ["OlmoeForCausalLM"]}, r"\(MoE\); .* is Olmo2ForCausalLM"),
        ({"architectures": ["Qwen2_5_VLForX"]}, r"images \(mRoPE\); .* is Qwen3ForCau"),
        ({"architectures": ["NewMoeForCausalLM"]}, r"\(MoE\); dense models run"),
    ],
    "ouro": [
        ({"total_ut_steps": 0}, "total_ut_steps: expected an integer of 1..64, got 0"),
        ({"total_ut_steps": "4"}, "total_ut_steps: expected an integer of 1..64, got '4'"),
        ({"early_exit_threshold": 1.5},
         r"early_exit_threshold: expected a number of 0..1, got 1.5"),
        ({"num_hidden_layers": 1000, "total_ut_steps": 64},
         "total_ut_steps: expected at most 4096 layers in all loops, got 64"),
        ({"architectures": ["HrmTextForCausalLM"]}, "two streams; .* is OuroForCausalLM"),
    ],
    "nanbeige": [
        ({"num_loops": ...}, r"num_loops: expected an integer of 1\.\.64, got None"),
        ({"num_hidden_layers": 1000, "num_loops": 64},
         "num_loops: expected at most 4096 layers in all loops, got 64"),
        *(({name: value}, f"/config.json: {name}: supported are models without it, got ")
          for name, value in NANBEIGE_SWITCHES.items()),
    ],
    "t5": [
        ({"num_layers": 10**9}, r"num_layers: expected an integer of 1\.\.4096"),
        ({"num_layers": 4000}, "expected tensors of num_encoder_layers=4000 layers"),
        ({"num_decoder_layers": 4000}, "expected tensors of num_layers=4000 layers"),
        ({"num_decoder_layers": 0}, "num_decoder_layers: expected"),
        ({"quantization_config": {"quant_method": "gptq"}}, "T5 models in floats, got 'gptq'"),
        ({"d_kv": 10}, "d_kv: supported are multiples of 8 up to 256, got 10"),
        ({"layer_norm_epsilon": -1}, "layer_norm_epsilon: expected"),
        ({"relative_attention_num_buckets": 10**9}, "relative_attention_num_buckets: expected"),
        ({"relative_attention_max_distance": 2**40}, "relative_attention_max_distance: expected"),
        ({"feed_forward_proj": ["relu"]}, "feed_forward_proj: expected a string"),
        ({"eos_token_id": 1.5}, "eos_token_id: expected an integer"),
        ({"feed_forward_proj": "gated-relu"}, "feed_forward_proj: supported are relu, gated-gelu"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder: supported are true, got False"),
        ({"architectures": ["T5EncoderModel"]}, "architectures: supported are .*T5EncoderModel"),
        ({"num_heads": 0}, "num_heads: expected an integer of 1.*, got 0"),
        ({"relative_attention_num_buckets": 6}, "num_buckets: expected a multiple of 4"),
        ({"relative_attention_max_distance": 16},
         "attention_max_distance: expected an integer of 17"),
        ({"decoder_start_token_id": 320}, "decoder_start_token_id: expected an integer of 0..319"),
        ({"d_kv": 32}, r"SelfAttention.q.weight: expected \[128, 64\] as config.json says"),
    ],
    "gptq": [
        (quantisation({"bits": 3}), r"quantization_config\.bits: supported are 4 and 8, got 3"),
        (quantisation({"bits": None}), r"bits: supported are 4 and 8, got None"),
        (quantisation({"quant_method": "bitsandbytes"}),
         r"supported are gptq, awq, .*, got 'bitsandbytes'"),
        (quantisation({"quant_method": None}), r"quant_method: supported are gptq, .*, got 'none'"),
        (quantisation({"checkpoint_format": "marlin"}),
         r"supported are gptq, gptq_v2, got 'marlin'"),
        (quantisation({"group_size": 80}), r"groups that fill 192 columns, got groups of 80"),
        (quantisation({"group_size": 0}), r"group_size: expected -1 or 1 and more, got 0"),
        (quantisation({"group_size": -2}),
         r"group_size: expected an integer of -1\.\.1048576, got -2"),
        (of_layer(qzeros=None), r"expected tensor .*q_proj\.qzeros, I32 \[4, 32\], got none"),
        (of_layer(qweight=None), r"expected tensor .*q_proj\.qweight, I32 .*, got none"),
        (of_layer(qweight=torch.zeros(16, 255, dtype=I32)), r"\[16, 256\], got I32 \[16, 255\]"),
        (of_layer(qzeros=torch.zeros(4, 31, dtype=I32)), r"qzeros: .*, got I32 \[4, 31\]"),
        (of_layer(g_idx=torch.full((128,), 4, dtype=I32)), r"groups of 0\.\.3, got 4\.\.4"),
        (of_layer(g_idx=torch.zeros(127, dtype=I32)), r"g_idx: .*\[128\], got I32 \[127\]"),
        (of_layer(weight=torch.zeros(256, 128)), r"weight: expected none beside qweight"),
    ],
    "awq": [
        (quantisation({"bits": 8}), r"bits: supported are 4, got 8"),
        (quantisation({"version": "gemv"}), r"version: supported are gemm, got 'gemv'"),
        (quantisation({"version": None, "checkpoint_format": "gemv_fast"}),
         r"version: .*got 'gemv_fast'"),
        (quantisation({"backend": "llm-awq"}), r"backend: supported are the layout of autoawq"),
        (quantisation({"zero_point": False}), r"zero_point: supported are true, got False"),
        (of_layer(qzeros=None), r"expected tensor .*q_proj\.qzeros, I32 \[4, 32\], got none"),
        (of_layer(qweight=torch.zeros(128, 31, dtype=I32)), r"\[128, 32\], got I32 \[128, 31\]"),
    ],
    "packed": [
        (quantisation({"config_groups": ACTIVATIONS}),
         r"group_0\.input_activations: .*weights alone"),
        (quantisation({"config_groups": {}}), r"config_groups: expected 1 to 64 groups, got 0"),
        (quantisation({"config_groups": {"W4A16": ["Linear"]}}), r"W4A16: expected an object"),
        (quantisation(groups(num_bits=2)), r"weights\.num_bits: supported are 4 and 8, got 2"),
        (quantisation(groups(num_bits=8, type="float")), r"type: supported are int, got 'float'"),
        (quantisation(groups(num_bits=4, strategy="block")),
         r"strategy: supported are group, .*'block'"),
        (quantisation(groups(num_bits=4, strategy="group")),
         r"group_size: .*strategy group, got None"),
        (quantisation({"format": "float-quantized"}),
         r"format: supported are pack-.*'float-quantized'"),
        (quantisation({"quantization_status": "frozen"}),
         r"supported are compressed, got 'frozen'"),
        (quantisation({"kv_cache_scheme": {"num_bits": 8}}),
         r"kv_cache_scheme: supported are null"),
        (quantisation({"sparsity_config": {"format": "sparse-24-bitmask"}}),
         r"format: supported .*dense"),
        (quantisation({"transform_config": {"config_groups": {}}}),
         r"transform_config: supported are non"),
        (of_layer(weight_scale=None), r"q_proj\.weight_scale, .*, got none"),
        (of_layer(weight_packed=None), r"q_proj\.weight_packed, I32 .*, got none"),
        (of_layer(weight_shape=torch.tensor([256, 129])), r"weight_shape: .*\[256, 129\]"),
        (of_layer(weight=torch.zeros(256, 128)), r"weight: expected none beside weight_pac"),
        (of_layer(weight_g_idx=torch.full((128,), 9, dtype=I32)), r"0\.\.3, got 9\.\.9"),
    ],
    "plain_rows": [
        (quantisation(groups(num_bits=4, strategy="channel")), r"num_bits: supported are 8, got 4"),
        (of_layer(weight=torch.zeros(256, 128)), r"weight: expected I8 .*, got F32"),
        (of_layer(weight_scale=torch.ones(256, 2)), r"\[256, 1\], got F32 \[256, 2\]"),
    ],
    "gptq_act_order": [
        (of_layer(g_idx=None), r"expected tensor .*q_proj\.g_idx, .*, got none"),
    ],
    "packed_asymmetric": [
        (of_layer(weight_zero_point=None), r"weight_zero_point.*got none"),
        (of_layer(weight_zero_point=torch.zeros(1, 4, dtype=I32)), r"\[32, 4\]"),
        (of_layer(weight_zero_point=torch.full((256, 4), 8).to(torch.int8)),
         r"numbers of -8\.\.7, got 8\.\.8"),
    ],
    "llama.gguf": [
        ({"llama.block_count": 10**9}, "llama.block_count: expected an integer of 1"),
        ({"llama.block_count": 5}, "expected 48 tensors, .* and 6 more missing"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count: expected"),
        ({"llama.attention.head_count_kv": [2, 2, 2, 2]}, "head_count_kv: expected an integer"),
        ({"llama.embedding_length": 2**31}, "llama.embedding_length: expected"),
        ({"llama.attention.key_length": 7}, "head_dim: supported are multiples of 8"),
        ({"llama.attention.key_length": 32}, "q_proj.weight: expected"),
        ({"llama.rope.dimension_count": 2}, "rope.dimension_count: expected head_dim=64, got 2"),
        ({"llama.rope.scaling.type": "yarn2"}, "rope.scaling.type: supported are none"),
        ({"llama.expert_count": "none"}, "llama.expert_count: expected an integer"),
        ({"tokenizer.ggml.tokens": TOKENS * 2}, "ggml.tokens: expected a list of at most 320 str"),
        ({"tokenizer.ggml.tokens": "x"}, "tokenizer.ggml.tokens: expected a list of strings"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type: expected 260, one a token, got 1"),
        ({"tokenizer.ggml.merges": ["h"]}, "tokenizer.ggml.merges: expected pairs with a space"),
        ({"tokenizer.ggml.merges": ["x y"]}, "tokenizer.ggml: .*"),
        ({"tokenizer.ggml.bos_token_id": 260}, "bos_token_id: expected an integer of 0..259"),
        ({"tokenizer.ggml.eot_token_id": 2**32 - 1}, "eot_token_id: expected an integer"),
        ({"tokenizer.ggml.add_bos_token": "yes"}, "add_bos_token: expected true or false"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores: expected a list of numbers"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0, 1.0]},
         "tokenizer.ggml.scores: expected 260, one a token, got 2"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [float("nan")] * 260},
         "tokenizer.ggml.scores: expected a list of numbers"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0] * 260,
          "tokenizer.ggml.unknown_token_id": 10**6},
         "unknown_token_id: expected an integer of 0..259"),
        ({"llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 2.0},
         "scale_linear: expected what rope"),
        ({"llama.rope.scaling.factor": 0.5},
         "rope.scaling.factor: expected 0, or a number of at least"),
        ({"llama.rope.scaling.attn_factor": 1.5},
         "scaling.attn_factor: supported is 1 without yarn, got"),
        ({"llama.rope.freq_base_swa": 1e4},
         "llama.rope.freq_base_swa: supported are models without it"),
        ({"llama.rope.dimension_sections": [8, 8]}, "llama.rope.dimension_sections: supported are"),
        ({"llama.attention.causal": False}, "attention.causal: supported is true, got False"),
        ({"llama.attention.clamp_kqv": 8.0},
         "llama.attention.clamp_kqv: supported are models without"),
        ({"general.type": "adapter"}, "general.type: supported is model, got adapter"),
    ],
    "gemma3.gguf": [
        ({"attention.sliding_window_pattern": [True]}, "expected 4 flags, one a layer"),
        ({"attention.shared_kv_layers": 2}, "supported are models without it, got 2"),
    ],
    "granite.gguf": [
        ({"rope.scaling.finetuned": False}, "supported is true, which rotates"),
        ({"logit_scale": None}, "granite.logit_scale: expected a number of 0..1e.06, got"),
    ],
    "ministral3.gguf": [
        ({"attention.temperature_length": 7}, "expected the original context len"),
    ],
    "phi3.gguf": [
        ({"rope.dimension_count": 9}, "rope.dimension_count: expected head_dim=16, got 9"),
        ({"rope.dimension_count": 8}, r"rope_factors_short.weight: expected \[4\], got \[6\]"),
    ],
    "gemma2.gguf": [
        ({"attention.head_count": None}, "attention.head_count: expected an integer"),
    ],
    "olmo2.gguf": [
        ({"attention.layer_norm_rms_epsilon": None}, "epsilon: expected a number of 0..1"),
    ],
    "smollm3.gguf": [
        ({"attention.sliding_window": 9}, "expected full attention, got a sliding wind"),
    ],
}  # fmt: skip


class Originals:
    """Directories of models, each written once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._quantised = write_model(folder / "quantised", **SIZES)

    def copy(self, kind: str, target: Path) -> Path:
        """A copy of the model of a kind."""
        place = self._folder / kind
        if not place.exists():
            self._write(kind, place)
        return Path(shutil.copytree(place, target))

    def _write(self, kind: str, place: Path) -> None:
        if kind in CASES:
            write_quantised(self._quantised, place, CASES[kind][0])
        elif kind in tiny_families.FAMILIES:
            write_family(place, kind)
        else:
            others = {"t5": write_t5, "ouro": write_looped, "nanbeige": write_nanbeige}
            others.get(kind, write_model)(place)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Originals:
    return Originals(tmp_path_factory.mktemp("originals"))


def nothing_allocated(empty: Callable[..., LlamaWeights]) -> Callable[..., LlamaWeights]:
    """Weights that may only be named, not allocated."""

    def named(config: ModelConfig, new: NewWeights) -> LlamaWeights:
        assert new.device == "meta", "weights were allocated before the checkpoint was checked"
        return empty(config, new)

    return named


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        pytest.param(kind, *row, id=f"{kind}-{number}")
        for kind, rows in REFUSED.items()
        for number, row in enumerate(rows)
    ],
)
def test_a_file_that_cannot_be_is_named(
    kind: str,
    change: Change,
    message: str,
    originals: Originals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = originals.copy(kind.removesuffix(".gguf"), tmp_path / "model")
    if isinstance(change, dict):
        monkeypatch.setattr(LlamaWeights, "empty", nothing_allocated(LlamaWeights.empty))
    if kind == "llama.gguf":
        assert isinstance(change, dict)
        place = write_gguf(tmp_path / "t.gguf", place, metadata=change)
    elif kind.endswith(".gguf"):
        assert isinstance(change, dict)
        kind = kind.removesuffix(".gguf")
        place = write_family_gguf(tmp_path / "t.gguf", place, kind, change)
    elif isinstance(change, dict):
        edit(place / "config.json", **change)
    else:
        change(place)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(place, "cpu")
    said = str(caught.value)
    assert str(tmp_path) in said
    assert len(said) < 1000
    assert not {"\n", "\x1b"} & set(said)
