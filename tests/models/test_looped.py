"""Ouro, whose stack of layers runs several times: beside plain PyTorch, whole and with exits."""

from __future__ import annotations

import json
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
    Auto,
    ConfidentExit,
    DraftAndVerify,
    EngineConfig,
    ExitClassifier,
    ExitError,
    FixedExit,
    Full,
    ModelError,
    PromptLookup,
    SamplingParams,
    SelfSpeculative,
)
from eecore.calibration.exit_scores import Scored, forced_states
from eecore.models import KVCache, LlamaModel
from looped_models import (
    CONFIG,
    ENDS,
    LOOPS,
    PROMPTS,
    STACK,
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


def limited(model: eecore.Model, **limits: Any) -> eecore.Model:
    """The same model with an engine of other limits."""
    return eecore.Model(model.network, None, EngineConfig(**limits))


def test_states_logits_and_the_gate_of_every_loop(
    model: eecore.Model, tensors: dict[str, Tensor]
) -> None:
    network, text = network_of(model), LoopedText(tensors)
    expected = [text.read(token) for token in PROMPTS[0]]
    gate = network.gate
    assert gate is not None
    found = list(forced_states(network, Scored(PROMPTS[0]), network.config.exit_layers))
    assert tuple(end for end, _, _ in found) == ENDS == tuple(network.config.exit_layers)
    for loop, (_, _, states) in enumerate(found):
        wanted = torch.stack([of_token[loop] for of_token in expected])
        torch.testing.assert_close(states, wanted, rtol=1e-4, atol=1e-4)
        logits = torch.stack([text.logits(state) for state in wanted])
        torch.testing.assert_close(network.logits(states), logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(network.confidence(states).token, logits.argmax(-1))
        gates = torch.tensor([text.exit_probability(state) for state in wanted])
        torch.testing.assert_close(gate(states), gates, rtol=1e-4, atol=1e-4)


def test_weights_are_there_once_and_keys_of_each_loop(model: eecore.Model) -> None:
    network = network_of(model)
    assert network.weights.o.weight.shape[0] == STACK
    assert network.config.num_layers == STACK * LOOPS
    kv = KVCache.allocate(network.config, 2, 16, device=torch.device("cpu"), dtype=torch.float32)
    assert kv.k.shape[0] == STACK * LOOPS


def test_full_depth_in_batches_chunks_and_with_the_prefix_cache(
    model: eecore.Model, tensors: dict[str, Tensor]
) -> None:
    expected = [decode(tensors, prompt, 10)[0] for prompt in PROMPTS]
    assert tokens(model, Full()) == expected
    assert [tokens(model, Full(), prompts=[prompt])[0] for prompt in PROMPTS] == expected
    chunked = limited(model, kv_cache_tokens=512, max_prefill_chunk=3, page_size=4)
    assert tokens(chunked, Full()) == expected
    assert tokens(chunked, Full()) == expected  # from the prefix cache


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_weights_keep_the_promises(directory: Path, weights: str) -> None:
    quantised = devices.load(directory, **LIMITS, weights=weights)
    whole = tokens(quantised, Full())
    assert tokens(quantised, SelfSpeculative(STACK, 3)) == whole
    early = outputs(quantised, ConfidentExit(0.5, "gate"))
    assert {layer for out in early for layer in out.exit_layers} > {STACK * LOOPS}


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


def test_the_checkpoint_says_the_usual_threshold(tmp_path: Path, model: eecore.Model) -> None:
    (own, *_), (said, *_) = outputs(model, GATE), outputs(model, ConfidentExit(0.6, "gate"))
    assert own.token_ids == said.token_ids
    assert own.exit_layers == said.exit_layers != [ENDS[-1]] * 10
    assert own.stats.contract == "confident exit (gate, threshold 0.6): uncalibrated"
    write_looped(tmp_path, early_exit_threshold=1.0)
    never = devices.load(tmp_path, **LIMITS)
    assert tokens(never, GATE) == tokens(never, Full())


def test_loops_below_the_first_exit_count_for_the_gate(
    model: eecore.Model, tensors: dict[str, Tensor]
) -> None:
    late = outputs(model, ConfidentExit(0.5, "gate", exit_points=(ENDS[1],)))
    text = LoopedText(tensors)
    for token in PROMPTS[0]:
        text.read(token)
    first, second, _ = text.read(late[0].token_ids[0])
    stays = (1 - text.exit_probability(first)) * (1 - text.exit_probability(second))
    if 1 - stays >= 0.5:
        assert late[0].exit_layers[1] == ENDS[1]
        assert late[0].confidences[1] == pytest.approx(1 - stays, abs=1e-4)
    layers = {layer for out in late for layer in out.exit_layers}
    assert layers == {ENDS[1], ENDS[2]}
    assert layers == {
        layer
        for out in outputs(model, ConfidentExit(0.5, "gate", min_exit_layer=STACK + 1))
        for layer in out.exit_layers
    }


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


def test_all_rows_exit_together(model: eecore.Model) -> None:
    found = outputs(model, ConfidentExit(0.6, "gate", batch="all"))
    by_step = zip(*(out.exit_layers for out in found), strict=True)
    assert all(len(set(layers)) == 1 for layers in by_step)


@pytest.mark.parametrize(
    "drafts",
    [
        SelfSpeculative(ENDS[0], 3),
        SelfSpeculative(ENDS[1], 2, reuse=False),
        DraftAndVerify(frozenset({3}), frozenset({4}), 3),
        PromptLookup(),
        Auto(exit_layers=(ENDS[0],)),
    ],
    ids=lambda exit: type(exit).__name__,
)
def test_loops_draft_without_loss(model: eecore.Model, drafts: eecore.Exit) -> None:
    assert tokens(model, drafts, max_tokens=16) == tokens(model, Full(), max_tokens=16)


def test_a_request_that_is_preempted_goes_on_as_it_was(model: eecore.Model) -> None:
    """Positions that had exited are filled once more as they were at first."""
    policy = ConfidentExit(0.5, "gate")
    tight = limited(model, kv_cache_tokens=32, page_size=4, prefix_cache=False)
    got = outputs(tight, policy, max_tokens=16)
    assert sum(out.stats.preemptions for out in got) > 0
    assert [out.token_ids for out in got] == tokens(model, policy, max_tokens=16)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total_ut_steps": 0}, "total_ut_steps: expected an integer of 1..64, got 0"),
        ({"total_ut_steps": "4"}, "total_ut_steps: expected an integer of 1..64, got '4'"),
        (
            {"early_exit_threshold": 1.5},
            r"early_exit_threshold: expected a number of 0..1, got 1.5",
        ),
        (
            {"num_hidden_layers": 1000, "total_ut_steps": 64},
            "total_ut_steps: expected at most 4096 layers in all loops, got 64",
        ),
    ],
)
def test_configs_that_cannot_be_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    with pytest.raises(ModelError, match=message):
        eecore.load(tmp_path)


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
