"""Layer dropout: its rates, the layers it leaves out, and the untouched rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eecore.errors import TrainingError
from eecore.lab.training import ExitModel, LayerDropout, drop_layers

IDS = torch.randint(3, 40, (6, 7), generator=torch.Generator().manual_seed(1))


class AddOne(nn.Module):
    """A layer that adds a learnt number, and remembers how many rows it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))
        self.rows: list[int] = []

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        self.rows.append(len(hidden_states))
        assert all(len(v) in (1, len(hidden_states)) for v in kwargs.values() if v is not None)
        return hidden_states + self.one


def test_rates_by_hand() -> None:
    # D(l) = exp(l ln2 / 4) - 1 = 2**(l/4) - 1 over five layers.
    dropout = LayerDropout(0.2)
    expected = [0.0, 0.2 * 0.1892071150, 0.2 * 0.4142135624, 0.2 * 0.6817928305, 0.2]
    for step in (0, 7, 99):
        rates = [dropout.rate(layer, 5, step, 100) for layer in range(5)]
        assert rates == pytest.approx(expected, abs=1e-9)
    # From scratch S(t) = 2**(t/(T-1)) - 1: 0 at the first step, sqrt(2) - 1 half-way, 1 at last.
    growing = LayerDropout(0.1, "exponential")
    assert growing.rate(4, 5, 0, 101) == 0.0
    assert growing.rate(4, 5, 50, 101) == pytest.approx(0.1 * 0.4142135624)
    assert growing.rate(2, 5, 50, 101) == pytest.approx(0.1 * 0.4142135624**2)
    assert growing.rate(4, 5, 100, 101) == pytest.approx(0.1)
    assert LayerDropout(0.5).rate(0, 1, 0, 1) == 0.0  # a single layer is the first


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_rate": 1.5}, r"max_rate: expected 0\.\.1, got 1\.5"),
        ({"max_rate": float("nan")}, r"max_rate: expected 0\.\.1, got nan"),
        ({"over_time": "linear"}, "over_time: expected constant or exponential, got 'linear'"),
    ],
)
def test_wrong_rates_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        LayerDropout(**settings)


def test_dropped_samples_are_not_computed_and_keep_their_state() -> None:
    layers = [AddOne() for _ in range(3)]
    x = torch.zeros(400, 2, 4)
    with drop_layers(layers, LayerDropout(0.5), num_steps=10, seed=3) as dropout:
        dropout.begin_step(4)
        for layer in layers:
            x = layer(x, attention_mask=None, position_ids=torch.zeros(1, 2))
    # Each sample counts the layers that it went through, and every layer saw those rows alone.
    assert x[:, 0, 0].sum() == sum(rows for layer in layers for rows in layer.rows)
    assert (x == x[:, :1, :1]).all()
    assert layers[0].rows == [400]
    assert layers[1].rows[0] == pytest.approx(400 * (1 - 0.5 * 0.41421), abs=40)
    assert layers[2].rows[0] == pytest.approx(200, abs=40)
    with drop_layers(layers[:2], LayerDropout(1.0), num_steps=1):  # all samples drop the second
        layers[1](layers[0](torch.zeros(8, 1, 1)))
    assert (layers[0].rows[1:], layers[1].rows[1:]) == ([8], [])


def test_what_a_step_drops_depends_on_seed_and_step_alone() -> None:
    def rows(steps: list[int], seed: int) -> list[int]:
        layers = [AddOne(), AddOne()]
        with drop_layers(layers, LayerDropout(0.5), num_steps=100, seed=seed) as dropout:
            for step in steps:
                dropout.begin_step(step)
                layers[1](torch.zeros(1000, 1, 1))
        return layers[1].rows

    assert rows([3, 4, 5], 0)[1:] == rows([4, 5], 0)
    assert rows([3], 0) != rows([4], 0)
    assert rows([3], 0) != rows([3], 1)


