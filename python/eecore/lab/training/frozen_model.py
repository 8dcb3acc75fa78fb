"""Models that training reads but does not change: their states and their head."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eecore.calibration.exit_scores import whole_sequences
from eecore.errors import TrainingError
from eecore.files.readable import kind_of
from eecore.lab.training.exit_model import ExitModel
from eecore.models import KVCache, LlamaModel, Tokenizer, load_model, read_layout


@dataclass(frozen=True, eq=False)
class RunningModel:
    """A model as eecore runs it, quantised weights included."""

    network: LlamaModel
    tokenizer: Tokenizer
    eos_token_id: int
    """The token that ends a text."""

    @property
    def num_layers(self) -> int:
        return self.network.config.num_layers

    @property
    def exit_layers(self) -> range:
        """The exit layers, ascending, one for each of :meth:`states`."""
        return self.network.config.exit_layers

    @property
    def hidden_size(self) -> int:
        return self.network.config.hidden_size

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def decoder_start(self) -> None:
        return None

    def states(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """``[h[1], ..., h[L]]``, each [batch, length, hidden_size].

        Args:
            inputs: ``input_ids`` int64 [batch, length], padded on the right.
        """
        ids, network = inputs["input_ids"], self.network
        batch_size, length = ids.shape
        if length > network.config.max_position:
            raise TrainingError(
                f"input_ids: expected at most the model's {network.config.max_position} tokens, "
                f"got {length}"
            )
        kv = KVCache.allocate(
            network.config, batch_size, length, device=self.device, dtype=network.dtype
        )
        batch = whole_sequences([length] * batch_size, length, self.device)
        hidden = network.embed(ids.flatten())
        states = []
        for begin, end in itertools.pairwise([0, *self.exit_layers]):
            hidden = network.layers(begin, end, hidden, kv, batch)
            states.append(hidden.view(batch_size, length, -1))
        return states

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """``head(h)``: states [n, hidden_size] to logits [n, vocab_size]."""
        return self.network.logits

    def frozen(self) -> AbstractContextManager[object]:
        """A context without effect: the model is always frozen."""
        return nullcontext()


FrozenModel = ExitModel | RunningModel
"""Models that an exit classifier learns from."""


def is_quantised(path: Path) -> bool:
    """Whether a model is a GGUF file, or a directory whose layers are quantised."""
    return kind_of(path) == "a file" or read_layout(path) is not None


def load_running_model(path: Path, device: str | None = None) -> RunningModel:
    """Load a model of :func:`is_quantised` as eecore runs it.

    Raises:
        ModelError: it cannot be read, or the device is not the CPU.
        TrainingError: it has no tokenizer, or no token that ends a text.
    """
    config, network, tokenizer = load_model(path, device)
    if tokenizer is None:
        raise TrainingError(f"{path}: expected a model with a tokenizer, got none")
    if not config.eos_token_ids:
        raise TrainingError(f"{path}: expected an eos_token_id, which ends texts, got none")
    assert isinstance(network, LlamaModel)  # only these are quantised
    return RunningModel(network, tokenizer, config.eos_token_ids[0])
