"""Logits agree with transformers' in float32, however the tokens are split over calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
