"""Whole runs on tiny models: they learn, resume bit for bit, and write files that load."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as Backend
from tokenizers import models

import eecore
from eecore.errors import TrainingError
from eecore.lab.training import (
    CalmLoss,
    EarlyExitLoss,
    LayerDropout,
    LoraSettings,
    TokenData,
    TrainingConfig,
    state_path,
    train,
)
from eecore.lab.training.data import from_text
from eecore.lab.training.libraries import library
from eecore.models import Tokenizer, model_digest
from tiny_training import history


def small(steps: int = 20, **settings: Any) -> TrainingConfig:
    defaults = {
        "batch_size": 8,
        "learning_rate": 3e-3,
        "warmup_steps": 4,
        "evaluate_steps": 5,
        "checkpoint_seconds": None,
    }
    return TrainingConfig(steps=steps, **{**defaults, **settings})


class Killed(Exception):
    """An error that stands for the end of the process."""


def killed_at(step: int, begun: int = 0) -> Any:
    """What asks a run whether to stop: it ends in a step, after those before it was resumed."""
    asked = itertools.count(begun + 1)

    def should_stop() -> bool:
        if next(asked) == step:
            raise Killed
        return False

    return should_stop


def test_a_model_learns_and_is_an_ordinary_directory(
    make_model: Any, pairs: TokenData, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    words = {str(token): token for token in range(40)}
    Backend(models.WordLevel(words, unk_token="0")).save(str(tokenizer / "tokenizer.json"))
    (tokenizer / "added_tokens.json").write_text('{"41": 41}')
    (tokenizer / "additional_chat_templates").mkdir()
    (tokenizer / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    config = small(100, learning_rate=1e-2, evaluate_steps=40)
    result = train(
        make_model(tie_word_embeddings=True),
        pairs,
        config,
        out,
        held_out=pairs,
        tokenizer_directory=tokenizer,
    )
    assert (result.finished, result.step) == (True, 100)
    assert result.scores is not None
    assert result.scores.agreement[-1] == 1.0
    assert result.scores.num_tokens == int((pairs.lengths - pairs.prompt_lens).sum())

    log = history(out)
    assert [entry["step"] for entry in log] == list(range(1, 101))
    losses = [entry["loss"] for entry in log]
    assert sum(losses[-10:]) < 0.75 * sum(losses[:10])
    # The curriculum ends with all layers but the first, which has no weight.
    assert [f"loss_exit_{layer}" in log[0] for layer in (1, 2, 3, 4)] == [False] * 3 + [True]
    assert [f"loss_exit_{layer}" in log[-1] for layer in (1, 2, 3, 4)] == [False] + [True] * 3
    assert [entry["step"] for entry in history(out, evaluations=True)] == [0, 40, 80, 100]
    assert {path.name for path in state_path(out).iterdir()} == {"trainer_state.json"}

    about = json.loads((out / "exits.json").read_text())
    assert about["held_out"]["agreement"] == list(result.scores.agreement)
    assert about["training"] == json.loads(json.dumps(config.to_dict()))
    assert about["model_sha256"] == model_digest(out)
    copied = Tokenizer.from_directory(out)
    assert copied is not None
    assert (copied.encode("41"), copied.named_templates) == ([40], {"tool_use": "tools"})

    import transformers

    model = eecore.load(out, device="cpu", dtype="float32", kv_cache_tokens=256)
    there = transformers.AutoModelForCausalLM.from_pretrained(out)
    prompt = pairs.sequence(0)[0][:5].tolist()
    expected = there.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
    generated = eecore.generate(model, prompt, max_tokens=6)[0]
    assert generated.token_ids == expected[0, 5:].tolist()
    assert model.tokenizer is not None


RECIPES: dict[str, dict[str, Any]] = {
    "layerskip": {
        "loss": EarlyExitLoss(0.2, "rotational", 2),
        "layer_dropout": LayerDropout(0.5, "exponential"),
        "precision": "bfloat16",
        "lora": LoraSettings(rank=2, dropout=0.3),
    },
    "calm": {"loss": CalmLoss(), "layer_dropout": LayerDropout(1.0)},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_killed_run_goes_on_bit_for_bit(
    make_model: Any, pairs: TokenData, tmp_path: Path, recipe: str
) -> None:
    # The T5 of CALM has dropout of its own, and LoRA too: random numbers that must be saved.
    family = {"calm": "t5"}.get(recipe, "llama")
    overrides = {"dropout_rate": 0.2} if family == "t5" else {}
    config = small(20, checkpoint_steps=4, **RECIPES[recipe])

    def start(out: Path, **options: Any) -> Any:
        torch.manual_seed(len(str(out)))  # whatever state the process is in
        model = make_model(family, **overrides)
        return train(model, pairs, config, out, held_out=pairs, **options)

    whole, broken = tmp_path / "whole", tmp_path / "broken-off"
    start(whole)
    for begun, step in ((0, 2), (0, 7), (4, 8), (4, 14)):
        with pytest.raises(Killed):
            start(broken, resume=step > 2, should_stop=killed_at(step, begun))
        if step == 14:  # a checkpoint whose writing was cut short
            half = state_path(broken) / "checkpoint-14"
            shutil.copytree(state_path(broken) / "checkpoint-12", half)
            (half / "trainer_state.json").unlink()
    result = start(broken, resume=True)
    assert (result.finished, result.step) == (True, 20)
    for evaluations in (False, True):
        assert history(broken, evaluations=evaluations) == history(whole, evaluations=evaluations)
    weights = [load_file(path / "model.safetensors") for path in (whole, broken)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


def test_adapters_are_written_merged_and_alone(
    make_model: Any, pairs: TokenData, tmp_path: Path
) -> None:
    import peft
    import transformers

    model = make_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    config = small(8, lora=LoraSettings(rank=2), learning_rate=0.05)
    train(model, pairs, config, tmp_path / "out")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    names = dict(merged.named_parameters())
    assert names.keys() == before.keys()
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(names[name], before[name])
    assert not torch.equal(
        names["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"]
    )
    adapted = peft.PeftModel.from_pretrained(make_model(), str(tmp_path / "out" / "adapter"))
    ids = torch.arange(3, 12)[None]
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-4, rtol=1e-4)
    eecore.load(tmp_path / "out", device="cpu", kv_cache_tokens=64)


def test_tensorboard_gets_the_log(make_model: Any, pairs: TokenData, tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "out"
    train(make_model(), pairs, small(5, tensorboard=True), out, held_out=pairs)
    events = reading.EventAccumulator(str(out / "training" / "tensorboard")).Reload()
    losses = [entry["loss"] for entry in history(out)]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(losses)
    found = [event.value for event in events.Scalars("eval/agreement_exit_2")]
    agreement = [entry["eval_agreement_exit_2"] for entry in history(out, evaluations=True)]
    assert found == pytest.approx(agreement)


def test_a_relative_rate_moves_weights_by_a_share_of_what_they_start_from(
    make_model: Any, pairs: TokenData, tmp_path: Path
) -> None:
    """AdamW's first step moves every weight with a gradient by the rate."""
    model = make_model("t5")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    config = small(1, learning_rate=0.01, warmup_steps=0, relative_rate=True, weight_decay=0.0)
    train(model, pairs, config, tmp_path / "out")
    rates = {}
    for name, start in before.items():
        moved = float((model.get_parameter(name) - start).abs().max())
        size = float(start.square().mean().sqrt())
        rates[name] = moved / size
        assert rates[name] == pytest.approx(0.01 if start.ndim > 1 else 0.001, rel=0.05)
    assert len(rates) > 20