def test_eval_mode_and_removal_leave_the_layers_alone() -> None:
    layers = [AddOne(), AddOne()]
    dropout = drop_layers(layers, LayerDropout(1.0), num_steps=1)
    with pytest.raises(TrainingError, match="layers that nothing has wrapped, got a AddOne"):
        drop_layers(layers, LayerDropout(1.0), num_steps=1)
    layers[1].eval()
    assert (layers[1](torch.zeros(3, 1, 1)) == 1).all()
    layers[1].train()
    assert (layers[1](torch.zeros(3, 1, 1)) == 0).all()
    dropout.remove()
    assert (layers[1](torch.zeros(3, 1, 1)) == 1).all()
    assert "forward" not in vars(layers[1])


def _samples_one_by_one(
    model: Any, ids: Tensor, kept: list[list[bool]], given: dict[str, Tensor]
) -> Tensor:
    """The outputs if each sample runs alone through a model of its kept layers."""
    rows = []
    for sample in range(len(ids)):
        all_layers = model.model.layers
        chosen = [layer for layer, row in zip(all_layers, kept, strict=True) if row[sample]]
        model.model.layers = nn.ModuleList(chosen)
        model.config.num_hidden_layers = len(chosen)
        own = {name: value[sample : sample + 1] for name, value in given.items()}
        rows.append(model(ids[sample : sample + 1], use_cache=False, **own).logits)
        model.model.layers = all_layers
        model.config.num_hidden_layers = len(all_layers)
    return torch.cat(rows)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_model_with_dropped_layers_is_each_sample_through_its_own_layers(
    make_model: Any, family: str, masked: bool
) -> None:
    model = make_model(family).train()
    mask = torch.ones_like(IDS)
    mask[1, :3] = 0  # padded on the left: masks and positions differ by sample
    mask[4, :1] = 0
    # Broadcast over the batch without these, by sample with them.
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"attention_mask": mask, "position_ids": positions} if masked else {}
    rates = LayerDropout(0.7)
    with drop_layers(model.model.layers, rates, num_steps=1, seed=5):
        logits = model(IDS, use_cache=False, **given).logits
    generator = torch.Generator().manual_seed(5 * 1_000_003)
    seeds = torch.randint(1 << 62, (4,), generator=generator).tolist()
    kept = [[True] * 6] + [
        (
            torch.rand(6, generator=generator.manual_seed(seeds[layer]))
            >= rates.rate(layer, 4, 0, 1)
        ).tolist()
        for layer in range(1, 4)
    ]
    assert not all(map(all, kept))
    expected = _samples_one_by_one(model, IDS, kept, given)
    where = mask.bool() if masked else torch.ones_like(mask).bool()
    torch.testing.assert_close(logits[where], expected[where], atol=1e-4, rtol=1e-4)


def test_t5_blocks_hand_on_their_position_biases(make_model: Any) -> None:
    model = make_model("t5").train()
    exits = ExitModel.of(model)
    inputs = {
        "input_ids": IDS,
        "attention_mask": torch.ones_like(IDS),
        "decoder_input_ids": IDS[:, :4],
    }
    whole = exits.states(inputs)[-1]
    with (
        drop_layers(exits.layers, LayerDropout(0.8), num_steps=1),
        drop_layers(exits.encoder_layers, LayerDropout(0.8), num_steps=1, seed=1),
    ):
        dropped = exits.states(inputs)[-1]
        dropped.sum().backward()
        model.eval()
        again = exits.states(inputs)[-1]
    assert not torch.equal(whole, dropped)
    torch.testing.assert_close(whole, again)
    with drop_layers(exits.layers, LayerDropout(1.0), num_steps=1):
        model.train()
        states = exits.states(inputs)
    torch.testing.assert_close(states[-1], states[-2])


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_goes_with_it(make_model: Any, reentrant: bool) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = make_model().train()
        model.enable_input_require_grads()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with drop_layers(model.model.layers, LayerDropout(0.6), num_steps=1, seed=2):
            model(IDS, use_cache=False).logits.square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


def test_caches_are_refused(make_model: Any) -> None:
    model = make_model().train()
    with (
        drop_layers(model.model.layers, LayerDropout(1.0), num_steps=1),
        pytest.raises(TrainingError, match=r"expected no (cache|past_key_values), got .*use_cache"),
    ):
        model(IDS, use_cache=True)
