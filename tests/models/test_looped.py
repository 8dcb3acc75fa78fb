"""Ouro, whose stack of layers runs several times: beside plain PyTorch, whole and with exits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import devices
import eecore
import emulated
from devices import as_on_cuda
from eecore import (
    ConfidentExit,
    EngineConfig,
    ExitClassifier,
    ExitError,
    FixedExit,
    Full,
    ModelError,
    SamplingParams,
    SelfSpeculative,
)
from eecore.calibration.exit_scores import Scored, forced_states
from eecore.decoding import chunk_pass
from eecore.models import LlamaModel
from looped_models import (
    CONFIG,
    ENDS,
    LOOPS,
    PROMPTS,
    LoopedText,
    Measure,
    cosine,
    decode,
    looped_tensors,
    outputs,
    softmax_gap,
    tokens,
    write_looped,
)

pytestmark = pytest.mark.usefixtures("one_thread")

GATE = ConfidentExit(measure="gate")
LIMITS: dict[str, Any] = {"dtype": "float32", "kv_cache_tokens": 512}
THRESHOLDS = [0.35, 0.6]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("looped")
    write_looped(place)
    return place


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return looped_tensors()


@pytest.fixture(scope="module")
def model(directory: Path) -> eecore.Model:
    return devices.load(directory, **LIMITS)


def network_of(model: eecore.Model) -> LlamaModel:
    assert isinstance(model.network, LlamaModel)
    return model.network


def test_states_logits_and_the_gate_of_every_loop(
    model: eecore.Model, tensors: dict[str, Tensor]
) -> None:
    network, text = network_of(model), LoopedText(tensors)
    expected = [text.read(token) for token in PROMPTS[0]]
    gate = network.gate
    assert gate is not None
    found = list(forced_states(network, Scored(PROMPTS[0]), network.config.exit_layers))
    assert tuple(end for end, _ in found) == ENDS == tuple(network.config.exit_layers)
    for loop, (_, states) in enumerate(found):
        wanted = torch.stack([of_token[loop] for of_token in expected])
        torch.testing.assert_close(states, wanted, rtol=1e-4, atol=1e-4)
        logits = torch.stack([text.logits(state) for state in wanted])
        torch.testing.assert_close(network.logits(states), logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(network.confidence(states).token, logits.argmax(-1))
        gates = torch.tensor([text.exit_probability(state) for state in wanted])
        torch.testing.assert_close(gate(states), gates, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("loop", range(1, LOOPS))
def test_a_fixed_exit_is_the_model_of_fewer_loops(
    tmp_path: Path, model: eecore.Model, tensors: dict[str, Tensor], loop: int
) -> None:
    got = tokens(model, FixedExit(ENDS[loop - 1]))
    assert got == [decode(tensors, prompt, 10, last_loop=loop)[0] for prompt in PROMPTS]
    write_looped(tmp_path, total_ut_steps=loop)
    assert tokens(devices.load(tmp_path, **LIMITS), Full()) == got


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_the_gate_exits_each_row_by_itself(
    model: eecore.Model, tensors: dict[str, Tensor], threshold: float
) -> None:
    policy = ConfidentExit(threshold, "gate")
    together = outputs(model, policy)
    alone = [outputs(model, policy, prompts=[prompt])[0] for prompt in PROMPTS]
    for prompt, *found in zip(PROMPTS, together, alone, strict=True):
        wanted, loops, confidences = decode(tensors, prompt, 10, threshold=threshold)
        for out in found:
            assert out.token_ids == wanted
            assert out.exit_layers == [ENDS[loop - 1] for loop in loops]
            assert out.confidences[1:] == pytest.approx(confidences[1:], abs=1e-4)
    assert len({layer for out in together for layer in out.exit_layers[1:]}) > 1


WEIGHT = torch.randn(2, CONFIG["hidden_size"], generator=torch.Generator().manual_seed(3)) / 4
CLASSIFIER = ExitClassifier(WEIGHT, torch.tensor([0.1, -0.1]))


def classified(_text: LoopedText, states: list[Tensor]) -> float:
    """The classifier's probability of exiting, of the normed state after the loop."""
    return float((WEIGHT @ states[-1] + CLASSIFIER.tensors[1]).softmax(0)[1])


