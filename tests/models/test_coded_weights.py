"""Models with int8 and int4 weights give what the rounded weights give, in all exit modes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_llama import Session, tokens_for
from torch import Tensor

import eecore
import reference
from eecore import ConfidentExit, DraftAndVerify, FixedExit, Full, SelfSpeculative, ops
from eecore.exits import Exit, ExitClassifier
from eecore.models import load_model
from eecore.models.int8 import dequantise_rows, quantise_rows
from real_prompts import real_prompts
from tiny_models import random_prompts, scale_layers, write_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_prompts(5, 1, 23, 9, 2, 40, seed=2)


CODINGS = ("int8", "int4")


HEADS = ("lm_head.weight", "model.embed_tokens.weight", "shared.weight")


FIVE_BITS, EIGHT_BITS = (".k_proj.weight", ".k.weight"), (".v_proj.weight", ".v.weight")


def rounded(name: str, weight: Tensor, coding: str) -> Tensor:
    """A checkpoint's matrix, rounded."""
    if weight.shape[-1] % 32 != 0:
        return dequantise_rows(*quantise_rows(weight), torch.float32)
    format = "Q5_1" if name.endswith(FIVE_BITS) else "Q4_1"
    if name in HEADS or name.endswith(EIGHT_BITS) or coding == "int8":
        format = "Q8_0"
    return reference.pack_weight(ops.quantise_weight(weight.float(), format), format)


def round_weights(directory: Path, coding: str) -> None:
    """Round the checkpoint's linear layers as a coding does."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    untied = {"model.embed_tokens.weight", "shared.weight"} if "lm_head.weight" in tensors else {}
    for name, tensor in tensors.items():
        is_table = "relative_attention_bias" in name or name in untied
        if tensor.dim() == 2 and not is_table:
            tensors[name] = rounded(name, tensor, coding)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("family", ["llama", "llama_biased", "smollm2", "qwen3"])
def test_logits_are_those_of_the_rounded_weights(family: str, coding: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path, family)
    _, quantised, _ = load_model(directory, "cpu", weights=coding)
    assert quantised.weights.down.weight.dtype == torch.uint8
    assert quantised.dtype == torch.float32
    round_weights(directory, coding)
    _, exact, _ = load_model(directory, "cpu")
    token_ids = tokens_for(exact, 41)
    most, mean = 0.5, 0.05  # states are quantised to 8 bits
    for chunks in ([41], [17, 1, 23]):
        expected = Session(exact, 41).logits(token_ids, chunks)
        error = (Session(quantised, 41).logits(token_ids, chunks) - expected).abs()
        assert error.max() < most * expected.std()
        assert error.mean() < mean * expected.std()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_layers_hold_what_the_checkpoint_does(dtype: str, tmp_path: Path) -> None:
    """Rows of Q, K and V fill no whole panels in any layer."""
    sizes = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3}
    directory = write_model(tmp_path, **sizes, intermediate_size=160)
    tensors = load_file(directory / "model.safetensors")
    _, model, _ = load_model(directory, "cpu", dtype, "int4")
    for layer in range(model.config.num_layers):
        qkv = model.weights.qkv
        parts = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in "qkv"]
        expected = torch.cat([rounded(name, tensors[name], "int4") for name in parts])
        assert torch.equal(ops.unpack_weight(qkv.weight, qkv.table[layer]), expected)


@pytest.mark.parametrize("coding", CODINGS)
def test_rows_that_blocks_do_not_fill_have_a_scale_each(coding: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path, intermediate_size=72)
    _, model, _ = load_model(directory, "cpu", weights=coding)
    down = model.weights.down
    assert model.weights.gate_up.table is not None
    assert down.weight.dtype == torch.int8
    stored = load_file(directory / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    got = dequantise_rows(down.weight[1], down.scale[1], torch.float32)
    assert torch.equal(got, dequantise_rows(*quantise_rows(stored), torch.float32))


@pytest.mark.parametrize("coding", CODINGS)
def test_bfloat16_states(coding: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path, dtype=torch.bfloat16)
    logits = {}
    for dtype in (torch.float32, torch.bfloat16):
        _, model, _ = load_model(directory, "cpu", dtype, weights=coding)
        assert model.dtype == dtype
        logits[dtype] = Session(model, 20).logits(tokens_for(model, 20), [20])
    error = (logits[torch.bfloat16] - logits[torch.float32]).abs()
    assert error.mean() < 0.05 * logits[torch.float32].std()


@pytest.mark.parametrize("coding", CODINGS)
def test_rows_do_not_depend_on_how_many_there_are(coding: str, tmp_path: Path) -> None:
    """A prompt's chunks may be cut anywhere."""
    _, model, _ = load_model(write_model(tmp_path), "cpu", weights=coding)
    token_ids = tokens_for(model, 70)
    whole = Session(model, 70).logits(token_ids, [70])
    for chunks in ([1] * 70, [33, 37]):
        assert torch.equal(Session(model, 70).logits(token_ids, chunks), whole)


@pytest.fixture(scope="module", params=CODINGS)
def quantised(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> eecore.Model:
    directory = write_model(tmp_path_factory.mktemp(request.param), seed=3, num_hidden_layers=5)
    scale_layers(directory, {2: 0.2, 3: 0.1, 4: 0.2})
    return eecore.load(directory, device="cpu", weights=request.param, kv_cache_tokens=2048)


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


@pytest.mark.parametrize(("coding", "most_nats"), [("int8", 0.015), ("int4", 0.01)])
def test_the_real_model_keeps_its_words(coding: str, most_nats: float, smollm2: Path) -> None:
    """On text of its own kind the likeliest token stays the same, but for near ties.

    What was stored in blocks of 4 bits comes back from int4.
    """
    text = " ".join(real_prompts(40))
    _, exact, tokenizer = load_model(smollm2, "cpu", "float32")
    assert tokenizer is not None
    token_ids = torch.tensor(tokenizer.encode(text)[:400])
    expected = Session(exact, 400).logits(token_ids, [400])
    del exact
    _, quantised, _ = load_model(smollm2, "cpu", "float32", coding)
    got = Session(quantised, 400).logits(token_ids, [400])
    assert (got.argmax(-1) == expected.argmax(-1)).float().mean() > 0.94
    nats = torch.nn.functional.kl_div(
        got.log_softmax(-1), expected.log_softmax(-1), reduction="batchmean", log_target=True
    )
    assert nats < most_nats


@pytest.mark.parametrize("weights", ["int3", "INT8", "float32", ""])
def test_other_weights_are_refused(weights: str, tmp_path: Path) -> None:
    message = f"weights: expected int8, int4 or None .* '{weights}'"
    with pytest.raises(eecore.ModelError, match=message):
        eecore.load(write_model(tmp_path), weights=weights)
