"""Models: a Hugging Face directory in, a forward pass of single layers out."""

from eecore.models.attention import AttentionBatch, CrossBatch
from eecore.models.draft_head import DraftHead, SeenKeys
from eecore.models.kv_cache import KVCache
from eecore.models.llama import LlamaModel, LlamaWeights
from eecore.models.network import Network, cache_dtype
from eecore.models.readers import adopt
from eecore.models.readers.find_head import find_head
from eecore.models.readers.load import load_first_layers, load_model
from eecore.models.source import ModelSource
from eecore.models.t5 import T5Model
from eecore.models.text.tokenizer import IncrementalDecoder, Tokenizer

__all__ = [
    "AttentionBatch",
    "CrossBatch",
    "DraftHead",
    "IncrementalDecoder",
    "KVCache",
    "LlamaModel",
    "LlamaWeights",
    "ModelSource",
    "Network",
    "SeenKeys",
    "T5Model",
    "Tokenizer",
    "adopt",
    "cache_dtype",
    "find_head",
    "load_first_layers",
    "load_model",
]
