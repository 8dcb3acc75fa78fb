"""Heads that draft a block: their pass, what they learn from, and how agreement is counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import eecore
from block_heads import BlockOracle
from eecore.errors import RequestError
from eecore.lab.answers.writing import Answer
from eecore.lab.training.block_head import BlockHead, BlockSizes
from eecore.lab.training.block_loss import (
    MIN_ACCEPTED,
    AnchorOrder,
    block_agreement,
    block_loss,
    blocks_after,
    draft_weights,
)
from eecore.lab.training.block_run import (
    SPREAD,
    BlockConfig,
    BlockTrainee,
    choose_mask,
    first_norm,
    tap_sizes,
)
from eecore.lab.training.head_loss import FrozenSide
from eecore.lab.training.head_states import (
    HeadStates,
    MappedStates,
    StatesSettings,
    collect_states,
    open_states,
)
from eecore.models import LlamaModel, network_digest
from tiny_families import write_family
from tiny_models import random_prompts, write_model

HIDDEN, VOCAB, EPS, BLOCK, MASK = 8, 20, 1e-5, 3, 19
SETTINGS = StatesSettings("digest", "float32", HIDDEN, (1, 2), with_prompts=True)
SIZES = BlockSizes(
    hidden_size=HIDDEN,
    num_taps=2,
    intermediate_size=12,
    num_layers=2,
    num_heads=2,
    head_dim=6,
    rope_theta=100.0,
    block_size=BLOCK,
    vocab_size=VOCAB,
    vocabulary_size=VOCAB - 4,
    markov_rank=5,
)


def new_head(seed: int = 0) -> BlockHead:
    return BlockHead(SIZES, EPS, torch.ones(HIDDEN), torch.tensor([1.0, 2.0]), seed)


def random_head(seed: int = 0) -> BlockHead:
    """A head none of whose weights is an initial value."""
    head, generator = new_head(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return head


def random_data(lengths: list[int], prompts: list[int], seed: int = 0) -> HeadStates:
    """Texts numbered 0, 1, ... after prompts; every third token is not the greedy one."""
    generator = torch.Generator().manual_seed(seed)
    rows = [prompt + length for prompt, length in zip(prompts, lengths, strict=True)]
    text = torch.cat([torch.full((n,), i) for i, n in enumerate(rows)])
    in_prompt = torch.cat([torch.arange(n) < p for n, p in zip(rows, prompts, strict=True)])
    greedy = torch.randint(VOCAB, (len(text),), generator=generator)
    token = torch.where(torch.arange(len(text)) % 3 == 2, (greedy + 1) % VOCAB, greedy)
    states = torch.randn(len(text), 2, HIDDEN, generator=generator).bfloat16()
    greedy = torch.where(in_prompt, -1, greedy)
    return HeadStates(SETTINGS, MappedStates([states]), text, token, greedy)


@pytest.fixture
def data() -> HeadStates:
    return random_data([9, 2, 1, 14], [4, 0, 6, 2])


@pytest.fixture
def frozen() -> FrozenSide:
    generator = torch.Generator().manual_seed(9)
    return FrozenSide(
        embeddings=torch.randn(VOCAB, HIDDEN, generator=generator),
        head_rows=torch.randn(VOCAB - 4, HIDDEN, generator=generator),
        vocabulary=torch.arange(2, VOCAB - 2),
        final_norm=torch.ones(HIDDEN),
        eps=EPS,
    )


def oracle_of(head: BlockHead, frozen: FrozenSide) -> BlockOracle:
    """The same head in the plain PyTorch that the files' layout is tested with."""
    config: dict[str, Any] = {
        "architectures": ["DSparkSpeculator"],
        "transformer_layer_config": {
            "hidden_size": HIDDEN,
            "num_hidden_layers": SIZES.num_layers,
            "head_dim": SIZES.head_dim,
            "rms_norm_eps": EPS,
            "rope_theta": SIZES.rope_theta,
        },
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "markov_rank": SIZES.markov_rank,
        "enable_confidence_head": True,
    }
    tensors = head.tensors(torch.float32)
    tensors["lm_head.weight"] = frozen.head_rows
    tensors["d2t"] = frozen.vocabulary - torch.arange(len(frozen.vocabulary))
    return BlockOracle(config, tensors, frozen.embeddings, frozen.head_rows)


def states_before(data: HeadStates, row: int) -> list[Tensor]:
    """The states of each tap at all positions up to a row."""
    rows = torch.arange(int(data.begins[row]), row + 1)
    return list(data.states[rows].float().unbind(1))


def test_rows_of_prompts_begin_no_draft(data: HeadStates) -> None:
    assert data.starts.tolist() == [*range(4, 12), 13, *range(24, 37)]
    assert data.num_tokens == 26
    assert data.begins.unique().tolist() == [0, 13, 15, 22]


