"""Layer dropout (LayerSkip §4.1.1): in training, each sample skips layers at random.

``x[l+1] = x[l] + M(p(l,t)) f_l(x[l])`` with ``p(l,t) = S(t) D(l) p_max`` (eqs. 1-4), layers l from
0. A sample that drops a layer really skips it: the layer runs over the other rows of the batch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from eecore.errors import TrainingError
from eecore.values import check_fields, choice, real


@dataclass(frozen=True)
class LayerDropout:
    """The dropout rate of each layer and step.

    Args:
        max_rate: p_max, the rate of the last layer.
        over_time: S(t): ``constant`` is 1, for fine-tuning; ``exponential`` grows from 0 to 1 over
            the run, for training from scratch (eq. 4).
    """

    max_rate: Annotated[float, real(0.0, 1.0)] = 0.1
    over_time: Annotated[Literal["constant", "exponential"], choice("constant", "exponential")] = (
        "constant"
    )

    def __post_init__(self) -> None:
        check_fields(self, TrainingError, "LayerDropout.")

    def rate(self, layer: int, num_layers: int, step: int, num_steps: int) -> float:
        """p(l,t) of layer l in 0..num_layers-1 at step t in 0..num_steps-1 (eq. 2)."""
        time = 1.0 if self.over_time == "constant" else _from_zero_to_one(step, num_steps)
        return time * _from_zero_to_one(layer, num_layers) * self.max_rate


def _from_zero_to_one(position: int, count: int) -> float:
    """``exp(x ln2 / (n - 1)) - 1``: 0 at the first of n, 1 at the last (eqs. 3 and 4)."""
    return math.exp(position * math.log(2) / (count - 1)) - 1 if count > 1 else 0.0


class LayerDropoutHandle(AbstractContextManager["LayerDropoutHandle"]):
    """Layer dropout on a model's layers, in place, until :meth:`remove`; a context manager.

    Eval mode drops nothing. Random numbers come from a generator on the CPU that :meth:`begin_step`
    seeds: what a step drops depends on the seed and the step only.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        schedule: LayerDropout,
        num_steps: int,
        seed: int,
    ) -> None:
        self.schedule = schedule
        self.num_steps = num_steps
        self.seed = seed
        self._batch: int | None = None
        self._rows: list[int] = []
        self._layers = tuple(layers)
        self._rates = [0.0] * len(self._layers)
        self._seeds = [0] * len(self._layers)
        self._generator = torch.Generator()
        for layer in self._layers:
            if "forward" in vars(layer):
                raise TrainingError(
                    f"drop_layers: expected layers that nothing has wrapped, got a "
                    f"{type(layer).__name__} with a forward of its own"
                )
        self._signatures = [inspect.signature(layer.forward) for layer in self._layers]
        for index, layer in enumerate(self._layers):
            layer.forward = partial(self._forward, index, layer.forward)
        self.begin_step(0)

    def begin_step(self, step: int, rows: Sequence[int] = (), batch: int | None = None) -> None:
        """Set the step t of the forward passes that follow.

        Args:
            rows: the samples of the step that the next forward pass has, where a step is computed
                in pieces: a sample skips the same layers in a piece as in the whole.
            batch: the number of the step's samples; None where a forward pass has all of them.
        """
        self._rows, self._batch = list(rows), batch
        count = len(self._layers)
        self._rates = [
            self.schedule.rate(layer, count, step, self.num_steps) for layer in range(count)
        ]
        self._generator.manual_seed(self.seed * 1_000_003 + step)
        self._seeds = torch.randint(1 << 62, (count,), generator=self._generator).tolist()

    def remove(self) -> None:
        """Give the layers their own forward methods back."""
        for layer in self._layers:
            vars(layer).pop("forward", None)

    def __exit__(self, *_error: object) -> None:
        self.remove()

    def _forward(self, index: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._layers[index].training or not self._rates[index]:
            return forward(*args, **kwargs)
        arguments = self._signatures[index].bind(*args, **kwargs).arguments
        _refuse_caches({**arguments, **kwargs})
        hidden: Tensor = arguments["hidden_states"]  # [batch, length, hidden_size]
        count = len(hidden) if self._batch is None else self._batch
        # Gradient checkpointing runs a layer twice: it has to drop the same samples again.
        self._generator.manual_seed(self._seeds[index])
        kept_of_step = torch.rand(count, generator=self._generator) >= self._rates[index]
        kept = kept_of_step if self._batch is None else kept_of_step[self._rows]
        if kept.all():
            return forward(*args, **kwargs)
        if not kept.any():
            return _as_the_layer_returns(hidden, arguments)
        rows = kept.nonzero().squeeze(1).to(hidden.device, non_blocking=True)
        # Positional arguments stay positional, as reentrant checkpointing needs it.
        chosen = [_rows_of(value, rows, len(hidden)) for value in args]
        named = {name: _rows_of(value, rows, len(hidden)) for name, value in kwargs.items()}
        output = forward(*chosen, **named)
        states = output[0] if isinstance(output, tuple) else output
        merged = hidden.index_copy(0, rows, states.to(hidden.dtype))
        return _as_the_layer_returns(merged, arguments)


def drop_layers(
    layers: Sequence[nn.Module],
    schedule: LayerDropout,
    *,
    num_steps: int,
    seed: int = 0,
) -> LayerDropoutHandle:
    """Wrap the decoder layers of a Hugging Face model (or the blocks of a T5) with layer dropout.

    Args:
        layers: in order; ``ExitModel.of(model).layers``, say.
        num_steps: T.

    Call ``begin_step(t)`` of the handle before each training step. KV caches are not supported:
    call the model with ``use_cache=False``. Gradient checkpointing is.
    """
    return LayerDropoutHandle(layers, schedule, num_steps, seed)


def _refuse_caches(arguments: Mapping[str, Any]) -> None:
    # the names in different releases of transformers
    for name in ("cache", "past_key_values", "past_key_value"):
        if arguments.get(name) is not None:
            raise TrainingError(
                f"layer dropout: expected no {name}, got one: call the model with use_cache=False"
            )


def _rows_of(value: Any, rows: Tensor, batch: int) -> Any:
    """The kept samples' rows of an argument; what is broadcast over the batch stays whole."""
    if isinstance(value, Tensor):
        return value.index_select(0, rows) if value.ndim > 1 and len(value) == batch else value
    if isinstance(value, (tuple, list)):
        return type(value)(_rows_of(item, rows, batch) for item in value)
    if isinstance(value, dict):
        return {name: _rows_of(item, rows, batch) for name, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TrainingError(
        f"layer dropout: expected tensors for a layer, got a {type(value).__name__}: choose the "
        "attention implementation sdpa or eager"
    )


def _as_the_layer_returns(hidden: Tensor, arguments: Mapping[str, Any]) -> Any:
    """The states alone, or with the two position biases that T5's blocks pass on.

    The first block makes them; it is never dropped, since D(0) = 0.
    """
    if "position_bias" not in arguments:
        return hidden
    return hidden, arguments["position_bias"], arguments.get("encoder_decoder_position_bias")
