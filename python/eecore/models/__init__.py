"""Models: from a Hugging Face directory or GGUF file to forward passes layer by layer."""

from eecore.models.attention import AttentionBatch, CrossBatch
from eecore.models.draft_head import DraftHead, Positions, SeenKeys
from eecore.models.kv_cache import KVCache
from eecore.models.llama import LlamaModel, LlamaWeights
from eecore.models.network import (
    Network,
    allocate_cache,
    bytes_of_state,
    bytes_per_token,
    cache_dtype,
    network_digest,
    num_states,
)
from eecore.models.prompt_attention import MIN_QUERIES, Chunks
from eecore.models.readers import adopt
from eecore.models.readers.checkpoint import Checkpoint
from eecore.models.readers.draft_heads import find_draft_head
from eecore.models.readers.gguf_convert import convert_gguf
from eecore.models.readers.head_file import find_head, load_head
from eecore.models.readers.load import load_first_layers, load_model, load_tokenizer, read_config
from eecore.models.readers.quantised_checkpoint import read_layout
from eecore.models.source import ModelSource, exits_file, model_digest
from eecore.models.t5 import T5Model
from eecore.models.text.chat_template import ChatTemplate
from eecore.models.text.tokenizer import IncrementalDecoder, Tokenizer
from eecore.models.text.tokenizer_files import ChatSettings

__all__ = [
    "MIN_QUERIES",
    "AttentionBatch",
    "ChatSettings",
    "ChatTemplate",
    "Checkpoint",
    "Chunks",
    "CrossBatch",
    "DraftHead",
    "IncrementalDecoder",
    "KVCache",
    "LlamaModel",
    "LlamaWeights",
    "ModelSource",
    "Network",
    "Positions",
    "SeenKeys",
    "T5Model",
    "Tokenizer",
    "adopt",
    "allocate_cache",
    "bytes_of_state",
    "bytes_per_token",
    "cache_dtype",
    "convert_gguf",
    "exits_file",
    "find_draft_head",
    "find_head",
    "load_first_layers",
    "load_head",
    "load_model",
    "load_tokenizer",
    "model_digest",
    "network_digest",
    "num_states",
    "read_config",
    "read_layout",
]
