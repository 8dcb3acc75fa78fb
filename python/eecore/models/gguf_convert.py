"""A GGUF file into a Hugging Face model directory: config, dequantised safetensors, tokenizer.

Read: the llama, qwen2 and qwen3 architectures in every tensor type that the ``gguf`` package
dequantises. The directory appears whole or not at all.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eecore.config import RopeConfig
from eecore.errors import CheckpointError, ModelError, ModelNotFoundError, UnsupportedModelError
from eecore.files import appearing
from eecore.models.checkpoint import INDEX, WHOLE
from eecore.models.gguf_tokenizer import build_tokenizer, special_token_ids
from eecore.models.load import DTYPES
from eecore.models.rope import frequencies

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
BYTES_PER_SHARD = 2 << 30


def convert_gguf(
    file: str | Path, directory: str | Path, dtype: str | torch.dtype = torch.float32
) -> Path:
    """Convert a GGUF file into a new model directory, which is returned.

    Args:
        file: llama, qwen2 or qwen3 architecture.
        directory: must not exist, or be empty.
        dtype: of the written tensors. Only float32 keeps every dequantised value exactly.

    Raises:
        ModelError: the file is missing, not GGUF, truncated or of an unsupported kind, or the
            directory is in use. Nothing is left behind.
    """
    source, target = Path(file).expanduser(), Path(directory).expanduser()
    stored_as = DTYPES.get(str(dtype).removeprefix("torch."))
    if stored_as is None:
        raise ModelError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target}: expected a new or empty directory, got one in use")
    gguf_file = GGUFFile(source)
    config = model_config(gguf_file)
    with appearing(target) as partial:
        config["dtype"] = str(stored_as).removeprefix("torch.")
        _write_json(partial / "config.json", config)
        ids = {name: value for name, value in config.items() if name.endswith("os_token_id")}
        _write_json(partial / "generation_config.json", ids)
        _write_tokenizer(gguf_file, partial)
        _write_tensors(gguf_file, partial, stored_as)
    return target


class GGUFFile:
    """Metadata and tensors of a GGUF file, mapped, with errors that name the file."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError:
            raise ModelError("reading GGUF needs the gguf package: pip install gguf") from None
        if not path.is_file():
            raise ModelNotFoundError(f"{path}: expected a GGUF file, got nothing")
        with path.open("rb") as opened:
            magic = opened.read(4)
        if magic != b"GGUF":
            raise CheckpointError(f"{path}: expected a GGUF file (magic GGUF), got {magic!r}")
        self.path = path
        self._dequantize = gguf.quants.dequantize
        try:
            reader = gguf.GGUFReader(path)
            self._values = {name: field.contents() for name, field in reader.fields.items()}
        except Exception as error:  # the reader trips over a truncated file in many ways
            raise CheckpointError(
                f"{path}: expected a whole GGUF file, got {path.stat().st_size} bytes: {error}"
            ) from None
        self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = str(self._values.get("general.architecture"))

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def model_value(self, name: str, default: Any = None) -> Any:
        """The value of ``<architecture>.<name>``; a CheckpointError when there is no default."""
        value = self._values.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise CheckpointError(f"{self.path}: expected {self.architecture}.{name}, got nothing")
        return value

    def real(self, name: str, default: float) -> float:
        """A float32 value as the decimal number that was meant: 1e-05, not 9.99999975e-06."""
        value = float(self.model_value(name, default))
        return float(f"{value:.7g}")

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def read(self, name: str) -> Tensor:
        """A tensor, dequantised to float32."""
        tensor = self.tensors[name]
        try:
            values = self._dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise UnsupportedModelError(
                f"{self.path}: {name}: expected a type that gguf dequantises, got {kind}"
            ) from None
        return torch.from_numpy(values.astype("float32")).reshape(self.shape(name))