def test_blocks_of_several_texts_are_those_of_the_layout(
    data: HeadStates, frozen: FrozenSide
) -> None:
    """Each block sees its own text up to where it starts, and itself, and no other block."""
    head, starts = random_head(), torch.tensor([25, 26, 30, 13, 5, 11])
    oracle = oracle_of(head, frozen)
    with torch.no_grad():
        got = head(blocks_after(head, frozen, data, starts, MASK))
        for row, states in zip(starts.tolist(), got, strict=True):
            token = int(data.token[row])
            torch.testing.assert_close(states, oracle.block(states_before(data, row), token))
            drafted = oracle.drafts(states_before(data, row), token)
            before = head.before(torch.tensor([token, *drafted.tokens[:-1]]))
            logits = frozen.products(states) + head.correction(before)
            torch.testing.assert_close(logits, drafted.logits, rtol=1e-4, atol=1e-4)
            confidence = head.confidence(states, before).sigmoid()
            torch.testing.assert_close(confidence, torch.tensor(drafted.scores))


def test_agreement_is_that_of_drafts_made_one_by_one(data: HeadStates, frozen: FrozenSide) -> None:
    head = random_head(3)
    oracle = oracle_of(head, frozen)
    right, tried = [0] * BLOCK, [0] * BLOCK
    for start in data.starts.tolist():
        with torch.no_grad():
            drafted = oracle.drafts(states_before(data, start), int(data.token[start]))
        for k, token in enumerate(drafted.tokens):
            target = start + k + 1
            if target >= len(data) or data.text[target] != data.text[start]:
                break
            tried[k] += 1
            if token != data.greedy[target]:
                break
            right[k] += 1
            if data.token[target] != token:
                break
    expected = [r / t if t else 0.0 for r, t in zip(right, tried, strict=True)]
    assert 0 < right[0] < tried[0]
    assert block_agreement(head, frozen, data, data.starts, MASK) == expected


def test_weights_are_what_the_expected_accepted_length_changes_by() -> None:
    overlap = torch.rand(5, 4, generator=torch.Generator().manual_seed(1))
    counts = torch.ones(5, 4, dtype=torch.bool)
    counts[1, 2], counts[2, 0], counts[3, 3] = False, False, False
    chance = torch.where(counts, MIN_ACCEPTED + (1 - MIN_ACCEPTED) * overlap, 0.0)
    logs = chance.log().clamp(min=-1e3).requires_grad_()
    logs.cumsum(1).exp().sum().backward()
    torch.testing.assert_close(draft_weights(overlap, counts), logs.grad)


def test_a_head_learns_what_the_loss_says(frozen: FrozenSide) -> None:
    data = random_data([40, 30], [3, 5])
    head = new_head()
    optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        loss, agreement = block_loss(head, frozen, data, data.starts, MASK)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        assert 0 <= agreement <= 1
    assert losses[-1] < 0.7 * losses[0]
    assert all(parameter.grad is not None for parameter in head.parameters())


def test_confidence_learns_whether_drafts_are_right(frozen: FrozenSide) -> None:
    """The rest of the head does not learn from it."""
    data, head = random_data([40, 30], [3, 5]), random_head(2)
    loss, _ = block_loss(head, frozen, data, data.starts, MASK)
    loss.backward()
    gradient = head.fc.weight.grad
    head.zero_grad()
    with torch.no_grad():
        head.get_parameter("confidence_head.proj.weight").mul_(-3.0)
    other, _ = block_loss(head, frozen, data, data.starts, MASK)
    other.backward()
    assert abs(float((other - loss).detach())) > 0.01
    assert gradient is not None
    torch.testing.assert_close(head.fc.weight.grad, gradient)


def test_tokens_outside_the_vocabulary_add_nothing(frozen: FrozenSide) -> None:
    """A draft that can never be accepted, and those after it, have no weight."""
    data, head = random_data([6], [2]), random_head()
    starts = torch.tensor([3])
    data = replace(data, greedy=torch.tensor([-1, -1, 5, 5, 6, 0, 7, 8]))
    with torch.no_grad():
        loss, _ = block_loss(head, frozen, data, starts, MASK)
        changed = replace(data, greedy=torch.tensor([-1, -1, 5, 5, 6, 1, 3, 8]))
        again, _ = block_loss(head, frozen, changed, starts, MASK)
        assert float(loss) == float(again)
        nothing = replace(data, greedy=torch.tensor([-1, -1, 5, 5, 0, 0, 0, 0]))
        none, agreement = block_loss(head, frozen, nothing, starts, MASK)
    assert (float(none), agreement) == (0.0, 0.0)


def test_an_epoch_has_every_text_once_and_the_same_seed_the_same_rows(data: HeadStates) -> None:
    starts, text = data.starts, data.text[data.starts]
    order = AnchorOrder(starts, text, 3, 1, seed=4)
    assert order.steps_per_epoch == 3
    steps = [order.starts(step) for step in range(9)]
    for epoch in (steps[:3], steps[3:6], steps[6:]):
        assert sorted(int(data.text[rows[0]]) for rows in epoch) == [0, 1, 3]
    for rows in steps:
        assert len(torch.unique(data.text[rows])) == 1
        assert len(rows) == min(3, int((text == data.text[rows[0]]).sum()))
        assert (rows[1:] > rows[:-1]).all()
        assert torch.isin(rows, starts).all()
    again = AnchorOrder(starts, text, 3, 1, seed=4)
    assert all(torch.equal(again.starts(step), steps[step]) for step in (8, 0, 5))
    other = AnchorOrder(starts, text, 3, 1, seed=5)
    assert any(not torch.equal(other.starts(step), steps[step]) for step in range(9))


