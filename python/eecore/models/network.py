"""The models that eecore runs; a T5 has an encoder besides."""

import torch

from eecore.errors import ModelError
from eecore.models.llama import LlamaModel
from eecore.models.t5 import T5Model

__all__ = ["Network", "cache_dtype"]

Network = LlamaModel | T5Model


def cache_dtype(network: Network, kv_cache_dtype: str) -> torch.dtype:
    """What a model's cache holds, by :attr:`eecore.EngineConfig.kv_cache_dtype`.

    Raises:
        ModelError: it cannot be so of this model.
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
