"""Draft heads: their two steps, their training data, and how their agreement is counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import eecore
from eecore.errors import RequestError, TrainingError
from eecore.lab.answers.writing import Answer
from eecore.lab.training.draft_head import DraftHead, HeadSizes
from eecore.lab.training.head_keys import choose_attended, key_begins
from eecore.lab.training.head_loss import (
    LATER_ROWS,
    STEP_WEIGHTS,
    FrozenSide,
    StretchOrder,
    agreement_by_position,
    draft_loss,
)
from eecore.lab.training.head_run import (
    HeadConfig,
    HeadTrainer,
    begin_queries,
    choose_vocabulary,
    is_held_out,
)
from eecore.lab.training.head_states import (
    HeadStates,
    MappedStates,
    StatesSettings,
    collect_states,
    ends_of,
    open_states,
)
from eecore.models import KVCache, network_digest
from tiny_models import random_prompts, write_model

HIDDEN, VOCAB, EPS = 8, 20, 1e-5
HEAD_DIM, QUERIES, ATTENDED = 6, 12, ((0, 1), (1, 0), (1, 1))
SETTINGS = StatesSettings("digest", "float32", HIDDEN, (1, 2))
ATTENDING = StatesSettings(
    "digest", "float32", HIDDEN, (1, 2), attended=ATTENDED, head_dim=HEAD_DIM, queries=QUERIES
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    directory = write_model(tmp_path_factory.mktemp("head") / "model", "llama_tied")
    return eecore.load(directory, device="cpu", kv_cache_tokens=512)


def random_head(seed: int = 0, num_blocks: int = 2, *, attends: bool = False) -> DraftHead:
    """A head whose weights all differ from the initial ones."""
    sizes = HeadSizes(HIDDEN, 2, 12, num_blocks, *((len(ATTENDED), QUERIES) if attends else ()))
    head = DraftHead(sizes, EPS, torch.ones(HIDDEN))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return head


def random_data(
    lengths: list[int], seed: int = 0, *, attends: bool = False
) -> tuple[HeadStates, FrozenSide]:
    """Texts numbered 0, 1, ..., whose tokens are the greedy ones but for every third.

    They follow prompts of 3, 4, ... tokens.
    """
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
    if not attends:
        return HeadStates(SETTINGS, MappedStates(states), text, token, greedy), frozen
    positions = torch.cat([torch.arange(n) + 2 + i for i, n in enumerate(lengths)])
    num_keys = [n + 2 + i for i, n in enumerate(lengths)]
    keys = torch.randn(sum(num_keys), 3, 2, HEAD_DIM, generator=generator).bfloat16()
    data = HeadStates(
        *(ATTENDING, MappedStates(states), text, token, greedy),
        keys=keys,
        key_begins=key_begins(text, positions),
        positions=positions,
    )
    return data, replace(frozen, cos_sin=torch.randn(60, 4, generator=generator))


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


def test_what_a_head_attends_to_is_the_formula() -> None:
    """Rows of two texts: each sees the keys up to its position, also one step later."""
    head = random_head(4, num_blocks=1, attends=True)
    data, frozen = random_data([5, 3], seed=2, attends=True)
    t, rows = head.tensors(torch.float32), torch.tensor([0, 3, 5, 6])
    assert data.keys is not None
    keys = data.keys.float()
    seen = data.seen(rows, frozen.cos_sin)
    assert seen is not None
    asked = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(5))
    for later in (0, 1):
        with torch.no_grad():
            found = seen.found(head.queries(asked))
        for i, row in enumerate(rows.tolist()):
            position, begin = int(data.positions[row]), int(data.key_begins[row])
            assert begin == (0 if row < 5 else 7)
            own = keys[begin : begin + position + 1]
            cos, sin = frozen.cos_sin[position + 1 + later].chunk(2)
            for a in range(3):
                q = t["attention.query"][a] @ normed(asked[i], t["attention.norm"])
                x, y, rest = q.view(2, HEAD_DIM).split((2, 2, 2), 1)
                q = torch.cat((x * cos - y * sin, y * cos + x * sin, rest), 1)
                shares = (q @ own[:, a, 0].T * HEAD_DIM**-0.5).softmax(1)
                expected = (shares @ own[:, a, 1]).flatten()
                torch.testing.assert_close(found[i, a], expected, atol=0.05, rtol=0.05)
        seen = seen.advanced()
    embedded = frozen.embeddings[data.token[rows]]
    with torch.no_grad():
        seen = data.seen(rows, frozen.cos_sin)
        assert seen is not None
        u = head.asked(asked, embedded)
        out = t["attention.output"]
        u = u + sum(seen.found(head.queries(u))[:, a] @ out[a].T for a in range(3))
        x = normed(u, t["mlp.norm"][0])
        inner = torch.nn.functional.silu(x @ t["mlp.gate"][0].T) * (x @ t["mlp.up"][0].T)
        torch.testing.assert_close(head.step(asked, embedded, seen), u + inner @ t["mlp.down"][0].T)


@pytest.mark.parametrize("attends", [False, True])
def test_agreement_is_that_of_drafts_made_one_by_one(attends: bool) -> None:
    head = random_head(3, num_blocks=1, attends=attends)
    data, frozen = random_data([60, 2, 1, 80], seed=1, attends=attends)
    right, tried = [0, 0, 0], [0, 0, 0]
    with torch.no_grad():
        # Most first drafts are right.
        before = torch.arange(len(data) - 1)
        seen = data.seen(before, frozen.cos_sin)
        state = head.begin(data.states[before].float())
        state = head.step(state, frozen.embeddings[data.token[before]], seen)
        drafts = frozen.vocabulary[(head.output(state) @ frozen.head_rows.T).argmax(-1)]
        greedy = torch.where(before % 4 > 0, drafts, data.greedy[1:])
        data = replace(data, greedy=torch.cat((data.greedy[:1], greedy)))
        for start in range(len(data)):
            state = head.begin(data.states[torch.tensor([start])].float())
            seen = data.seen(torch.tensor([start]), frozen.cos_sin)
            for k in range(3):
                target = start + k + 1
                if target >= len(data) or data.text[target] != data.text[start]:
                    break
                state = head.step(state, frozen.embeddings[data.token[target - 1]][None], seen)
                seen = seen and seen.advanced()
                place = int((head.output(state) @ frozen.head_rows.T).argmax())
                tried[k] += 1
                if frozen.vocabulary[place] != data.greedy[target]:
                    break
                right[k] += 1
                if data.token[target] != data.greedy[target]:
                    break
    expected = [r / t if t else 0.0 for r, t in zip(right, tried, strict=True)]
    assert agreement_by_position(head, frozen, data, data.starts, 3) == expected


@pytest.mark.parametrize("attends", [False, True])
def test_the_loss_by_hand(attends: bool) -> None:
    """The cross entropy of each draft with the model's own distribution."""
    head = random_head(num_blocks=1, attends=attends)
    data, frozen = random_data([9, 2, 8], attends=attends)
    losses, right = ([], [], []), []
    with torch.no_grad():
        for number, start in enumerate(data.starts.tolist()):
            row = torch.tensor([start])
            state = head.begin(data.states[row].float())
            seen = data.seen(row, frozen.cos_sin)
            for k in range(1 if number % LATER_ROWS else 3):
                target = start + k + 1
                if target >= int(data.ends[start]):
                    break
                state = head.step(state, frozen.embeddings[data.token[target - 1]][None], seen)
                seen = seen and seen.advanced()
                if 2 <= (greedy := int(data.greedy[target])) < VOCAB - 2:
                    teacher = frozen.distribution(data.states.last(torch.tensor([target])))
                    logits = frozen.logits(head.output(state))
                    losses[k].append(float(-(teacher * logits.log_softmax(-1)).sum()))
                    right += [int(logits.argmax()) == greedy - 2] if k == 0 else []
        found, agreement = draft_loss(head, frozen, data, data.starts, 3)
    means = [sum(own) / len(own) for own in losses]
    expected = sum(w * mean for w, mean in zip(STEP_WEIGHTS, means, strict=False))
    assert float(found) == pytest.approx(expected / sum(STEP_WEIGHTS[:3]), rel=1e-3)
    assert agreement == sum(right) / len(right)


