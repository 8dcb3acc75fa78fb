"""Logits agree with transformers' in float32, however the tokens are split over calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eecore.models import AttentionBatch, KVCache, LlamaModel, load_model
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
            config,
            num_pages + 3,
            PAGE_SIZE,
            device=model.device,
            dtype=model.dtype,
            deltas=(1, model.dtype),
        )
        self.kv.k.fill_(torch.nan)
        self.kv.v.fill_(torch.nan)
        self.pages = torch.arange(num_pages, dtype=torch.int32).flip(0) + 2
        self.length = 0

    def batch(self, num_tokens: int) -> AttentionBatch:
        end = self.length + num_tokens
        positions = torch.arange(self.length, end)
        slots = self.pages.long()[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        return AttentionBatch(
            positions=positions,
            slot_mapping=slots,
            page_table=self.pages[None],
            seq_lens=torch.tensor([end], dtype=torch.int32),
            query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
            states=torch.tensor([[1, end]], dtype=torch.int32),
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


def test_logits_of_the_real_model_agree_with_transformers(smollm2: Path) -> None:
    _, model, tokenizer = load_model(smollm2, "cpu")
    assert tokenizer is not None
    text = "The capital of France is Paris, and its 20 districts spiral out from the Louvre."
    token_ids = torch.tensor(tokenizer.encode(text))
    expected = logits_of_transformers(smollm2, token_ids)
    got = Session(model, len(token_ids)).logits(token_ids, [len(token_ids) - 5, 1, 4])
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)
