"""Logits agree with transformers' in float32, however the tokens are split over calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from eecore import ops
from eecore.models import AttentionBatch, KVCache, LlamaModel, load_model
from eecore.models.attention import KEYS_PER_SPLIT
from tiny_models import FAMILIES, write_model

PAGE_SIZE = 8
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


class Session:
    """One sequence; its pages are out of order and hold NaN where nothing was written."""

    def __init__(self, model: LlamaModel, max_tokens: int) -> None:
        config = model.config
        num_pages = -(-max_tokens // PAGE_SIZE)
        self.model = model
        self.kv = KVCache.allocate(
            config, num_pages + 3, PAGE_SIZE, device=model.device, dtype=model.dtype
        )
        self.kv.k.fill_(torch.nan)
        self.kv.v.fill_(torch.nan)
        self.pages = torch.arange(num_pages, dtype=torch.int32).flip(0) + 2
        self.length = 0

    def batch(self, num_tokens: int) -> AttentionBatch:
        positions = torch.arange(self.length, self.length + num_tokens)
        slots = self.pages.long()[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        return AttentionBatch(
            positions=positions,
            slot_mapping=slots,
            page_table=self.pages[None],
            seq_lens=torch.tensor([self.length + num_tokens], dtype=torch.int32),
            query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
        )

    def hidden(self, token_ids: torch.Tensor) -> torch.Tensor:
        batch = self.batch(len(token_ids))
        hidden = self.model.embed(token_ids)
        hidden = self.model.layers(0, self.model.config.num_layers, hidden, self.kv, batch)
        self.length += len(token_ids)
        return hidden

    def logits(self, token_ids: torch.Tensor, chunks: list[int]) -> torch.Tensor:
        return torch.cat([self.model.logits(self.hidden(c)) for c in token_ids.split(chunks)])


def tokens_for(model: LlamaModel, count: int) -> torch.Tensor:
    return torch.randint(
        model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(1)
    )


def logits_of_transformers(directory: Path, token_ids: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return oracle(token_ids[None]).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_transformers(family: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path, family)
    _, model, _ = load_model(directory, "cpu")
    token_ids = tokens_for(model, 41)
    expected = logits_of_transformers(directory, token_ids)
    assert expected.std() > 1
    for chunks in ([41], [17, 1, 23], [1] * 41):
        got = Session(model, 41).logits(token_ids, chunks)
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "qwen3", dtype=torch.bfloat16)
    logits = {}
    for dtype in (torch.float32, torch.bfloat16):
        _, model, _ = load_model(directory, "cpu", dtype)
        assert model.dtype == dtype
        logits[dtype] = Session(model, 20).logits(tokens_for(model, 20), [20])
    assert logits[torch.bfloat16].dtype == torch.float32
    error = (logits[torch.bfloat16] - logits[torch.float32]).abs()
    assert error.mean() < 0.03 * logits[torch.float32].std()


@pytest.mark.parametrize("num_tokens", [5, 33])
def test_layers_leave_their_input_alone_and_skip_sublayers(num_tokens: int, tmp_path: Path) -> None:
    _, model, _ = load_model(write_model(tmp_path), "cpu")
    session = Session(model, num_tokens)
    hidden, batch = model.embed(tokens_for(model, num_tokens)), session.batch(num_tokens)
    before = hidden.clone()
    first, second = frozenset({0}), frozenset({1})

    def run(begin: int, end: int, x: torch.Tensor, **skips: frozenset[int]) -> torch.Tensor:
        return model.layers(begin, end, x, session.kv, batch, **skips)

    neither = run(0, 1, hidden, skip_attention=first, skip_mlp=first)
    no_attention = run(0, 1, hidden, skip_attention=first, skip_mlp=second)
    assert session.kv.k.isnan().all()
    no_mlp = run(0, 1, hidden, skip_mlp=first)
    both = run(0, 1, hidden)
    two = run(0, 2, hidden, skip_attention=second)

    assert torch.equal(hidden, before)
    assert torch.equal(neither, before)
    assert torch.equal(run(0, 1, no_mlp, skip_attention=first), both)
    assert torch.equal(run(1, 2, both, skip_attention=second), two)
    assert not torch.allclose(no_attention, both, atol=1e-3)


def test_sequences_in_one_call_do_not_see_each_other(tmp_path: Path) -> None:
    """A chunk of one prompt beside one token of another sequence, and a sequence with none."""
    _, model, _ = load_model(write_model(tmp_path, "qwen3"), "cpu")
    first, second = tokens_for(model, 13), tokens_for(model, 30)[13:]
    alone = [Session(model, 20).hidden(first)[-6:], Session(model, 20).hidden(second)[-1:]]

    a, b = Session(model, 20), Session(model, 20)
    a.hidden(first[:-6])
    b.hidden(second[:-1])
    kv = KVCache(torch.cat([a.kv.k, b.kv.k], 1), torch.cat([a.kv.v, b.kv.v], 1))
    parts = [a.batch(6), b.batch(1)]
    offset = a.kv.num_pages
    batch = AttentionBatch(
        positions=torch.cat([part.positions for part in parts]),
        slot_mapping=torch.cat([parts[0].slot_mapping, parts[1].slot_mapping + offset * PAGE_SIZE]),
        page_table=torch.cat([a.pages[None], b.pages[None] + offset, b.pages[None] * 0 - 1]),
        seq_lens=torch.tensor([13, 17, 0], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 6, 7, 7], dtype=torch.int32),
    )
    hidden = model.embed(torch.cat([first[-6:], second[-1:]]))
    hidden = model.layers(0, model.config.num_layers, hidden, kv, batch)
    torch.testing.assert_close(hidden, torch.cat(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_the_same_bit_for_bit_in_any_company(dtype: torch.dtype, tmp_path: Path) -> None:
    """Decoding, verification and chunks of prompts round alike, beyond one split of the context."""
    directory = write_model(tmp_path, "qwen3", num_hidden_layers=2, max_position_embeddings=1024)
    _, model, _ = load_model(directory, "cpu", dtype)
    count = KEYS_PER_SPLIT + 30
    token_ids = tokens_for(model, count)
    expected = Session(model, count).logits(token_ids, [count])
    for chunks in ([KEYS_PER_SPLIT, *[1] * 30], [31, 1, 33, 300, 100, 77], [217, 5, 320]):
        assert torch.equal(Session(model, count).logits(token_ids, chunks), expected)


def test_zero_tokens_run_through_a_layer(tmp_path: Path) -> None:
    _, model, _ = load_model(write_model(tmp_path), "cpu")
    session = Session(model, 8)
    assert session.hidden(torch.empty(0, dtype=torch.int64)).shape == (0, model.config.hidden_size)


@pytest.mark.parametrize("family", ["llama", "llama_biased", "qwen2_yarn", "qwen3"])
def test_filled_keys_and_values_are_those_of_the_layers(family: str, tmp_path: Path) -> None:
    """With a hidden state that no layer changes, what fill_kv writes is what the layers write."""
    _, model, _ = load_model(write_model(tmp_path, family), "cpu")
    session, filled = Session(model, 8), Session(model, 8)
    hidden, batch = model.embed(tokens_for(model, 5)), session.batch(5)
    for index in range(model.config.num_layers):
        model.layers(index, index + 1, hidden, session.kv, batch)
    exit_layer = torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32)
    model.fill_kv(hidden, exit_layer, filled.kv, batch.positions, batch.slot_mapping)

    for got, expected in ((filled.kv.k, session.kv.k), (filled.kv.v, session.kv.v)):
        for row, slot in enumerate(batch.slot_mapping.tolist()):
            first = int(exit_layer[row])
            got_row = got[:, slot // PAGE_SIZE, slot % PAGE_SIZE]
            expected_row = expected[:, slot // PAGE_SIZE, slot % PAGE_SIZE]
            assert got_row[:first].isnan().all()
            torch.testing.assert_close(
                got_row[first:], expected_row[first:], rtol=0, atol=TOLERANCE
            )


def test_confidence_is_that_of_the_logits(tmp_path: Path) -> None:
    _, model, _ = load_model(write_model(tmp_path), "cpu")
    hidden = Session(model, 8).hidden(tokens_for(model, 6))
    logits, confidence = model.logits(hidden), model.confidence(hidden)
    assert isinstance(confidence, ops.SoftmaxConfidence)
    top = logits.softmax(-1).topk(2).values
    assert torch.equal(confidence.token, logits.argmax(-1))
    torch.testing.assert_close(confidence.confidence, top[:, 0] - top[:, 1], rtol=0, atol=1e-5)
    torch.testing.assert_close(confidence.logsumexp, logits.logsumexp(-1), rtol=0, atol=TOLERANCE)


def test_filling_reads_the_weights_of_the_layers_themselves(tmp_path: Path) -> None:
    _, model, _ = load_model(write_model(tmp_path, "qwen2", tie_word_embeddings=True), "cpu")
    weights, config = model.weights, model.config
    qkv = weights.qkv.weight
    row_bytes = config.hidden_size * qkv.element_size()
    assert model._kv.weight.data_ptr() == qkv.data_ptr() + config.q_size * row_bytes
    for index, layer in enumerate(model._layers):
        assert layer.qkv.weight.data_ptr() == qkv[index].data_ptr()
    assert weights.lm_head.weight.data_ptr() == weights.embed_tokens.weight.data_ptr()
    tensors = (tensor for tensor in tree_leaves(vars(weights)) if tensor is not None)
    stored = {tensor.data_ptr(): tensor.numel() for tensor in tensors}
    assert sum(stored.values()) == config.num_parameters


def test_logits_of_the_real_model_agree_with_transformers(smollm2: Path) -> None:
    _, model, tokenizer = load_model(smollm2, "cpu")
    assert tokenizer is not None
    text = "The capital of France is Paris, and its 20 districts spiral out from the Louvre."
    token_ids = torch.tensor(tokenizer.encode(text))
    expected = logits_of_transformers(smollm2, token_ids)
    got = Session(model, len(token_ids)).logits(token_ids, [len(token_ids) - 5, 1, 4])
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_program_of_many_rows_calls_ops_of_eecore_alone(family: str, tmp_path: Path) -> None:
    """The result equals that of a few rows at a time, to the bit."""
    _, model, _ = load_model(write_model(tmp_path, family), "cpu")
    count = 40
    tokens, session, beside = tokens_for(model, count), Session(model, count), Session(model, count)
    batch, num_layers = session.batch(count), model.config.num_layers
    model.prepare(session.kv)
    tape = ops.Tape()
    with tape.record():
        hidden = model.layers(0, num_layers, model.embed(tokens), session.kv, batch)
        logits = model.logits(hidden)
        token = model.confidence(hidden).token
    tape.replay()
    assert logits.dtype == torch.float32
    assert torch.equal(logits, beside.logits(tokens, [32, 8]))
    assert torch.equal(token, logits.argmax(-1))


def test_tokens_may_come_from_a_step_before(tmp_path: Path) -> None:
    _, model, _ = load_model(write_model(tmp_path), "cpu")
    given, previous = tokens_for(model, 3), torch.tensor([7, 9])
    sources = torch.tensor([1, -1, 0], dtype=torch.int32)
    expected = model.embed(torch.tensor([9, int(given[1]), 7]))
    assert torch.equal(model.embed(given, previous=previous, sources=sources), expected)
