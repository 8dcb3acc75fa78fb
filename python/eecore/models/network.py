"""The models that eecore runs; a T5 has an encoder besides."""

from eecore.models.llama import LlamaModel
from eecore.models.t5 import T5Model

__all__ = ["Network"]

Network = LlamaModel | T5Model
