"""Models: a Hugging Face directory in, a forward pass of single layers out."""

from eecore.models.attention import AttentionBatch
from eecore.models.kv_cache import KVCache
from eecore.models.llama import LlamaModel, LlamaWeights
from eecore.models.load import load_model
from eecore.models.tokenizer import IncrementalDecoder, Tokenizer

__all__ = [
    "AttentionBatch",
    "IncrementalDecoder",
    "KVCache",
    "LlamaModel",
    "LlamaWeights",
    "Tokenizer",
    "load_model",
]