def test_a_mask_is_a_token_that_the_texts_do_not_have(data: HeadStates) -> None:
    embeddings = torch.ones(VOCAB, HIDDEN)
    data = replace(data, token=3 + torch.arange(len(data)) % 10)
    assert choose_mask(data, embeddings) == 0
    embeddings[:3] = 0
    assert choose_mask(data, embeddings) == 13


def test_taps_of_any_size_begin_alike() -> None:
    data = random_data([50], [4])
    small, large = (replace(data, states=data.states.part(torch.arange(54))) for _ in range(2))
    states = data.states[torch.arange(54)].float() * torch.tensor([1.0, 300.0])[:, None]
    large = replace(large, states=MappedStates([states.bfloat16()]))
    sizes = tap_sizes(large) / tap_sizes(small)
    torch.testing.assert_close(sizes, torch.tensor([1.0, 300.0]), rtol=0.02, atol=0.0)


def test_states_with_prompts_have_a_row_of_each_position(tmp_path: Path) -> None:
    """The rows of answers are those of states without."""
    directory = write_model(tmp_path / "model", "llama_tied")
    network = eecore.load(directory, device="cpu", kv_cache_tokens=512).network
    settings = StatesSettings(network_digest(network), "float32", 64, (2, 4))
    texts = [
        Answer(3 * i, prompt, answer)
        for i, (prompt, answer) in enumerate(
            zip(random_prompts(5, 18, 1), random_prompts(7, 4, 6, seed=1), strict=True)
        )
    ]
    found = []
    for with_prompts in (False, True):
        place = tmp_path / str(with_prompts)
        place.mkdir()
        own = replace(settings, with_prompts=with_prompts)
        counts: list[tuple[int, int]] = []

        def progress(done: int, wanted: int, counts: list[tuple[int, int]] = counts) -> None:
            counts.append((done, wanted))

        assert collect_states(network, texts, place, own, progress=progress)
        assert counts[-1] == (17, 17)
        found.append(open_states([place], own))
    answers, whole = found
    assert len(whole) == 17 + 24 - 3
    tokens = [token for text in texts for token in (*text.prompt, *text.answer)[1:]]
    assert whole.token.tolist() == tokens
    of_answers = whole.greedy >= 0
    assert torch.equal(whole.greedy[of_answers], answers.greedy)
    assert torch.equal(whole.token[of_answers], answers.token)
    assert torch.equal(whole.text[of_answers], answers.text)
    rows = of_answers.nonzero()[:, 0]
    assert torch.equal(whole.states[rows], answers.states[torch.arange(17)])


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"block_size": 1}, r"block_size: expected a whole number, 2\.\.64, got 1"),
        ({"num_layers": 0}, r"num_layers: expected a whole number, 1\.\.16, got 0"),
        ({"markov_rank": 0}, r"markov_rank: expected a whole number, 1\.\.1024, got 0"),
    ],
)
def test_settings_that_cannot_be(setting: dict[str, int], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        BlockConfig(**{"steps": 1, "intermediate_size": 4, **setting})  # type: ignore[arg-type]


def test_logits_begin_with_one_spread(frozen: FrozenSide) -> None:
    """Whatever the size of the model's norm."""
    for size in (0.1, 30.0):
        norm = first_norm(replace(frozen, final_norm=frozen.final_norm * size))
        states = torch.nn.functional.rms_norm(frozen.embeddings[2:18], (HIDDEN,), norm, EPS)
        assert float(frozen.products(states).std()) == pytest.approx(SPREAD, rel=1e-3)


@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_embeddings_are_those_that_are_stored(tmp_path: Path, family: str) -> None:
    """A head multiplies by none of the factors that its model has for embeddings and logits."""
    write_family(tmp_path / "model", family)
    network = eecore.load(tmp_path / "model", device="cpu", kv_cache_tokens=64).network
    assert isinstance(network, LlamaModel)
    hidden, vocab = network.config.hidden_size, network.config.vocab_size
    data = random_data([5] * 60, [3] * 60)
    states = torch.randn(len(data), 2, hidden, generator=torch.Generator().manual_seed(2))
    settings = replace(SETTINGS, hidden_size=hidden)
    data = replace(data, settings=settings, states=MappedStates([states.bfloat16()]))
    config = BlockConfig(steps=1, intermediate_size=8, vocabulary_size=vocab // 2)
    trainee = BlockTrainee(network, data, config)
    table = network.weights.embed_tokens.weight
    assert torch.equal(trainee.frozen.embeddings, table)
    assert not torch.allclose(trainee.frozen.embeddings, network.embed(torch.arange(vocab)))
    rows = network.weights.lm_head.weight[trainee.frozen.vocabulary]
    values = torch.randn(3, hidden)
    torch.testing.assert_close(trainee.frozen.products(values), values @ rows.T)
    assert trainee.frozen.with_tokens(torch.arange(vocab)) is trainee.frozen
