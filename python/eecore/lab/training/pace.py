"""How long a run will take, measured before it starts."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from eecore.lab.training.data import BatchOrder, TokenData, collate
from eecore.lab.training.early_exit_loss import early_exit_backward
from eecore.lab.training.exit_model import ExitModel
from eecore.lab.training.layer_dropout import drop_layers
from eecore.lab.training.recipe import TrainingConfig

__all__ = ["seconds_per_step"]


def seconds_per_step(
    model: nn.Module,
    data: TokenData,
    config: TrainingConfig,
    *,
    points: int = 8,
    steps_a_point: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The mean over a run of such a config; its ``steps`` do not matter much.

    Curricula make steps dearer or cheaper as a run goes on, so steps are timed at points spread
    over it. Weights, gradients and the state of random numbers are left as they were.
    """
    exits = ExitModel.of(model)
    decoder_start = exits.decoder_start
    order = BatchOrder(data.lengths, config.batch_size, config.seed)
    enabled = config.precision == "bfloat16"
    was_training, random_state = model.training, torch.get_rng_state()
    model.train()
    dropout = None
    if config.layer_dropout is not None:
        dropout = drop_layers(exits.layers, config.layer_dropout, num_steps=config.steps)
    spent = 0.0
    for point in range(points):
        step = (2 * point + 1) * config.steps // (2 * points)
        weights = config.loss.weights(step, config.steps, exits.num_layers)
        for repeat in range(steps_a_point + 1):  # the first one only warms up
            if repeat == 1:
                started = clock()
            if dropout is not None:
                dropout.begin_step(step)
            indices = order.indices(point * (steps_a_point + 1) + repeat)
            batch = collate(data, indices.tolist(), decoder_start=decoder_start).to(exits.device)
            with torch.autocast(exits.device.type, torch.bfloat16, enabled=enabled):
                states = exits.states(batch.inputs)
                early_exit_backward(exits.head, states, batch.targets, weights)
        if exits.device.type == "cuda":
            torch.cuda.synchronize()
        spent += clock() - started
    if dropout is not None:
        dropout.remove()
    model.zero_grad()
    model.train(was_training)
    torch.set_rng_state(random_state)
    return spent / (points * steps_a_point)
