"""Draft heads: their two moves, what they learn from, and how their agreement is counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import eecore
from eecore.errors import RequestError, TrainingError
from eecore.models.draft_head import matrix_rows
from eecore.models.network_digest import network_digest
from eecore.training import (
    DraftHead,
    HeadConfig,
    HeadSizes,
    HeadStates,
    MappedStates,
    StatesSettings,
    WrittenText,
    collect_states,
    open_states,
)
from eecore.training.head_loss import (
    FrozenSide,
    StretchOrder,
    agreement_by_position,
    draft_loss,
    starts_of,
)
from eecore.training.head_run import choose_vocabulary, is_held_out
from tiny_models import random_prompts, write_model

HIDDEN, VOCAB, EPS = 8, 20, 1e-5
SETTINGS = StatesSettings("digest", "float32", HIDDEN, (1, 2))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    directory = write_model(tmp_path_factory.mktemp("head") / "model", "llama_tied")
    return eecore.load(directory, device="cpu", kv_cache_tokens=512)


def random_head(seed: int = 0, num_blocks: int = 2) -> DraftHead:
    """Of which no weight is what heads begin with."""
    head = DraftHead(HeadSizes(HIDDEN, 2, 12, num_blocks), EPS, torch.ones(HIDDEN))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return head


def random_data(lengths: list[int], seed: int = 0) -> tuple[HeadStates, FrozenSide]:
    """Texts numbered 0, 1, ..., whose tokens are the greedy ones but for every third."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    greedy = torch.randint(VOCAB, (len(text),), generator=generator)
    token = torch.where(torch.arange(len(text)) % 3 == 2, (greedy + 1) % VOCAB, greedy)
    states = torch.randn(len(text), 2, HIDDEN, generator=generator).bfloat16()
    frozen = FrozenSide(
        embeddings=torch.randn(VOCAB, HIDDEN, generator=generator),
        head_rows=torch.randn(VOCAB - 4, HIDDEN, generator=generator),
        vocabulary=torch.arange(2, VOCAB - 2),
        final_norm=torch.ones(HIDDEN),
        eps=EPS,
    )
    return HeadStates(SETTINGS, MappedStates([states]), text, token, greedy), frozen