def test_gradient_checkpointing_learns_the_same(
    make_model: Any, pairs: TokenData, tmp_path: Path
) -> None:
    losses = []
    for flag in (False, True):
        out = tmp_path / str(flag)
        train(make_model(), pairs, small(6, gradient_checkpointing=flag), out)
        losses.append([entry["loss"] for entry in history(out)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_what_cannot_be_resumed_is_refused(
    make_model: Any, pairs: TokenData, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    config = small(checkpoint_steps=2)
    with pytest.raises(TrainingError, match=r"run\.json: expected a file, got nothing"):
        train(make_model(), pairs, config, out, resume=True)
    assert not out.exists()
    with pytest.raises(Killed):
        train(make_model(), pairs, config, out, should_stop=killed_at(3))
    with pytest.raises(TrainingError, match=r"out: expected a new or empty .* can be resumed"):
        train(make_model(), pairs, config, out)
    with pytest.raises(TrainingError, match=r"settings that the run began with: seed=0 against 1"):
        train(make_model(), pairs, small(seed=1), out, resume=True)
    other = from_text(list(range(3, 30)), 8)
    with pytest.raises(TrainingError, match="data: expected that which the run began with"):
        train(make_model(), other, config, out, resume=True)
    for model in (make_model(num_layers=3), make_model(intermediate_size=32)):
        with pytest.raises(TrainingError, match="model: expected that which the run began with"):
            train(model, pairs, config, out, resume=True)
    file = state_path(out) / "run.json"
    about = json.loads(file.read_text())
    for change, message in (
        ({"processes": 2}, r"processes: expected 2, as the run began with, got 1 \(torchrun"),
        ({"format": "another"}, "format: expected 'eecore training run 1', got 'another'"),
        ({"config": {"stepps": 3}}, "expected the settings that the run began with: "),
        ({"more": 1}, "more"),
    ):
        file.write_text(json.dumps({**about, **change}))
        with pytest.raises(TrainingError, match=message):
            train(make_model(), pairs, config, out, resume=True)
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(TrainingError, match=r"run\.json"):
        train(make_model(), pairs, config, out, resume=True)


def test_bad_input_is_refused(make_model: Any, pairs: TokenData, tmp_path: Path) -> None:
    text = from_text(list(range(3, 30)), 8)
    with pytest.raises(TrainingError, match="expected pairs for a model with an encoder"):
        train(make_model("t5"), text, small(), tmp_path / "a")
    with pytest.raises(TrainingError, match=r"model: expected one of .* got Linear"):
        train(torch.nn.Linear(2, 2), text, small(), tmp_path / "b")
    with pytest.raises(TrainingError, match=r"model: expected one of .* got Linear"):
        train(torch.nn.Linear(2, 2), text, small(lora=LoraSettings()), tmp_path / "c")
    (tmp_path / "file").write_text("x")
    with pytest.raises(TrainingError, match=r"out: expected a new or empty directory, got .*file"):
        train(make_model(), pairs, small(), tmp_path / "file")
    for name in ("a" * 300, "a\0b"):
        with pytest.raises(TrainingError, match=r"out: expected a new or empty directory, got"):
            train(make_model(), pairs, small(), tmp_path / name)
    assert not any((tmp_path / name).exists() for name in "abc")


def test_a_run_that_diverges_says_so(make_model: Any, pairs: TokenData, tmp_path: Path) -> None:
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight[0] = float("inf")
    with pytest.raises(TrainingError, match="step 1: expected finite numbers, got loss nan"):
        train(model, pairs, small(), tmp_path / "out")
    assert "forward" not in vars(model.model.layers[0])


def test_without_the_extra_training_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(TrainingError, match=r"expected the package peft, .*'\.\[lab\]'"):
        library("peft")
