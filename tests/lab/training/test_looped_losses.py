"""Training of a looped model: the losses by hand, the model against the oracle, both stages."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import eecore
from eecore.cli.app import run
from eecore.errors import TrainingError
from eecore.lab.training import (
    ExitModel,
    GateLoss,
    LayerDropout,
    LoopedLoss,
    TrainingConfig,
    load_starting_point,
    train,
)
from eecore.lab.training.looped_loss import exit_log_probabilities
from looped_models import ENDS, LoopedText, write_looped
from tiny_models import write_byte_tokenizer
from tiny_training import make_model, make_pairs

GATES = torch.tensor([[0.0, 2.0], [-1.0, 0.5], [9.0, -9.0]])  # the last loop's do not count
LOSSES = torch.tensor([[1.0, 0.2], [0.4, 0.3], [0.5, 0.1]])


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_exit_probabilities_and_the_loss_by_hand() -> None:
    found = exit_log_probabilities(GATES).exp()
    loss, tilted = LoopedLoss(0.1).of(LOSSES, GATES), LoopedLoss(0.1, 2.0).of(LOSSES, GATES)
    for token, (first, second) in enumerate(((0.0, -1.0), (2.0, 0.5))):
        p = [sigmoid(first), (1 - sigmoid(first)) * sigmoid(second)]
        p.append(1 - sum(p))
        assert found[:, token].tolist() == pytest.approx(p, abs=1e-6)
        entropy = -sum(each * math.log(each) for each in p)
        expected = sum(x * float(y) for x, y in zip(p, LOSSES[:, token], strict=True))
        assert float(loss[token]) == pytest.approx(expected - 0.1 * entropy, abs=1e-6)
        later = sum(each * 2 * math.log(number) for number, each in enumerate(p, 1))
        assert float(tilted[token]) == pytest.approx(expected - 0.1 * (entropy + later), abs=1e-6)


def test_a_tilt_leaves_equal_loops_with_its_shares() -> None:
    gates = torch.zeros(3, 1, requires_grad=True)
    optimizer = torch.optim.Adam([gates], lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        LoopedLoss(0.5, 1.0).of(torch.ones(3, 1), gates).sum().backward()
        optimizer.step()
    shares = exit_log_probabilities(gates.detach()).exp()[:, 0].tolist()
    assert shares == pytest.approx([1 / 6, 2 / 6, 3 / 6], abs=1e-3)


def test_the_gate_learns_whether_a_later_loop_gains() -> None:
    loss = GateLoss(slope=10.0, margin=0.05).of(LOSSES, GATES)
    gains = [[1.0 - 0.4, 0.4 - 0.5], [0.2 - 0.1, 0.3 - 0.1]]
    for token, of_token in enumerate(gains):
        terms = []
        for loop, gain in enumerate(of_token):
            goes_on = sigmoid(10 * (gain - 0.05))
            stops = sigmoid(float(GATES[loop, token]))
            terms.append(-goes_on * math.log(1 - stops) - (1 - goes_on) * math.log(stops))
        assert float(loss[token]) == pytest.approx(sum(terms) / 2, abs=1e-5)


@pytest.fixture
def started(tmp_path: Path) -> Any:
    """A small looped model of transformers, with its tokenizer."""
    write_looped(tmp_path / "model", vocab_size=260, eos_token_id=257)
    write_byte_tokenizer(tmp_path / "model")
    return load_starting_point(tmp_path / "model")


def test_its_states_are_those_of_the_oracle(tmp_path: Path) -> None:
    tensors = write_looped(tmp_path / "model", eos_token_id=1, vocab_size=260)
    write_byte_tokenizer(tmp_path / "model")
    exits = ExitModel.of(load_starting_point(tmp_path / "model").model)
    assert tuple(exits.exit_layers) == ENDS
    tokens, text = [5, 9, 2, 7], LoopedText(tensors)
    wanted = [torch.stack(states) for states in zip(*map(text.read, tokens), strict=True)]
    with torch.no_grad():
        found = exits.states({"input_ids": torch.tensor([tokens])})
        for state, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(state[0], expected, rtol=1e-4, atol=1e-4)
            gate = torch.sigmoid(exits.gate(state[0]))[:, 0].tolist()
            assert gate == pytest.approx([text.exit_probability(each) for each in expected], 1e-4)
        packed = {"input_ids": torch.tensor([[8, 3, *tokens]])}
        packed["position_ids"] = torch.tensor([[0, 1, 0, 1, 2, 3]])
        torch.testing.assert_close(
            exits.states(packed)[-1][0, 2:], wanted[-1], rtol=1e-4, atol=1e-4
        )


def test_new_weights_keep_the_state_that_a_loop_begins_with(tmp_path: Path) -> None:
    """Norms of what sublayers give are small, as many as there are; those of a checkpoint stay."""
    write_looped(tmp_path / "model", vocab_size=260, eos_token_id=257)
    write_byte_tokenizer(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    after = "input_layernorm_2.weight", "post_attention_layernorm_2.weight"
    new = load_starting_point(config, tokenizer=tmp_path / "model").model.state_dict()
    for name, weight in new.items():
        if "norm" in name:
            value = (2 * ENDS[-1]) ** -0.5 if name.endswith(after) else 1.0
            assert weight.tolist() == pytest.approx([value] * len(weight)), name
    stored = write_looped(tmp_path / "model", vocab_size=260, eos_token_id=257)
    loaded = load_starting_point(tmp_path / "model").model.state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in stored.items())


def test_two_stages_from_the_command_to_exits(tmp_path: Path) -> None:
    write_looped(tmp_path / "model", vocab_size=260, eos_token_id=257)
    write_byte_tokenizer(tmp_path / "model")
    lines = [{"input": f"{word}=", "target": word[::-1]} for word in ("ab", "cde", "fg", "hij")]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))

    def stage(begin: str, out: str, *options: str) -> dict[str, torch.Tensor]:
        words = ["train", str(tmp_path / begin), "--data", str(data), "--out", str(tmp_path / out)]
        options = (*options, "--steps", "3", "--batch-size", "4", "--device", "cpu")
        assert run([*words, *options, "--held-out", str(data), "--learning-rate", "0.01"]) == 0
        return load_starting_point(tmp_path / out).model.state_dict()

    loops = stage("model", "loops", "--loss", "looped", "--entropy", "0.5", "--tilt", "1")
    gated = stage("loops", "gated", "--loss", "gate")
    changed = {name for name, weight in gated.items() if not torch.equal(weight, loops[name])}
    assert changed == {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}
    about = json.loads((tmp_path / "gated" / "exits.json").read_text())
    assert about["num_layers"] == ENDS[-1]
    assert len(about["held_out"]["agreement"]) == len(ENDS)
    model = eecore.load(tmp_path / "gated", device="cpu", dtype="float32")
    source = model.network.source
    assert source is not None
    assert source.exit_agreement(model.config.exit_layers) is not None
    exit = eecore.ConfidentExit(0.3, "gate")
    outputs = eecore.generate(model, ["ab=", "cde="], exit=exit, max_tokens=8)
    assert {layer for out in outputs for layer in out.exit_layers} <= set(ENDS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_dropout": LayerDropout(0.2)}, "layer_dropout: expected None for a looped model"),
        (
            {"gradient_checkpointing": True},
            "gradient_checkpointing: expected False for a looped model, got True",
        ),
    ],
)
def test_settings_that_do_not_go_with_loops(
    started: Any, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    config = TrainingConfig(**{"steps": 1, "loss": LoopedLoss(), "layer_dropout": None, **settings})
    with pytest.raises(TrainingError, match=message):
        train(started.model, make_pairs(), config, tmp_path / "out")


def test_losses_of_loops_are_for_looped_models(tmp_path: Path) -> None:
    for loss in (LoopedLoss(), GateLoss()):
        config = TrainingConfig(steps=1, loss=loss, layer_dropout=None)
        with pytest.raises(TrainingError, match=r"loss: expected .* for LlamaForCausalLM"):
            train(make_model(), make_pairs(), config, tmp_path / "out")


@pytest.mark.parametrize("name", ["--entropy", "--tilt"])
def test_settings_of_the_looped_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    words = ["train", str(tmp_path), "--data", "x", "--out", str(tmp_path / "out")]
    assert run([*words, "--loss", "gate", name, "1"]) == 2
    assert f"{name}: expected none with --loss gate" in capsys.readouterr().err
