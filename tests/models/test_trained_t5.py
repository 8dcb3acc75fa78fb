"""The trained T5 of the benchmarks: transformers' logits and tokens, and what its card says."""

from __future__ import annotations

import pytest

import eecore
from bench.harness.places import T5, unpacked
from devices import load
from eecore.calibration import read_examples

DIRECTORY = unpacked(T5)
MEASURES = ("softmax", "state", "classifier")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def trained() -> eecore.Model:
    return load(DIRECTORY, dtype="float32", kv_cache_tokens=16384)


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str]]:
    return [(e.prompt, e.target or "") for e in read_examples(DIRECTORY / "examples.jsonl")]


def test_it_parses_and_self_speculation_gives_the_same(
    trained: eecore.Model, pairs: list[tuple[str, str]]
) -> None:
    prompts = [prompt for prompt, _ in pairs]
    full = eecore.generate(trained, prompts, max_tokens=96)
    right = sum(o.text == target for o, (_, target) in zip(full, pairs, strict=True))
    assert right >= 0.8 * len(pairs)
    drafted = eecore.generate(trained, prompts, exit=eecore.SelfSpeculative(2, 6), max_tokens=96)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in full]
    accepted = sum(output.stats.accepted for output in drafted)
    assert accepted > 0.7 * sum(output.stats.drafted for output in drafted)


@pytest.mark.parametrize("measure", MEASURES)
def test_calibrated_exits_keep_their_promise_on_other_texts(
    trained: eecore.Model, pairs: list[tuple[str, str]], measure: str
) -> None:
    classifier = None
    if measure == "classifier":
        classifier = eecore.ExitClassifier.load(DIRECTORY / "classifier.safetensors")
    path = DIRECTORY / f"calibration-{measure}.json"
    policy = eecore.ConfidentExit.calibrated(path, classifier)
    prompts = [prompt for prompt, _ in pairs]
    full = eecore.generate(trained, prompts, max_tokens=96)
    early = eecore.generate(trained, prompts, exit=policy, max_tokens=96)
    same = sum(a.text == b.text for a, b in zip(full, early, strict=True))
    assert same >= 0.9 * len(prompts)  # 95 % with probability .95, on more texts than these
    assert all("calibrated" in output.stats.contract for output in early)