def test_matrices_decay_and_norms_do_not() -> None:
    names = {name for name, p in random_head().named_parameters() if decays(name, p)}
    assert names == {"tap_weight", "state_weight", "token_weight", "mlp_gate", "mlp_up", "mlp_down"}


def decays(name: str, parameter: torch.nn.Parameter) -> bool:
    return HeadTrainer.rates(None, name, parameter)[0]  # type: ignore[arg-type]


def test_tokens_of_a_text_are_learnt_beside_the_vocabulary() -> None:
    """The loss is that of a vocabulary with these tokens; the head has 8 of 60 at first."""
    head, (data, wide) = random_head(), random_data([40, 30])
    few = torch.arange(10, 18)
    narrow = replace(
        wide,
        vocabulary=few,
        head_rows=wide.head_rows[few - 2],
        rows_of=lambda tokens: wide.head_rows[tokens - 2],
    )
    starts = data.starts
    assert narrow.with_tokens(few[:3]) is narrow
    data = replace(data, greedy=data.greedy.clamp(2, VOCAB - 3))
    both = narrow.with_tokens(data.greedy)
    assert both.vocabulary.tolist() == sorted({*few.tolist(), *data.greedy.tolist()})
    assert torch.equal(both.head_rows, wide.head_rows[both.vocabulary - 2])
    with torch.no_grad():
        loss, agreement = draft_loss(head, narrow, data, starts, 3)
        expected, its = draft_loss(head, replace(both, rows_of=None), data, starts, 3)
        without, _ = draft_loss(head, replace(narrow, rows_of=None), data, starts, 3)
    torch.testing.assert_close(loss, expected)
    assert agreement == its
    assert abs(float(without) - float(loss)) > 0.1


