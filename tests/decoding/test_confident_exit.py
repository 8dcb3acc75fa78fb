"""ConfidentExit against Algorithm 1 in plain PyTorch, and the work that it saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import eecore
from devices import Traced, cpu_only, engine_of
from eecore import ConfidentExit, ExitClassifier
from reference_decoding import ReferenceModel
from tiny_models import random_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_TOKENS = 12
PROMPTS = random_prompts(3, 11, 1)


def linear_classifier(hidden_size: int = 64) -> ExitClassifier:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(2, hidden_size, generator=generator) * 0.05
    return ExitClassifier(weight, torch.tensor([0.1, -0.1]))


def mlp_classifier(hidden_size: int = 64) -> ExitClassifier:
    generator = torch.Generator().manual_seed(6)
    inner = torch.randn(11, hidden_size, generator=generator) * 0.05
    outer = torch.randn(2, 11, generator=generator)
    return ExitClassifier(inner, torch.linspace(-1, 1, 11), outer, torch.tensor([0.2, 0.0]))


MEASURES: dict[str, tuple[float, dict[str, Any]]] = {
    "softmax": (0.3, {}),
    "state": (0.8, {}),
    "linear": (0.55, {"measure": "classifier", "classifier": linear_classifier()}),
    "mlp": (0.5, {"measure": "classifier", "classifier": mlp_classifier()}),
}
SETTINGS: dict[str, Callable[[float], dict[str, Any]]] = {
    "plain": lambda threshold: {"threshold": threshold},
    "decay": lambda threshold: {"threshold": threshold, "decay_tau": 4.0},
    "thresholds": lambda threshold: {"threshold": 1.0, "thresholds": {1: threshold, 3: 0.0}},
    "exit_points": lambda threshold: {"threshold": threshold, "exit_points": (2, 4)},
    "min_exit_layer": lambda threshold: {"threshold": threshold * 0.8, "min_exit_layer": 3},
}


def policy_of(measure: str, setting: str, batch: str) -> ConfidentExit:
    threshold, fields = MEASURES[measure]
    fields = {"measure": measure, **fields} if measure in ("softmax", "state") else fields
    return ConfidentExit(batch=batch, **fields, **SETTINGS[setting](threshold))


def check_against_reference(
    model: eecore.Model, reference: ReferenceModel, policy: ConfidentExit
) -> list[eecore.Output]:
    outputs = eecore.generate(model, PROMPTS, exit=policy, max_tokens=MAX_TOKENS, ignore_eos=True)
    expected = reference.generate_confident(PROMPTS, policy, MAX_TOKENS)
    for output, sequence in zip(outputs, expected, strict=True):
        assert output.token_ids == sequence.new_tokens
        assert output.exit_layers == sequence.exit_layers
        assert output.confidences == pytest.approx(sequence.confidences, abs=1e-4)
        assert output.stats.layers_run == sequence.executions
        filled = sum(reference.num_layers - layer for layer in sequence.exit_layers)
        assert output.stats.layers_filled == filled
        assert output.stats.mean_exit_layer == sum(sequence.exit_layers) / MAX_TOKENS
    return outputs


@pytest.mark.parametrize("batch", ["each", "all"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("measure", MEASURES)
def test_algorithm_1(
    tiny: eecore.Model, reference: ReferenceModel, measure: str, setting: str, batch: str
) -> None:
    outputs = check_against_reference(tiny, reference, policy_of(measure, setting, batch))
    depths = {layer for output in outputs for layer in output.exit_layers}
    if batch == "each":
        assert len(depths) > 1, "the threshold must tell tokens apart"
    else:
        assert len({tuple(output.exit_layers) for output in outputs}) == 1


def stretches(traced: Traced) -> Counter[tuple[int, int]]:
    """How often each stretch of layers ran."""
    return Counter((call.begin_layer, call.end_layer) for call in traced.of("decoder_layers"))


@cpu_only
@pytest.mark.parametrize("batch", ["each", "all"])
@pytest.mark.parametrize("exit_layer", [1, 2, 3])
def test_work_is_really_saved(tiny: eecore.Model, exit_layer: int, batch: str) -> None:
    """If all rows exit at layer e, a token takes e layers and an iteration one fill."""
    traced = Traced()
    engine = engine_of(tiny, run=traced)
    policy = ConfidentExit(0.0, min_exit_layer=exit_layer, batch=batch)
    sampling = eecore.SamplingParams(max_tokens=6, ignore_eos=True)
    for prompt in PROMPTS:
        engine.add_request(prompt, exit=policy, sampling=sampling)
    first = engine.step()
    assert [step.exit_layers for step in first] == [[4]] * len(PROMPTS)

    outputs = [step.output for step in engine.run() if step.output]
    assert [call.num_tokens for call in traced.of("kv_fill")] == [len(PROMPTS)] * 5
    assert stretches(traced) == {(0, exit_layer): 5}
    for output in outputs:
        assert output.exit_layers == [4] + [exit_layer] * 5
        assert output.stats.layers_run == 5 * exit_layer
        assert output.stats.layers_filled == 5 * (4 - exit_layer)
        assert output.stats.fill_calls == 5


def test_a_confidence_of_nan_decides_nothing(tiny: eecore.Model) -> None:
    broken = ExitClassifier(torch.full((2, 64), torch.nan))
    policy = ConfidentExit(0.0, measure="classifier", classifier=broken)
    (output,) = eecore.generate(tiny, [[1, 2, 3]], exit=policy, max_tokens=4, ignore_eos=True)
    assert output.finish_reason == "error"
    assert output.error is not None
    assert output.error.startswith("expected finite logits and confidences from the model")
    assert output.exit_layers == [4]


def test_all_means_all_rows_that_asked_for_it(tiny: eecore.Model) -> None:
    """Neighbours with Full or batch="each" neither hold back an "all" group nor exit with it."""
    never = ConfidentExit(1.0, batch="each")
    together = ConfidentExit(0.0, min_exit_layer=2, batch="all")
    outputs = eecore.generate(
        tiny,
        PROMPTS,
        exit=[together, eecore.Full(), together],
        max_tokens=5,
        ignore_eos=True,
    )
    assert [o.exit_layers for o in outputs] == [[4, 2, 2, 2, 2], [4] * 5, [4, 2, 2, 2, 2]]
    outputs = eecore.generate(
        tiny, PROMPTS[:2], exit=[never, together], max_tokens=5, ignore_eos=True
    )
    assert [o.exit_layers for o in outputs] == [[4] * 5, [4, 2, 2, 2, 2]]
