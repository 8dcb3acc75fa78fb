"""Which model this is, however its weights are stored: by its norms, that quantising leaves alone.

A draft head that was trained for a model goes with every quantisation of it.
"""

from __future__ import annotations

import hashlib

from torch import Tensor, bfloat16, float32

from eecore.models.llama import LlamaModel

__all__ = ["network_digest"]


def network_digest(network: LlamaModel) -> str:
    """SHA-256, in hex, of a model's sizes and of its norms: bfloat16's numbers, as float32.

    In this order: ``"num_layers hidden_size vocab_size"``, final_norm [hidden_size],
    attention_norm [num_layers, hidden_size] and mlp_norm [num_layers, hidden_size].
    """
    config, weights = network.config, network.weights
    digest = hashlib.sha256(
        f"{config.num_layers} {config.hidden_size} {config.vocab_size}".encode("ascii")
    )
    for norm in (weights.final_norm, weights.attention_norm, weights.mlp_norm):
        digest.update(_little_endian(norm))
    return digest.hexdigest()


def _little_endian(norm: Tensor) -> bytes:
    return bytes(
        norm.detach().to("cpu", bfloat16).to(float32).contiguous().numpy().astype("<f4").tobytes()
    )