def test_an_epoch_has_every_start_once() -> None:
    text = torch.tensor([4] * 9 + [7] * 1 + [2] * 2 + [5] * 8)
    order = StretchOrder(text, 4, 1, seed=0)
    starts = torch.cat([order.starts(step) for step in range(order.steps_per_epoch)])
    rows = torch.arange(len(text))
    assert starts.sort().values.tolist() == rows[rows + 1 < ends_of(text)].tolist()
    again = torch.cat([order.starts(order.steps_per_epoch + i) for i in range(2)])
    assert again.tolist() != starts[: len(again)].tolist()


def test_states_are_those_of_the_model_at_each_tap(model: eecore.Model, tmp_path: Path) -> None:
    prompts = random_prompts(5, 18, 33)
    outputs = eecore.generate(model, prompts, max_tokens=12, ignore_eos=True)
    texts = [Answer(7 + i, o.prompt_token_ids, o.token_ids) for i, o in enumerate(outputs)]
    settings = StatesSettings(network_digest(model.network), "float32", 64, (2, 4))
    assert collect_states(model.network, texts, tmp_path, settings)
    data = open_states(tmp_path, settings)
    assert data.text.tolist() == [7] * 12 + [8] * 12 + [9] * 12
    assert data.token.tolist() == [t for output in outputs for t in output.token_ids]
    assert torch.equal(data.token, data.greedy)
    with torch.inference_mode():
        logits = model.network.logits(data.states[torch.arange(36)][:, 1].float())
    assert (logits.argmax(-1) == data.greedy).float().mean() > 0.9  # states are rounded


