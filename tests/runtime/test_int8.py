"""Models with int8 weights: what full precision gives of the rounded weights, in all exit modes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_llama import Session, tokens_for

import eecore
from eecore import ConfidentExit, DraftAndVerify, FixedExit, Full, SelfSpeculative
from eecore.exits import Exit, ExitClassifier
from eecore.models import load_model
from eecore.models.int8 import dequantise_rows, quantise_rows
from real_prompts import real_prompts
from tiny_models import random_prompts, scale_layers, write_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_prompts(5, 1, 23, 9, 2, 40, seed=2)


def round_weights(directory: Path) -> None:
    """Make the checkpoint's linear layers what int8 keeps of them."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tied = "lm_head.weight" not in tensors
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and (tied or name != "model.embed_tokens.weight"):
            tensors[name] = dequantise_rows(*quantise_rows(tensor), torch.float32)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["llama", "llama_biased", "smollm2", "qwen3"])
def test_logits_are_those_of_the_rounded_weights(family: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path, family)
    _, quantised, _ = load_model(directory, "cpu", weights="int8")
    assert quantised.weights.down.weight.dtype == torch.int8
    assert quantised.dtype == torch.float32
    round_weights(directory)
    _, rounded, _ = load_model(directory, "cpu")
    token_ids = tokens_for(rounded, 41)
    for chunks in ([41], [17, 1, 23]):
        expected = Session(rounded, 41).logits(token_ids, chunks)
        got = Session(quantised, 41).logits(token_ids, chunks)
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-3 * float(expected.std()))


def test_bfloat16_states_with_int8_weights(tmp_path: Path) -> None:
    directory = write_model(tmp_path, dtype=torch.bfloat16)
    logits = {}
    for dtype in (torch.float32, torch.bfloat16):
        _, model, _ = load_model(directory, "cpu", dtype, weights="int8")
        assert model.dtype == dtype
        logits[dtype] = Session(model, 20).logits(tokens_for(model, 20), [20])
    error = (logits[torch.bfloat16] - logits[torch.float32]).abs()
    assert error.mean() < 0.03 * logits[torch.float32].std()


def test_rows_do_not_depend_on_how_many_there_are(tmp_path: Path) -> None:
    """Sums of whole numbers are exact, so a prompt's chunks may be cut anywhere."""
    _, model, _ = load_model(write_model(tmp_path), "cpu", weights="int8")
    token_ids = tokens_for(model, 70)
    whole = Session(model, 70).logits(token_ids, [70])
    for chunks in ([1] * 70, [33, 37]):
        assert torch.equal(Session(model, 70).logits(token_ids, chunks), whole)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    directory = write_model(tmp_path_factory.mktemp("int8"), seed=3, num_hidden_layers=5)
    scale_layers(directory, {2: 0.2, 3: 0.1, 4: 0.2})
    return eecore.load(directory, device="cpu", weights="int8", kv_cache_tokens=2048)


CLASSIFIER = ExitClassifier(torch.randn(2, 64, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("policy", "exact"),
    [
        (SelfSpeculative(2, 3), True),
        (DraftAndVerify({3}, {2, 4}), True),
        (FixedExit(5), True),
        (ConfidentExit(1.0), True),
        (FixedExit(2), False),
        (ConfidentExit(0.2), False),
        (ConfidentExit(0.9, measure="state", batch="all"), False),
        (ConfidentExit(0.5, measure="classifier", classifier=CLASSIFIER), False),
    ],
    ids=str,
)
def test_every_exit_mode(quantised: eecore.Model, policy: Exit, exact: bool) -> None:
    options = {"max_tokens": 20, "ignore_eos": True}
    full = [o.token_ids for o in eecore.generate(quantised, PROMPTS, exit=Full(), **options)]
    outputs = eecore.generate(quantised, PROMPTS, exit=policy, **options)
    assert ([o.token_ids for o in outputs] == full) == exact
    alone = eecore.generate(quantised, PROMPTS[2], exit=policy, **options)[0]
    if getattr(policy, "batch", "each") == "each":
        assert alone.token_ids == outputs[2].token_ids


def test_the_real_model_keeps_its_words(smollm2: Path) -> None:
    """On text of its own kind the likeliest token stays the same, but for near ties."""
    text = " ".join(real_prompts(40))
    _, exact, tokenizer = load_model(smollm2, "cpu", "float32")
    assert tokenizer is not None
    token_ids = torch.tensor(tokenizer.encode(text)[:400])
    expected = Session(exact, 400).logits(token_ids, [400])
    del exact
    _, quantised, _ = load_model(smollm2, "cpu", "float32", "int8")
    got = Session(quantised, 400).logits(token_ids, [400])
    assert (got.argmax(-1) == expected.argmax(-1)).float().mean() > 0.94
    nats = torch.nn.functional.kl_div(
        got.log_softmax(-1), expected.log_softmax(-1), reduction="batchmean", log_target=True
    )
    assert nats < 0.015


@pytest.mark.parametrize("weights", ["int4", "INT8", "float32", ""])
def test_other_weights_are_refused(weights: str, tmp_path: Path) -> None:
    with pytest.raises(eecore.ModelError, match=f"weights: expected int8 or None .* '{weights}'"):
        eecore.load(write_model(tmp_path), weights=weights)
