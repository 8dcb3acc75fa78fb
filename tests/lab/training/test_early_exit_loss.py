"""The early-exit loss: scales and curricula by hand, gradients against the plain formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from eecore.errors import TrainingError
from eecore.lab.training import (
    EarlyExitLoss,
    ExitModel,
    LastLayerLoss,
    Targets,
    collate,
    weighted_exit_loss,
)
from eecore.lab.training.early_exit_loss import layer_scale


def test_scales_by_hand() -> None:
    # Five layers, e_scale = 1: 0, 0+1, 0+1+2, 0+1+2+3, then 4 + (0+1+2+3).
    assert [layer_scale(layer, 5, 1.0) for layer in range(5)] == [0, 1, 3, 6, 10]
    assert [layer_scale(layer, 5, 0.0) for layer in range(5)] == [0, 0, 0, 0, 4]
    # Eight layers, e_scale = 0.2: the others 0.2 * (0+1+3+6+10+15+21) = 11.2, the last 7 + 4.2.
    assert sum(layer_scale(layer, 8, 0.2) for layer in range(7)) == pytest.approx(11.2)
    assert layer_scale(7, 8, 0.2) == pytest.approx(11.2)
    weights = EarlyExitLoss(0.2, "all").weights(0, 10, 8)
    assert weights[-1] == pytest.approx(0.5)
    assert sum(weights) == pytest.approx(1)
    assert EarlyExitLoss(1.0, "all").weights(3, 10, 5) == pytest.approx((0, 0.05, 0.15, 0.3, 0.5))


def test_the_rotational_curriculum_by_hand() -> None:
    # R = 2 over five layers: even layers at even steps, odd ones at odd steps, the last always.
    loss = EarlyExitLoss(1.0, "rotational", 2)
    even, odd = (0, 0, 3 / 13, 0, 10 / 13), (0, 1 / 17, 0, 6 / 17, 10 / 17)
    for step in range(6):
        assert loss.weights(step, 6, 5) == pytest.approx((even, odd)[step % 2])
    # Each layer below the last is on once every R steps.
    wide = EarlyExitLoss(1.0, "rotational", 3)
    for layer in range(4):
        assert sum(wide.enabled(layer, step, 100, 5) for step in range(30)) == 10
    assert all(wide.enabled(4, step, 100, 5) for step in range(30))


def test_the_gradual_curriculum_by_hand() -> None:
    # Four layers, 80 steps: one more layer every T/2L = 10 steps, all on from step 30.
    loss = EarlyExitLoss(1.0, "gradual")
    expected = {0: [3], 9: [3], 10: [2, 3], 19: [2, 3], 20: [1, 2, 3], 30: [0, 1, 2, 3]}
    for step, layers in {**expected, 79: [0, 1, 2, 3]}.items():
        assert [layer for layer in range(4) if loss.enabled(layer, step, 80, 4)] == layers
    # e = 0, 1, 3, 6: layers 2 and 3 share 3 : 6.
    assert loss.weights(10, 80, 4) == pytest.approx((0, 0, 1 / 3, 2 / 3))
    assert loss.weights(0, 80, 4) == (0, 0, 0, 1)


def test_the_last_layer_alone() -> None:
    assert LastLayerLoss().weights(5, 10, 3) == (0, 0, 1)
    assert EarlyExitLoss(1.0, "all").weights(0, 10, 1) == (
        1,
    )  # e(0) = 0, and nothing else is there


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"e_scale": -0.1}, r"e_scale: expected 0\.\.1, got -0\.1"),
        ({"curriculum": "cosine"}, "curriculum: expected all, rotational or gradual, got 'cosine'"),
        ({"curriculum": "rotational"}, "rotation: expected 1 or more with .*rotation=None"),
        ({"curriculum": "gradual", "rotation": 2}, "rotation: .* None without, got .*rotation=2"),
        ({"curriculum": "rotational", "rotation": 0}, "rotation: expected 1 or more .*rotation=0"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        EarlyExitLoss(**settings)


SETTINGS: dict[str, dict[str, Any]] = {
    "gemma2": {"final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.3},
    "smollm3": {"pad_token_id": 0},
}


@pytest.mark.parametrize(
    "family",
    ["llama", "mistral", "qwen2", "qwen3", "t5", "gemma2", "granite", "olmo2", "smollm3"],
)
def test_the_last_exit_is_the_model_itself(make_model: Any, pairs: Any, family: str) -> None:
    model = make_model(family, **SETTINGS.get(family, {}))
    exits = ExitModel.of(model)
    batch = collate(pairs, range(5), decoder_start=0 if family == "t5" else None)
    states = exits.states(batch.inputs)
    assert len(states) == 4
    torch.testing.assert_close(exits.head(states[-1]), model(**batch.inputs).logits)
    recorded = model(**batch.inputs, output_hidden_states=True)
    name = "decoder_hidden_states" if family == "t5" else "hidden_states"
    for state, expected in zip(states[:-1], recorded[name][1:-1], strict=True):
        torch.testing.assert_close(state, expected)  # the last one of transformers is normed


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_loss_and_gradients_are_those_of_the_formula(
    make_model: Any, pairs: Any, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Also where the logits of all exits but the last are computed again."""
    weights = EarlyExitLoss(1.0, "all").weights(0, 10, 4)
    decoder_start = 0 if family == "t5" else None
    batch = collate(pairs, [3, 1, 2], decoder_start=decoder_start)
    gradients, losses = [], []
    for way in ("by hand", 1 << 20, 1):
        model = make_model(family)
        exits = ExitModel.of(model)
        states = exits.states(batch.inputs)
        if way == "by hand":
            # A sequence at a time: its own logits where the next token belongs to the target.
            width = states[0].shape[1]
            total = torch.zeros(())
            for state, weight in zip(states, weights, strict=True):
                logits, wanted = [], []
                for row, index in enumerate([3, 1, 2]):
                    tokens, prompt_len = pairs.sequence(index)
                    first = 0 if family == "t5" else prompt_len - 1
                    target = tokens[prompt_len:]
                    assert first + len(target) <= width
                    logits.append(exits.head(state)[row, first : first + len(target)])
                    wanted.append(target)
                total = total + weight * cross_entropy(torch.cat(logits), torch.cat(wanted))
            total.backward()
        else:
            monkeypatch.setattr("eecore.lab.training.early_exit_loss.MAX_LOGITS", way)
            total, by_layer = weighted_exit_loss(exits.head, states, batch.targets, weights)
            assert sorted(by_layer) == [1, 2, 3]  # the first layer weighs nothing: no head is run
            total.backward()
        losses.append(total.detach())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for loss, found in zip(losses[1:], gradients[1:], strict=True):
        torch.testing.assert_close(loss, losses[0])
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(gradient, found[name], msg=name)


