"""Model directories as GPTQ, AWQ and compressed-tensors tools write them, packed in numpy.

Written from the published layouts, apart from what reads them.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Quantisation:
    """How a directory is quantised; ``layout`` is gptq, gptq_v2, awq, packed or plain."""

    layout: str
    bits: int = 4
    group_size: int = 32
    symmetric: bool = True
    scale_dtype: str = "float16"
    scattered: bool = False
    """Act-order: columns of a group lie anywhere."""
    whole: bool = False
    """One scale for a matrix."""
    skipped: tuple[str, ...] = ()
    """Layers kept in floats, by a part of their names."""
    others: dict[str, int] = field(default_factory=dict)
    """Bits of some layers, by a part of their names."""

    def bits_of(self, name: str) -> int:
        """Bits of a layer."""
        return next((b for part, b in self.others.items() if part in name), self.bits)


@dataclass
class Numbers:
    """A matrix in whole numbers."""

    q: np.ndarray
    """[out, in], 0 and more"""
    zeros: np.ndarray
    """[out, groups], alike"""
    scales: torch.Tensor
    """[out, groups]"""
    groups: np.ndarray
    """[in]"""
    bits: int

    def floats(self) -> np.ndarray:
        """The floats (q - z) * s, number by number in float32."""
        scales = self.scales.float().numpy()[:, self.groups]
        whole = self.q.astype(np.int64) - self.zeros.astype(np.int64)[:, self.groups]
        return whole.astype(np.float32) * scales


def quantised(weight: np.ndarray, how: Quantisation, bits: int, seed: int) -> Numbers:
    """Quantise each group by its least and largest number."""
    rows, columns = weight.shape
    size = columns if how.group_size == -1 or how.whole else how.group_size
    groups = np.arange(columns) // size
    if how.scattered:
        groups = np.random.default_rng(seed).permutation(groups)
    count, half = columns // size, 1 << (bits - 1)
    scales, zeros = np.zeros((rows, count)), np.full((rows, count), half)
    for g in range(count):
        part = weight[:, groups == g]
        part = part.reshape(1, -1) if how.whole else part
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if how.symmetric:
            scales[:, g] = np.maximum(-low, high) / (half - 1)
        else:
            scales[:, g] = (high - low) / (2 * half - 1)
            zeros[:, g] = np.clip(np.round(-low / scales[:, g]), 0, 2 * half - 1)
    stored = torch.from_numpy(scales).to(TORCH[how.scale_dtype])
    wide = stored.double().numpy()[:, groups]
    q = np.clip(np.round(weight / wide) + zeros[:, groups], 0, 2 * half - 1)
    return Numbers(q.astype(np.uint32), zeros.astype(np.uint32), stored, groups, bits)


def words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Pack [n, k] into uint32 [n, ceil(k * bits / 32)], the lowest bits first."""
    per_word = 32 // bits
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % per_word))).astype(np.uint32)
    packed = np.zeros((len(padded), padded.shape[1] // per_word), np.uint32)
    for place in range(per_word):
        packed |= padded[:, place::per_word] << np.uint32(bits * place)
    return packed


def as_int32(packed: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(packed).view(np.int32))


def gptq(n: Numbers, version: str) -> dict[str, torch.Tensor]:
    qzeros = words(n.zeros.T, n.bits)
    if version == "gptq":
        qzeros = qzeros - np.uint32({4: 0x11111111, 8: 0x01010101}[n.bits])
    return {
        "qweight": as_int32(words(n.q, n.bits).T),
        "qzeros": as_int32(qzeros),
        "scales": n.scales.T.contiguous(),
        "g_idx": torch.from_numpy(n.groups.astype(np.int32)),
    }


def awq(n: Numbers) -> dict[str, torch.Tensor]:
    def interleaved(numbers: np.ndarray) -> torch.Tensor:
        packed = np.zeros((len(numbers), numbers.shape[1] // 8), np.uint32)
        for place, output in enumerate(AWQ_ORDER):
            packed |= numbers[:, output::8].astype(np.uint32) << np.uint32(4 * place)
        return as_int32(packed)

    return {
        "qweight": interleaved(n.q.T),
        "qzeros": interleaved(n.zeros.T),
        "scales": n.scales.T.contiguous(),
    }


def compressed(n: Numbers, how: Quantisation) -> dict[str, torch.Tensor]:
    half = 1 << (n.bits - 1)
    tensors = {"weight_scale": n.scales[:1, 0] if how.whole else n.scales.contiguous()}
    signed = (n.zeros.astype(np.int64) - half).astype(np.int8)
    if how.layout == "plain":
        tensors["weight"] = torch.from_numpy((n.q.astype(np.int64) - half).astype(np.int8))
        if not how.symmetric:
            tensors["weight_zero_point"] = torch.from_numpy(signed)
        return tensors
    tensors["weight_packed"] = as_int32(words(n.q, n.bits))
    tensors["weight_shape"] = torch.tensor(n.q.shape)
    if not how.symmetric:
        tensors["weight_zero_point"] = as_int32(words(n.zeros.T, n.bits).T)
    if how.scattered:
        tensors["weight_g_idx"] = torch.from_numpy(n.groups.astype(np.int32))
    return tensors


def config_of(how: Quantisation) -> dict[str, Any]:
    """The ``quantization_config`` that a tool writes."""
    if how.layout.startswith("gptq"):
        dynamic = {f"+:.*{part}.*": {"bits": bits} for part, bits in how.others.items()}
        return {
            "quant_method": "gptq",
            "bits": how.bits,
            "group_size": how.group_size,
            "sym": how.symmetric,
            "desc_act": how.scattered,
            "checkpoint_format": how.layout,
            **({"dynamic": {**dynamic, "-:.*skipped.*": {}}} if dynamic else {}),
        }
    if how.layout == "awq":
        return {
            "quant_method": "awq",
            "bits": how.bits,
            "group_size": how.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(how.skipped) or None,
        }
    group = how.group_size != -1 and not how.whole
    groups = {
        f"group_{index}": {
            "targets": ["Linear"] if part is None else [f"re:.*{part}.*"],
            "weights": {
                "num_bits": bits,
                "type": "int",
                "symmetric": how.symmetric,
                "strategy": "tensor" if how.whole else "group" if group else "channel",
                "group_size": how.group_size if group else None,
                "actorder": "group" if how.scattered else None,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
        for index, (part, bits) in enumerate([(None, how.bits), *how.others.items()])
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if how.layout == "packed" else "int-quantized",
        "config_groups": groups,
        "ignore": ["lm_head", *how.skipped],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "quantization_status": "compressed",
    }


def write_quantised(
    source: Path, directory: Path, how: Quantisation, modules: tuple[str, ...] = LINEAR
) -> dict[str, np.ndarray]:
    """Quantise a model directory into another; returns the numbers of its matrices by name."""
    directory.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, directory)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = config_of(how)
    (directory / "config.json").write_text(json.dumps(config))
    tensors: dict[str, torch.Tensor] = {}
    floats: dict[str, np.ndarray] = {}
    for seed, (name, tensor) in enumerate(load_file(source / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        chosen = module.split(".")[-1] in modules and name.endswith(".weight")
        if not chosen or any(part in name for part in how.skipped):
            tensors[name] = tensor
            continue
        numbers = quantised(tensor.float().numpy(), how, how.bits_of(name), seed)
        floats[name] = numbers.floats()
        if how.layout.startswith("gptq"):
            parts = gptq(numbers, how.layout)
        else:
            parts = awq(numbers) if how.layout == "awq" else compressed(numbers, how)
        tensors |= {f"{module}.{part}": value.clone() for part, value in parts.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return floats