def normed(values: Tensor, weight: Tensor) -> Tensor:
    return values * (values.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def test_the_moves_are_the_formulas() -> None:
    head, (data, frozen) = random_head(), random_data([5])
    states, embedded = data.states[torch.arange(5)].float(), frozen.embeddings[data.token]
    t = head.tensors(torch.float32)
    with torch.no_grad():
        s = sum(normed(states[:, i], t["taps.norm"][i]) @ t["taps.weight"][i].T for i in (0, 1))
        torch.testing.assert_close(head.begin(states), s)
        u = normed(s, t["state.norm"]) @ t["state.weight"].T
        u = u + normed(embedded, t["token.norm"]) @ t["token.weight"].T
        for b in (0, 1):
            x = normed(u, t["mlp.norm"][b])
            inner = torch.nn.functional.silu(x @ t["mlp.gate"][b].T) * (x @ t["mlp.up"][b].T)
            u = u + inner @ t["mlp.down"][b].T
        torch.testing.assert_close(head.step(s, embedded), u)
        torch.testing.assert_close(head.output(u), normed(u, t["norm"]))


def test_agreement_is_that_of_drafts_made_one_by_one() -> None:
    head, (data, frozen) = random_head(3, num_blocks=1), random_data([9, 2, 1, 14], seed=1)
    right, tried = [0, 0, 0], [0, 0, 0]
    with torch.no_grad():
        for start in range(len(data)):
            state = head.begin(data.states[torch.tensor([start])].float())
            for k in range(3):
                target = start + k + 1
                if target >= len(data) or data.text[target] != data.text[start]:
                    break
                state = head.step(state, frozen.embeddings[data.token[target - 1]][None])
                place = int((head.output(state) @ frozen.head_rows.T).argmax())
                tried[k] += 1
                if frozen.vocabulary[place] != data.greedy[target]:
                    break
                right[k] += 1
                if data.token[target] != data.greedy[target]:
                    break
    expected = [r / t if t else 0.0 for r, t in zip(right, tried, strict=True)]
    assert agreement_by_position(head, frozen, data, starts_of(data.text), 3) == expected


def test_a_head_learns_what_the_loss_says() -> None:
    head, (data, frozen) = random_head(num_blocks=1), random_data([40, 30])
    starts = starts_of(data.text)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        loss, agreement = draft_loss(head, frozen, data, starts, 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        assert 0 <= agreement <= 1
    assert losses[-1] < 0.7 * losses[0]


def test_an_epoch_has_every_start_once() -> None:
    text = torch.tensor([4] * 9 + [7] * 1 + [2] * 2 + [5] * 8)
    order = StretchOrder(text, 4, 1, seed=0)
    starts = torch.cat([order.starts(step) for step in range(order.steps_per_epoch)])
    assert starts.sort().values.tolist() == starts_of(text).tolist()
    again = torch.cat([order.starts(order.steps_per_epoch + i) for i in range(2)])
    assert again.tolist() != starts[: len(again)].tolist()


def test_states_are_those_of_the_model_at_each_tap(model: eecore.Model, tmp_path: Path) -> None:
    prompts = random_prompts(5, 18, 33)
    outputs = eecore.generate(model, prompts, max_tokens=12, ignore_eos=True)
    texts = [WrittenText(7 + i, o.prompt_token_ids, o.token_ids) for i, o in enumerate(outputs)]
    settings = StatesSettings(network_digest(model.network), "float32", 64, (2, 4))
    assert collect_states(model.network, texts, tmp_path, settings)
    data = open_states([tmp_path], settings)
    assert data.text.tolist() == [7] * 12 + [8] * 12 + [9] * 12
    assert data.token.tolist() == [t for output in outputs for t in output.token_ids]
    assert torch.equal(data.token, data.greedy)
    with torch.inference_mode():
        logits = model.network.logits(data.states[torch.arange(36)][:, 1].float())
    assert (logits.argmax(-1) == data.greedy).float().mean() > 0.9  # states are rounded


def test_states_of_several_runs_are_one_behind_another(tmp_path: Path, model: eecore.Model) -> None:
    settings = StatesSettings("one", "float32", 64, (2, 4))
    parts = []
    for place, answers in enumerate(([[3, 4], [5]], [[7, 8, 9]])):
        texts = [WrittenText(i, [1, 2], answer) for i, answer in enumerate(answers)]
        (tmp_path / str(place)).mkdir()
        collect_states(model.network, texts, tmp_path / str(place), settings)
        parts.append(open_states([tmp_path / str(place)], settings))
    both = open_states([tmp_path / "0", tmp_path / "1"], settings)
    assert both.token.tolist() == [3, 4, 5, 7, 8, 9]
    assert len(torch.unique(both.text)) == 3
    assert is_held_out(both.text).tolist() == [False] * 6
    rows = torch.tensor([5, 0, 3, 2, 2])
    expected = torch.cat([part.states[torch.arange(3)] for part in parts])[rows]
    assert torch.equal(both.states[rows], expected)
    assert torch.equal(both.states.part(rows)[torch.tensor([4, 1])], expected[[4, 1]])
    assert len(both.states.part(rows)) == 5


def test_states_of_another_run_are_refused(tmp_path: Path, model: eecore.Model) -> None:
    settings = StatesSettings("one", "float32", 64, (4,))
    collect_states(model.network, [WrittenText(0, [1, 2], [3, 4])], tmp_path, settings)
    other = StatesSettings("one", "int8", 64, (4,))
    with pytest.raises(TrainingError, match="weights: expected 'int8', as this run has, got"):
        open_states([tmp_path], other)


def test_rows_of_the_lm_head_whatever_it_is_stored_in(model: eecore.Model, tmp_path: Path) -> None:
    tokens = torch.tensor([3, 5, 319])
    rows = matrix_rows(model.network.weights.lm_head, tokens)
    assert torch.equal(rows, model.network.embed(tokens))
    directory = write_model(tmp_path / "model", "llama")
    plain = eecore.load(directory, device="cpu", kv_cache_tokens=64)
    packed = eecore.load(directory, device="cpu", weights="int8", kv_cache_tokens=64)
    rows = matrix_rows(plain.network.weights.lm_head, tokens)
    assert torch.equal(rows, plain.network.weights.lm_head.weight[tokens])
    torch.testing.assert_close(
        matrix_rows(packed.network.weights.lm_head, tokens), rows, atol=0.02, rtol=0.02
    )


def test_a_digest_is_the_same_for_every_quantisation(tmp_path: Path, model: eecore.Model) -> None:
    directory = write_model(tmp_path / "model", "llama_tied")
    for weights in (None, "int8", "int4"):
        other = eecore.load(directory, device="cpu", weights=weights, kv_cache_tokens=64)
        assert network_digest(other.network) == network_digest(model.network)
    write_model(directory, "llama_tied", seed=1)
    stranger = eecore.load(directory, device="cpu", kv_cache_tokens=64)
    assert network_digest(stranger.network) != network_digest(model.network)


def test_the_vocabulary_has_what_ends_a_text(model: eecore.Model) -> None:
    tokens = [torch.tensor([9, 9, 9, 4, 4, 300]), torch.tensor([4, 4, 9])]
    assert choose_vocabulary(model.network, tokens, 3).tolist() == [4, 9, 257]
    with pytest.raises(TrainingError, match=r"vocabulary: expected 1..320, the model's, got 321"):
        choose_vocabulary(model.network, tokens, 321)


def test_texts_are_held_out_in_pairs() -> None:
    held = is_held_out(torch.arange(4000))
    assert held.float().mean() == 1 / 20
    assert torch.equal(held[::2], held[1::2])


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"steps": 0}, "steps: expected 1 or more, got 0"),
        ({"num_drafts": 9}, "num_drafts: expected 1..8, got 9"),
        ({"learning_rate": 2.0}, "learning_rate: expected 0..1, got 2.0"),
        ({"num_blocks": 0}, "num_blocks: expected 1 or more, got 0"),
    ],
)
def test_settings_that_cannot_be(setting: dict[str, float], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        HeadConfig(**{"steps": 1, "intermediate_size": 4, **setting})  # type: ignore[arg-type]
