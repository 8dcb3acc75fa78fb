"""Public draft heads for a model on the meta device, by their usual sizes, for expected times."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from bench.gpu.trace import META
from eecore.config import ModelConfig
from eecore.models import BlockHead, KeyedHead, LlamaModel, LlamaWeights
from eecore.models.block_head import BlockSettings, BlockWeights
from eecore.models.eagle_head import EagleHead, EagleSettings
from eecore.models.weights import NewWeights

__all__ = ["dflash", "eagle3"]

PATH = Path("without a file")


def _layers(config: ModelConfig, count: int) -> ModelConfig:
    return dataclasses.replace(config, num_layers=count, layer_ropes=(), layer_windows=())


def eagle3(model: LlamaModel) -> KeyedHead:
    """EAGLE-3: one layer of the model's sizes, a vocabulary of 32,000 tokens."""
    config, layers = model.config, model.config.num_layers
    own = _layers(config, 1)
    taps = (2, layers // 2, layers - 3)
    settings = EagleSettings("EAGLE-3", own, taps, config.hidden_size, 32000)
    tensors = {name: torch.empty(shape, device=META) for name, shape in settings.shapes.items()}
    return EagleHead(model, PATH, settings, tensors, torch.zeros(32000, dtype=torch.int64))


def dflash(model: LlamaModel, num_drafts: int) -> KeyedHead:
    """DFlash: five layers of the model's sizes and as many taps, the model's own LM head."""
    config, new = model.config, NewWeights(META, model.dtype)
    own = _layers(config, 5)
    taps = tuple(range(1, config.num_layers, config.num_layers // 5))[:5]
    settings = BlockSettings("DFlash", own, taps, num_drafts + 1, 0, False, config.vocab_size)
    shared = model.weights.embed_tokens, model.weights.lm_head
    hidden = config.hidden_size
    fc = new.matrix("fc", len(taps), hidden, hidden)
    weights = BlockWeights(LlamaWeights.empty(own, new, shared), fc, new.tensor(hidden))
    return BlockHead(settings, weights, PATH)