def model_config(file: GGUFFile) -> dict[str, Any]:
    """The config.json of a GGUF file's metadata."""
    architecture = file.architecture
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: general.architecture: supported are {', '.join(ARCHITECTURES)}, "
            f"got {architecture}"
        )
    if file.model_value("expert_count", 0):
        raise UnsupportedModelError(f"{file.path}: expected a dense model, got one of experts")
    if file.model_value("attention.sliding_window", 0):
        raise UnsupportedModelError(f"{file.path}: expected full attention, got a sliding window")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: expected tensor token_embd.weight, got none")
    num_heads, hidden_size = (
        file.model_value("attention.head_count"),
        file.model_value("embedding_length"),
    )
    head_dim = file.model_value("attention.key_length", hidden_size // num_heads)
    max_position = file.model_value("context_length")
    bos, ends = special_token_ids(file)
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": file.model_value("feed_forward_length"),
        "num_hidden_layers": file.model_value("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.model_value("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": file.shape("token_embd.weight")[0],
        "max_position_embeddings": max_position,
        "rms_norm_eps": file.real("attention.layer_norm_rms_epsilon", 1e-6),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": architecture == "llama" and "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "rope_parameters": _rope_parameters(file, head_dim, max_position),
    }
    if bos is not None:
        config["bos_token_id"] = bos
    if ends:
        config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return config


def _rope_parameters(file: GGUFFile, head_dim: int, max_position: int) -> dict[str, Any]:
    theta = file.real("rope.freq_base", 10000.0)
    kind = file.model_value("rope.scaling.type", "none")
    rotary_dim = file.model_value("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise UnsupportedModelError(
            f"{file.path}: rope.dimension_count: expected head_dim={head_dim}, got {rotary_dim}"
        )
    if ROPE_FACTORS in file.tensors:
        return _llama3_rope(file, theta, head_dim)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path}: rope.scaling.type: supported are none, linear, yarn, got {kind}"
        )
    scaled = {"rope_type": kind, "rope_theta": theta, "factor": file.real("rope.scaling.factor", 1)}
    if kind == "yarn":
        original = file.model_value("rope.scaling.original_context_length", max_position)
        scaled["original_max_position_embeddings"] = original
    return scaled


def _llama3_rope(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The settings behind a file's table of frequency divisors, found by making the table again.

    GGUF keeps only the table; of Llama 3.1's settings all but the factor are the same everywhere.
    """
    divisors = file.read(ROPE_FACTORS)
    llama3 = RopeConfig(
        "llama3",
        theta,
        head_dim,
        factor=float(f"{float(divisors.max()):.7g}"),
        original_max_position=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    plain = RopeConfig(theta=theta, rotary_dim=head_dim)
    expected = frequencies(plain) / frequencies(llama3)
    if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-3):
        raise UnsupportedModelError(
            f"{file.path}: {ROPE_FACTORS}: expected the divisors of Llama 3.1, got others"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": llama3.factor,
        "low_freq_factor": llama3.low_freq_factor,
        "high_freq_factor": llama3.high_freq_factor,
        "original_max_position_embeddings": llama3.original_max_position,
    }


def _checkpoint_name(file: GGUFFile, name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in TENSOR_NAMES:
        raise UnsupportedModelError(f"{file.path}: expected the tensors of a decoder, got {name}")
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{TENSOR_NAMES[match[2]]}.{match[3]}"


def _read_as_checkpoint(file: GGUFFile, name: str) -> Tensor:
    """A tensor with its rows in the order of a Hugging Face checkpoint.

    Llama's Q and K rows are stored for a rotary embedding of neighbouring pairs (2i, 2i+1); here
    pairs are (i, i + head_dim/2).
    """
    tensor = file.read(name)
    part = name.split(".")[-2]
    if file.architecture != "llama" or part not in ("attn_q", "attn_k"):
        return tensor
    num_heads = file.model_value("attention.head_count")
    if part == "attn_k":
        num_heads = file.model_value("attention.head_count_kv", num_heads)
    pairs = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _write_tensors(file: GGUFFile, directory: Path, dtype: torch.dtype) -> None:
    """Shards of bounded size, so that a file larger than memory converts too."""
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name in file.tensors:
        if name == ROPE_FACTORS:
            continue
        num_bytes = torch.Size(file.shape(name)).numel() * dtype.itemsize
        if shards[-1] and shard_bytes + num_bytes > BYTES_PER_SHARD:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += num_bytes
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        path = WHOLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {
            _checkpoint_name(file, name): _read_as_checkpoint(file, name).to(dtype).contiguous()
            for name in names
        }
        save_file(tensors, directory / path, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, path)
    if len(shards) > 1:
        _write_json(directory / INDEX, {"metadata": {}, "weight_map": weight_map})


def _write_tokenizer(file: GGUFFile, directory: Path) -> None:
    try:
        tokenizer, settings = build_tokenizer(file)
    except UnsupportedModelError as error:
        warnings.warn(f"{error}; the directory gets no tokenizer", stacklevel=3)
        return
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