@pytest.mark.parametrize(
    ("policy", "measure"),
    [
        (ConfidentExit(0.05), softmax_gap),
        (ConfidentExit(0.2, "state"), cosine),
        (ConfidentExit(0.6, "classifier", classifier=CLASSIFIER), classified),
    ],
    ids=["softmax", "state", "classifier"],
)
def test_other_measures_exit_at_the_ends_of_loops(
    model: eecore.Model, tensors: dict[str, Tensor], policy: ConfidentExit, measure: Measure
) -> None:
    found = outputs(model, policy)
    for prompt, out in zip(PROMPTS, found, strict=True):
        wanted, loops, confidences = decode(
            tensors, prompt, 10, threshold=float(policy.threshold or 0), measure=measure
        )
        assert out.token_ids == wanted
        assert out.exit_layers == [ENDS[loop - 1] for loop in loops]
        assert out.confidences[1:] == pytest.approx(confidences[1:], abs=1e-4)
    assert len({layer for out in found for layer in out.exit_layers[1:]}) > 1
    mixed = [policy, ConfidentExit(0.6, "gate"), Full()]
    sampling = SamplingParams(max_tokens=10, ignore_eos=True)
    beside = eecore.generate(model, PROMPTS, exit=mixed, sampling=sampling)
    expected = [outputs(model, exit)[i] for i, exit in enumerate(mixed)]
    assert [out.token_ids for out in beside] == [out.token_ids for out in expected]
    assert [out.exit_layers for out in beside] == [out.exit_layers for out in expected]


@pytest.mark.parametrize(
    "exit",
    [ConfidentExit(0.35, "gate"), SelfSpeculative(ENDS[0], 2)],
    ids=["gate", "drafts"],
)
def test_the_cuda_path_gives_the_tokens_of_the_cpu(
    directory: Path, exit: eecore.Exit, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = outputs(eecore.load(directory, device="cpu", **LIMITS), exit, max_tokens=4)
    emulated.route(monkeypatch)
    got = outputs(as_on_cuda(eecore.load(directory, device="cpu", **LIMITS)), exit, max_tokens=4)
    assert [out.token_ids for out in got] == [out.token_ids for out in expected]
    assert [out.exit_layers for out in got] == [out.exit_layers for out in expected]


@pytest.mark.parametrize("is_program", [True, False])
def test_a_prompt_beside_rows_that_decode_is_the_same_on_the_cuda_path(
    directory: Path, is_program: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks run whole where they are programs, and loop by loop where not."""
    expected = outputs(eecore.load(directory, device="cpu", **LIMITS), Full(), max_tokens=6)
    emulated.route(monkeypatch)
    if not is_program:
        monkeypatch.setattr(chunk_pass, "MAX_LAYER_WORK", 0)
    model = as_on_cuda(eecore.load(directory, device="cpu", **LIMITS))
    engine = devices.engine_of(model, EngineConfig(512, max_prefill_chunk=5))
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    for number in (1, 0):
        engine.add_request(PROMPTS[number], exit=Full(), sampling=sampling, request_id=str(number))
        steps = [engine.step()]
    while not engine.requests["0"].output_ids:
        steps.append(engine.step())
    assert len(steps) == (2 if is_program else 2 * LOOPS)
    every = [*itertools.chain(*steps), *engine.run()]
    found = {step.request_id: step.output.token_ids for step in every if step.output is not None}
    assert found == {str(number): expected[number].token_ids for number in (1, 0)}


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (FixedExit(3), r"FixedExit.exit_layer: expected ends of loops, 2, 4, 6, for a model of 6"),
        (SelfSpeculative(6), r"SelfSpeculative.exit_layer: expected ends of loops, 2, 4, for a"),
        (ConfidentExit(exit_points=(1,)), r"exit_points: expected ends of loops, .* got 1"),
        (ConfidentExit(min_exit_layer=7), r"min_exit_layer: expected 1..6 for a model of 6"),
    ],
)
def test_exits_are_the_ends_of_loops(
    model: eecore.Model, policy: eecore.Exit, message: str
) -> None:
    with pytest.raises(ExitError, match=message):
        outputs(model, policy)


def test_a_gate_and_loops_are_asked_of_models_that_have_them(tmp_path: Path) -> None:
    write_looped(tmp_path, total_ut_steps=1)
    once = devices.load(tmp_path, **LIMITS)
    with pytest.raises(ExitError, match="measure: expected a model with several loops and an"):
        outputs(once, GATE)
    with pytest.raises(ExitError, match="classifier: expected one with measure='classifier'"):
        ConfidentExit(measure="classifier")


def test_a_checkpoint_without_its_gate_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = write_looped(tmp_path)
    del tensors["model.early_exit_gate.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.early_exit_gate\.weight"):
        eecore.load(tmp_path)


def test_a_draft_head_is_refused(tmp_path: Path, directory: Path) -> None:
    with pytest.raises(eecore.errors.ModelError, match="expected a model without loops for a head"):
        eecore.load(directory, device="cpu", draft_head=tmp_path)