def test_keys_are_those_of_the_models_cache(model: eecore.Model, tmp_path: Path) -> None:
    """Keys of whole texts; the run is interrupted and continued."""
    network = model.network
    attended = choose_attended(network, 3)
    settings = StatesSettings(
        network_digest(network), "float32", 64, (2, 4), attended, head_dim=64, queries=128
    )
    texts = [
        Answer(2 * i, prompt, answer)
        for i, (prompt, answer) in enumerate(
            zip(random_prompts(5, 18, 33), random_prompts(7, 4, 6, seed=1), strict=True)
        )
    ]
    assert collect_states(network, texts[:2], tmp_path, settings)
    with (tmp_path / "keys.bin").open("ab") as file:
        file.write(b"more than there should be")
    assert collect_states(network, texts, tmp_path, settings)
    data = open_states(tmp_path, settings)
    keys = data.keys
    assert keys is not None
    row = 0
    for text in texts:
        tokens = [*text.prompt, *text.answer][:-1]
        kv = KVCache.allocate(
            network.config, 1, len(tokens), device=network.device, dtype=network.dtype
        )
        batch = network.whole_text(len(tokens))
        network.layers(0, 4, network.embed(torch.tensor(tokens)), kv, batch)
        begin = int(data.key_begins[row])
        for a, (layer, head) in enumerate(attended):
            for which, cache in enumerate((kv.k, kv.v)):
                own = keys[begin : begin + len(tokens), a, which]
                torch.testing.assert_close(own, cache[layer, 0, :, head].bfloat16())
        expected = list(range(len(text.prompt) - 1, len(tokens)))
        assert data.positions[row : row + len(text.answer)].tolist() == expected
        row += len(text.answer)
    assert data.queries is not None
    assert len(data.queries) == 17
    held_out = data.part(data.text > 0)
    assert held_out.positions.tolist() == data.positions[data.text > 0].tolist()


def test_the_heads_that_look_for_what_came_after_the_same_token(model: eecore.Model) -> None:
    network = model.network
    every = choose_attended(network, 64)
    assert every == tuple((layer, head) for layer in range(4) for head in range(2))
    few = choose_attended(network, 3)
    assert len(few) == 3
    assert set(few) < set(every)
    assert few == tuple(sorted(few))


def test_queries_begin_as_what_the_model_asks() -> None:
    """Queries equal the model's where a linear layer can express them, up to the ridge."""
    head = random_head(6, num_blocks=1, attends=True)
    data, frozen = random_data([300, 200], seed=3, attends=True)
    weight = torch.randn(3 * QUERIES, HIDDEN, generator=torch.Generator().manual_seed(7))
    before = torch.arange(len(data) - 1)
    with torch.no_grad():
        head.attention_norm.fill_(1.0)
        state = head.begin(data.states[before].float())
        known = head.asked(state, frozen.embeddings[data.token[before]])
        queries = normed(known, torch.ones(HIDDEN)) @ weight.T
    rows = torch.cat((torch.zeros(1, 3 * QUERIES), queries)).view(-1, 3, QUERIES)
    data = replace(data, queries=rows)
    begin_queries(head, frozen, data, torch.ones(len(data), dtype=torch.bool))
    with torch.no_grad():
        missed = head.queries(known).flatten(1) - queries
    inside = data.text[before] == data.text[before + 1]
    assert missed[inside].square().mean() < 1e-3 * queries.square().mean()


def test_states_of_another_run_are_refused(tmp_path: Path, model: eecore.Model) -> None:
    settings = StatesSettings("one", "float32", 64, (4,))
    collect_states(model.network, [Answer(0, [1, 2], [3, 4])], tmp_path, settings)
    with_keys = replace(settings, attended=((0, 1),), head_dim=64, queries=128)
    for other, message in (
        (with_keys, r"attended: expected \[\[0, 1\]\], as this run has"),
        (replace(settings, weights="int8"), "weights: expected 'int8', as this run has, got"),
    ):
        with pytest.raises(TrainingError, match=message):
            open_states(tmp_path, other)


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
        ({"steps": 0}, r"steps: expected a whole number, 1\.\..*, got 0"),
        ({"num_drafts": 9}, r"num_drafts: expected a whole number, 1\.\.8, got 9"),
        ({"learning_rate": 2.0}, "learning_rate: expected .*1, got 2.0"),
    ],
)
def test_settings_that_cannot_be(setting: dict[str, float], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        HeadConfig(**{"steps": 1, "intermediate_size": 4, **setting})  # type: ignore[arg-type]
