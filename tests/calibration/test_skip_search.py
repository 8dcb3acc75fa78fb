"""The search for sublayers that a draft can leave out."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import eecore
from devices import load
from eecore import DraftAndVerify, RequestError, SkipSearch
from eecore.calibration.skip_search import SkipStep, predicted_speedup
from tiny_models import random_prompts, write_model

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = random_prompts(30, 20, seed=12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    """A model: the attention of layer 1 and the MLP of layer 2 add nothing."""
    directory = write_model(tmp_path_factory.mktemp("harmless"))
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.o_proj.weight"].zero_()
    tensors["model.layers.2.mlp.down_proj.weight"].zero_()
    save_file(tensors, path, metadata={"format": "pt"})
    return load(directory, kv_cache_tokens=512)


def test_predicted_speedup_by_hand() -> None:
    # One draft at half price: (1 + a) tokens for 1.5 passes.
    assert predicted_speedup(0.8, 0.5, 1) == (pytest.approx(1.8 / 1.5), 1)
    # Two: (1 + 0.8 + 0.64) / 2 = 1.22, better than one (1.2) and three (2.952 / 2.5 = 1.1808).
    assert predicted_speedup(0.8, 0.5, 8) == (pytest.approx(1.22), 2)
    # Drafts that are never right and cost nothing: the verification's token alone.
    assert predicted_speedup(0.0, 0.0, 4)[0] == pytest.approx(1.0)
    # Drafts that are always right and cost nothing: d + 1 tokens a pass.
    speedup, num_drafts = predicted_speedup(1.0, 0.0, 8)
    assert num_drafts == 8
    assert speedup == pytest.approx(9, rel=0.01)
    # A draft as expensive as the model never pays.
    assert predicted_speedup(0.9, 1.0, 8)[0] < 1


def test_harmless_sublayers_are_found_first(model: eecore.Model) -> None:
    seen: list[SkipStep] = []
    search = eecore.search_skipped_sublayers(model, TEXTS, max_skipped=3, progress=seen.append)
    assert list(search.path) == seen
    first, second = search.path[:2]
    # Both cost nothing; ties go to either.
    assert {(first.skip_attention, first.skip_mlp)} <= {((1,), ()), ((), (2,))}
    assert (second.skip_attention, second.skip_mlp) == ((1,), (2,))
    assert first.agreement == second.agreement == 1.0
    assert second.predicted_speedup > first.predicted_speedup > 1
    if len(search.path) > 2:
        assert search.path[2].agreement < 1.0
        assert len(search.path[2].skip_attention) + len(search.path[2].skip_mlp) == 3
    costs = [step.draft_cost for step in search.path]
    assert costs == sorted(costs, reverse=True)


def test_draft_cost_counts_the_weights_that_are_read(model: eecore.Model) -> None:
    search = eecore.search_skipped_sublayers(model, TEXTS, max_skipped=2)
    attention = 64 * (256 + 2 * 128) + 256 * 64  # q, k and v; o
    mlp = 3 * 64 * 96
    total = 4 * (attention + mlp) + 320 * 64
    assert search.path[1].draft_cost == pytest.approx(1 - (attention + mlp) / total)


def test_the_found_policy_is_lossless_and_always_accepted(model: eecore.Model) -> None:
    search = eecore.search_skipped_sublayers(model, TEXTS, max_skipped=2)
    policy = search.policy()
    assert policy.skip_attention == {1}
    assert policy.skip_mlp == {2}
    assert policy.num_drafts == search.best.num_drafts
    assert search.policy(num_drafts=3).num_drafts == 3
    prompts = random_prompts(4, 9)
    full = eecore.generate(model, prompts, max_tokens=20, ignore_eos=True)
    drafted = eecore.generate(model, prompts, exit=policy, max_tokens=20, ignore_eos=True)
    for one, other in zip(full, drafted, strict=True):
        assert one.token_ids == other.token_ids
        assert other.stats.draft_acceptance == 1.0


def test_save_and_load(model: eecore.Model, tmp_path: Path) -> None:
    search = eecore.search_skipped_sublayers(model, TEXTS, max_skipped=2)
    search.save(tmp_path / "search.json")
    loaded = SkipSearch.load(tmp_path / "search.json")
    assert loaded == search
    assert isinstance(loaded.policy(), DraftAndVerify)
    assert loaded.policy() == search.policy()


@pytest.mark.parametrize("text", ["not json", "{}", "[]", '[{"skip_attention": [1]}]'])
def test_files_that_are_no_search_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "search.json"
    path.write_text(text)
    with pytest.raises(RequestError, match=rf"{path}: (\[0\]: )?expected"):
        SkipSearch.load(path)


def test_texts_that_cannot_be_searched(model: eecore.Model, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="texts: expected at least one of two or more tokens"):
        eecore.search_skipped_sublayers(model, [[1], []])
    with pytest.raises(RequestError, match="texts: expected at most 512 tokens each, got 513"):
        eecore.search_skipped_sublayers(model, [[1] * 513], max_tokens=1024)
    bare = load(write_model(tmp_path, tokenizer=False), kv_cache_tokens=64)
    with pytest.raises(RequestError, match="texts: expected a model with a tokenizer"):
        eecore.search_skipped_sublayers(bare, ["text"])
    with pytest.raises(RequestError, match="max_skipped: expected 1 or more, got 0"):
        eecore.search_skipped_sublayers(model, TEXTS, max_skipped=0)
