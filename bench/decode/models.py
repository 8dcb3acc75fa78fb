"""The models of the comparison of engines, and their weights in the format of each engine.

python -m bench.decode.models gguf DIRECTORY FILE '{"": "q8_0"}'    in the environment of the peers
python -m bench.decode.models ctranslate2 DIRECTORY TARGET          in the environment of the peers

The weights are the same in all formats, up to the rounding of formats with fewer bits.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANDOM_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1184,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
"""56 million parameters, the embeddings counted once."""


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a Llama checkpoint with tied embeddings, by name."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        for name, shape in layer.items():
            shapes[f"model.layers.{index}.{name}.weight"] = shape
    return shapes


def make_random_llama(directory: Path, **changes: Any) -> Path:
    """A model directory with a seeded random Llama and no tokenizer, made once."""
    import torch
    from safetensors.torch import save_file

    if (directory / "config.json").is_file():
        return directory
    config = {**RANDOM_LLAMA, **changes}
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in weight_shapes(config).items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return directory


# llama.cpp


def make_gguf(directory: Path, file: Path, kinds: str) -> None:
    """Write a model as a GGUF file; norms in float32.

    Args:
        directory: the model's directory.
        file: the file to write.
        kinds: JSON of the matrices' GGUF types, such as "q8_0", by the checkpoint's names; the
            name "" stands for all matrices that are not named.
    """
    import gguf
    import numpy as np
    from safetensors.numpy import load_file

    config = json.loads((directory / "config.json").read_text())
    partial = file.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    kind_of, named = json.loads(kinds), named_by_gguf(config)
    usual = kind_of[""]
    add_settings(writer, config)
    file_type = "ALL_F32" if usual == "f32" else f"MOSTLY_{usual.upper()}"
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_tokenizer_model("none")
    for name, weight in load_file(directory / "model.safetensors").items():
        weight = weight.astype(np.float32)
        for projection, heads in (("q_proj", "attention"), ("k_proj", "key_value")):
            if projection in name:
                weight = interleave_rotary(weight, config[f"num_{heads}_heads"])
        if weight.ndim == 1 or usual == "f32":
            writer.add_tensor(named(name), weight)
        else:
            kept = gguf.GGMLQuantizationType[kind_of.get(name, usual).upper()]
            writer.add_tensor(named(name), gguf.quants.quantize(weight, kept), raw_dtype=kept)
    write(writer)
    partial.rename(file)


def add_settings(writer: Any, config: dict[str, Any]) -> None:
    """Write the sizes and constants of the architecture."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config.get("rope_parameters", config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def named_by_gguf(config: dict[str, Any]) -> Callable[[str], str]:
    """The GGUF name of a checkpoint's tensor."""
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    return lambda name: str(names.get_name(name, try_suffixes=(".weight",)))


def write(writer: Any) -> None:
    """Write a GGUF file with all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave_rotary(weight: Any, num_heads: int) -> Any:
    """Reorder each head's rows to pairs (i, i + head_dim / 2), as llama.cpp rotates them.

    ``weight``: [num_heads * head_dim, num_columns], or a bias [num_heads * head_dim].
    """
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


# CTranslate2


class NumberedTokens:
    """The part of a tokenizer that the converter uses; a token's text is its number."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._tokens = {str(number): number for number in range(config["vocab_size"])}
        ends = [config.get(f"{name}_token_id") for name in ("bos", "eos", "pad")]
        self.bos_token, self.eos_token, self.pad_token = (
            None if number is None else str(number) for number in ends
        )
        self.unk_token = "0"

    def get_vocab(self) -> dict[str, int]:
        return self._tokens

    def convert_ids_to_tokens(self, number: int) -> str:
        return str(number)


def make_ctranslate2(directory: Path, target: Path) -> None:
    """Convert a model to float32; the engine quantises it when it loads it."""
    from ctranslate2.converters import TransformersConverter

    config = json.loads((directory / "config.json").read_text())

    class Converter(TransformersConverter):
        def load_tokenizer(self, *_: Any, **__: Any) -> NumberedTokens:
            return NumberedTokens(config)

    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    Converter(str(directory)).convert(str(partial))
    partial.rename(target)


def main() -> None:
    what, directory, target, *kinds = sys.argv[1:]
    make = {"gguf": make_gguf, "ctranslate2": make_ctranslate2}[what]
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    make(Path(directory), Path(target), *kinds)


if __name__ == "__main__":
    main()
