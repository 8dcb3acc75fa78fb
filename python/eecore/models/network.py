"""The models that eecore runs, decoders and T5s, and what differs between them."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
from torch import Tensor

from eecore.config import EngineConfig, ModelConfig
from eecore.errors import ModelError
from eecore.models.kv_cache import KVCache
from eecore.models.llama import LlamaModel
from eecore.models.t5 import T5Model

Network = LlamaModel | T5Model


def allocate_cache(
    network: Network, num_pages: int, page_size: int, dtype: torch.dtype, num_states: int = 0
) -> KVCache:
    """Pages for the layers of a model, and for the layers of its draft head if it has any; and
    ``num_states`` states of texts, where layers have them.

    Raises:
        OutOfMemoryError: the pages do not fit into memory.
    """
    own, device = _keys_of_head(network), network.device
    other = _without_float8(network, dtype)
    kv = KVCache.allocate(
        network.config,
        num_pages,
        page_size,
        device=device,
        dtype=dtype,
        state_dtype=other,
        deltas=(num_states, network.dtype),
    )
    if own is None:
        return kv
    of_head = KVCache.allocate(own, num_pages, page_size, device=device, dtype=other)
    return replace(kv, of_head=of_head)


def bytes_per_token(network: Network, dtype: torch.dtype) -> int:
    """Bytes that one token takes in the caches of all layers, a draft head's included."""
    own, other = _keys_of_head(network), _without_float8(network, dtype)
    num_bytes = KVCache.bytes_per_token(network.config, dtype, other)
    if own is not None:
        num_bytes += KVCache.bytes_per_token(own, other)
    return num_bytes


def bytes_of_state(network: Network) -> int:
    """Bytes of a text's state; 0 for a model without states."""
    return KVCache.bytes_per_state(network.config, network.dtype)


def num_states(network: Network, limits: EngineConfig, dtype: torch.dtype) -> int:
    """How many texts can have states, for a cache of a dtype; 0 for a model without states.

    Beside those that run these are beginnings for the prefix cache, as many as take the memory of
    the pages, and no more than texts that run.
    """
    one = bytes_of_state(network)
    if not one:
        return 0
    if not (limits.prefix_cache and network.linear.is_batch_invariant):
        return limits.max_num_seqs
    fitting = limits.kv_cache_tokens * bytes_per_token(network, dtype) // one
    return limits.max_num_seqs + max(1, min(limits.max_num_seqs, fitting))


def _keys_of_head(network: Network) -> ModelConfig | None:
    return None if network.draft_head is None else network.draft_head.keys


def _without_float8(network: Network, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a head's cache, and of the states of convolutions, for a model's cache of a
    dtype: the model's own in place of float8, which needs scales that they do not have.
    """
    return network.dtype if dtype == torch.float8_e4m3fn else dtype


def cache_dtype(network: Network, kv_cache_dtype: str) -> torch.dtype:
    """The dtype of a model's cache, by :attr:`eecore.EngineConfig.kv_cache_dtype`.

    Raises:
        ModelError: this model's cache cannot have that dtype.
    """
    dtype = network.dtype
    takes_bfloat16 = dtype == torch.float32 and not network.calls_single_ops
    if isinstance(network, T5Model):
        if kv_cache_dtype != "auto":
            raise ModelError(
                f"kv_cache_dtype: expected auto for {network.config.architecture}, whose keys are "
                f"not scaled, got {kv_cache_dtype}"
            )
        return dtype
    if kv_cache_dtype == "auto":
        is_narrow = takes_bfloat16 and network.weights.qkv.is_quantised
        return torch.bfloat16 if is_narrow else dtype
    if kv_cache_dtype == "fp8":
        return torch.float8_e4m3fn
    asked: torch.dtype = getattr(torch, kv_cache_dtype)
    if asked == dtype or (asked == torch.bfloat16 and takes_bfloat16):
        return asked
    raise ModelError(
        f"kv_cache_dtype: expected auto, fp8 or the dtype of states, "
        f"{str(dtype).removeprefix('torch.')}, on {network.device.type}, got {kv_cache_dtype}"
    )


def network_digest(network: LlamaModel) -> str:
    """SHA-256, in hex, of a model's sizes and norms, rounded to bfloat16 and written as float32.

    Quantising leaves norms alone, so a draft head goes with every quantisation of the model that it
    was trained for. Hashed in this order: ``"num_layers hidden_size vocab_size"``, final_norm
    [hidden_size], attention_norm [num_layers, hidden_size] and mlp_norm [num_layers, hidden_size];
    in a model without norms before its sublayers, the norms after them take their place.
    """
    weights = network.weights
    before = weights.attention_norm, weights.mlp_norm
    after = weights.attention_post_norm, weights.mlp_post_norm
    norms = before if network.config.pre_norm else after
    return norms_digest(network.config, weights.final_norm, *norms)


def norms_digest(config: ModelConfig, *norms: Tensor | None) -> str:
    """:func:`network_digest` of a model's sizes and its norms, in their order."""
    digest = hashlib.sha256(
        f"{config.num_layers} {config.hidden_size} {config.vocab_size}".encode("ascii")
    )
    for norm in norms:
        assert norm is not None
        digest.update(_little_endian(norm))
    return digest.hexdigest()


def _little_endian(norm: Tensor) -> bytes:
    return bytes(
        norm.detach().to("cpu", torch.bfloat16).float().contiguous().numpy().astype("<f4").tobytes()
    )
