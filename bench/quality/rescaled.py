"""The same model in other float32 numbers, which do not lie on the blocks of a quantiser.

Weights that were quantised once lie on the grid of their blocks: the same format stores them again
without loss, which says nothing about its quality. This module divides every column of a matrix by
its own factor, and multiplies the source of the column's input (a norm's weights or another
matrix's rows) by that factor: the model computes the same function, and its weights lie on no grid.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Change = Callable[[dict[str, Floats], int], None]
"""A function that changes weights, by name, in place; it also gets the number of key heads."""
SPREAD = 0.25  # factors lie between exp(-SPREAD) and exp(SPREAD)
FED_BY_NORM = {
    "attn_norm": ("attn_q", "attn_k", "attn_v"),
    "ffn_norm": ("ffn_gate", "ffn_up"),
    "output_norm": ("output",),
}


def rescale(weights: dict[str, Floats], num_kv_heads: int, seed: int = 0) -> None:
    """Change the weights of a Llama or Qwen2 in place, by their names in a GGUF file.

    Matrices are [out, in]. Embeddings, and a head that is tied to them, are not changed.
    """
    random = np.random.default_rng(seed)

    def factors(count: int) -> Floats:
        return np.exp(random.uniform(-SPREAD, SPREAD, count)).astype(np.float32)

    layers = sorted({name.rpartition(".attn_norm")[0] for name in weights if ".attn_norm" in name})
    for layer in ("", *layers):
        prefix = f"{layer}." if layer else ""
        for norm, readers in FED_BY_NORM.items():
            if all(f"{prefix}{name}.weight" in weights for name in (norm, *readers)):
                by = factors(len(weights[f"{prefix}{norm}.weight"]))
                weights[f"{prefix}{norm}.weight"] *= by
                for reader in readers:
                    weights[f"{prefix}{reader}.weight"] /= by
    for layer in layers:
        _rescale_rows(weights, layer, "ffn_up", "ffn_down", factors, lambda by: by)
        rows, columns = (
            len(weights[f"{layer}.attn_v.weight"]),
            weights[f"{layer}.attn_output.weight"],
        )
        group = columns.shape[1] // rows

        def of_heads(by: Floats, group: int = group) -> Floats:
            return by.reshape(num_kv_heads, -1).repeat(group, axis=0).reshape(-1)

        _rescale_rows(weights, layer, "attn_v", "attn_output", factors, of_heads)


def _rescale_rows(
    weights: dict[str, Floats],
    layer: str,
    writer: str,
    reader: str,
    factors: Callable[[int], Floats],
    columns_of: Callable[[Floats], Floats],
) -> None:
    """Multiply a matrix's rows and bias by factors, and divide the columns that read them."""
    by = factors(len(weights[f"{layer}.{writer}.weight"]))
    weights[f"{layer}.{writer}.weight"] *= by[:, None]
    if f"{layer}.{writer}.bias" in weights:
        weights[f"{layer}.{writer}.bias"] *= by
    weights[f"{layer}.{reader}.weight"] /= columns_of(by)


def rescaled_file(source: Path, target: Path) -> Path:
    """Write a GGUF file's model, rescaled, in float32."""
    return float_file(source, target, rescale)


def float_file(source: Path, target: Path, change: Change | None = None) -> Path:
    """Write a GGUF file's model in float32, with its own numbers or with changed numbers."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    weights = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for tensor in reader.tensors
    }
    if change is not None:
        change(weights, reader.fields[f"{architecture}.attention.head_count_kv"].contents())
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = 0 if field.name == "general.file_type" else field.contents()  # 0: all float32
        inner = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=inner)
    for name, weight in weights.items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