def test_weights_must_fit_the_layers() -> None:
    states = [torch.zeros(1, 2, 3)] * 2
    targets = Targets(torch.tensor([0]), torch.tensor([1]))
    for weights in ((1.0,), (0.0, 0.0)):
        with pytest.raises(TrainingError, match="weights: expected 2, one a layer and not all"):
            weighted_exit_loss(lambda state: state, states, targets, weights)


def test_a_model_that_is_not_known_is_named(make_model: Any) -> None:
    with pytest.raises(TrainingError, match=r"expected one of LlamaForCausalLM, .* got Linear"):
        ExitModel.of(torch.nn.Linear(2, 2))
    with pytest.raises(TrainingError, match="got LlamaModel"):
        ExitModel.of(make_model().model)


def test_adapters_are_looked_through(make_model: Any, pairs: Any) -> None:
    import peft

    plain = make_model()
    batch = collate(pairs, range(3))
    expected = ExitModel.of(plain).states(batch.inputs)
    wrapped = peft.get_peft_model(plain, peft.LoraConfig(target_modules="all-linear"))
    exits = ExitModel.of(wrapped)
    assert exits.model is wrapped
    assert exits.num_layers == 4
    for state, other in zip(exits.states(batch.inputs), expected, strict=True):
        torch.testing.assert_close(state, other)
    prompts = peft.get_peft_model(
        make_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(TrainingError, match=r"expected LoRA .* got .*PROMPT_TUNING"):
        ExitModel.of(prompts)
