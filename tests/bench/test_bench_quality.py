"""Perplexity is counted as llama-perplexity does; a rescaled model computes the same."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import eecore
import tiny_models
from bench.quality import gemma, perplexity
from eecore.models import LlamaModel
from eecore.models.readers.gguf_checkpoint import GGUFCheckpoint

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 12


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    directory = tmp_path_factory.mktemp("tiny") / "model"
    tiny_models.write_model(directory)
    return eecore.load(directory, device="cpu").network


def test_the_second_half_of_each_window_is_scored_by_what_stands_before_it(
    network: LlamaModel,
) -> None:
    (ids,) = tiny_models.random_prompts(2 * WINDOW + 5)  # the rest fills no window
    losses = perplexity.window_losses(network, perplexity.windows_of(ids, WINDOW))
    expected = []
    for begin in (0, WINDOW):
        window, nats = ids[begin : begin + WINDOW], []
        for end in range(WINDOW // 2 + 1, WINDOW):  # llama-perplexity: n_ctx - n_ctx/2 - 1 of them
            states = perplexity.states_of(network, torch.tensor(window[:end]))
            nats.append(-float(network.logits(states)[-1].log_softmax(-1)[window[end]]))
        assert len(nats) == WINDOW - WINDOW // 2 - 1
        expected.append(sum(nats) / len(nats))
    assert losses == pytest.approx(expected, rel=1e-5)


def test_each_window_begins_as_a_text_does() -> None:
    assert perplexity.windows_of(range(8), 3) == [[0, 1, 2], [3, 4, 5]]
    assert perplexity.windows_of(range(8), 3, bos=9) == [[9, 1, 2], [9, 4, 5]]


def test_perplexities_are_compared_with_those_of_floats() -> None:
    row = {"text": "prose", "scored": 1020, "eecore": 10.1, "llama.cpp": 10.2, "float32": 10.0}
    result = {"perplexity": [row | {"llama.cpp, float32": 9.9}], "python": "3", "llama_cpp": "it"}
    compared = "| -0.98% | +1.00% | +2.00% | -1.00% |"
    assert compared in gemma.perplexities(result)


def test_running_perplexities_give_back_the_losses_of_the_windows() -> None:
    losses = [1.5, 2.25, 0.75]
    running = [perplexity.perplexity(losses[:count]) for count in (1, 2, 3)]
    assert running[0] == pytest.approx(math.exp(1.5))
    printed = ",".join(f"[{count}]{value:.4f}" for count, value in enumerate(running, 1))
    output = f"0.32 minutes\n{printed},\n\n"
    assert perplexity.losses_of_output(output) == pytest.approx(losses, abs=1e-4)
    assert perplexity.losses_of_output("0.32 minutes\n") == []


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", False), ("llama", True), ("qwen2", False), ("qwen2", True)]
)
def test_a_rescaled_model_computes_the_same_with_other_weights(
    family: str, tied: bool, tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    import tiny_gguf
    from bench.quality.rescaled import rescaled_file

    directory = tiny_models.write_model(tmp_path / "model", family, tie_word_embeddings=tied)
    source = tiny_gguf.write_gguf(tmp_path / "source.gguf", directory, architecture=family)
    target = rescaled_file(source, tmp_path / "target.gguf")
    ids = torch.tensor(tiny_models.random_prompts(20)[0])
    files = [GGUFCheckpoint(file) for file in (source, target)]
    networks = [eecore.load(checkpoint.place, device="cpu").network for checkpoint in files]
    one, other = (network.logits(perplexity.states_of(network, ids)) for network in networks)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(one.abs().max()))
    assert files[0].values == files[1].values
    for name in files[0].names:
        stays = name.endswith(("embed_tokens.weight", "q_proj.bias", "k_proj.bias"))
        stays |= tied and name == "model.norm.weight"
        assert torch.equal(*(checkpoint.tensor(name) for checkpoint in files)) == stays, name
