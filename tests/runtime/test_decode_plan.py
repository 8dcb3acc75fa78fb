"""Decoding by plans gives what the plain iteration gives, to the bit."""

from __future__ import annotations

import pytest
import torch
from test_confident_exit import MEASURES, SETTINGS, policy_of

import eecore
from eecore import ConfidentExit, Engine, EngineConfig, FixedExit, Full, Output, SamplingParams
from eecore.decoding.decode_plan import OnHost
from eecore.decoding.planned import PlannedDecoding
from eecore.exits import Exit
from tiny_models import random_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_prompts(3, 11, 1, 20, 7)
LENGTHS = (12, 3, 9, 1, 7)


class Recorder(OnHost):
    """Counts the flags that it is asked about, and those that let the body run."""

    asked = went_on = 0

    def unless(self, flag, body) -> None:  # type: ignore[no-untyped-def]
        self.asked += 1
        self.went_on += not flag.item()
        super().unless(flag, body)


def run(
    model: eecore.Model, policies: list[Exit], control: OnHost | None, **settings: int
) -> list[Output]:
    engine = Engine(model.network, model.tokenizer, EngineConfig(kv_cache_tokens=512, **settings))
    if control is not None:
        engine._planned = PlannedDecoding(engine._runner, control)
    for i, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(max_tokens=LENGTHS[i], logprobs=0 if i == 1 else None)
        policy = policies[i % len(policies)]
        engine.add_request(prompt, exit=policy, sampling=sampling, request_id=str(i))
    done = [step.output for step in engine.run() if step.output is not None]
    assert engine.pages.num_free == engine.pages.num_pages
    return sorted(done, key=lambda output: output.request_id)


def check_same(planned: list[Output], plain: list[Output]) -> None:
    for got, expected in zip(planned, plain, strict=True):
        assert got.token_ids == expected.token_ids
        assert got.exit_layers == expected.exit_layers
        assert got.confidences == expected.confidences
        assert got.logprobs == expected.logprobs
        for name in ("layers_run", "layers_filled", "fill_calls", "mean_exit_layer"):
            assert getattr(got.stats, name) == getattr(expected.stats, name)


@pytest.mark.parametrize("policy", [Full(), FixedExit(2)], ids=["full", "fixed"])
def test_without_checks(tiny: eecore.Model, policy: Exit) -> None:
    control = Recorder()
    check_same(run(tiny, [policy], control), run(tiny, [policy], None))
    assert control.asked == 0


@pytest.mark.parametrize("batch", ["each", "all"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("measure", MEASURES)
def test_confident_exits(tiny: eecore.Model, measure: str, setting: str, batch: str) -> None:
    policy = policy_of(measure, setting, batch)
    control = Recorder()
    check_same(run(tiny, [policy], control), run(tiny, [policy], None))
    assert control.asked > 0


@pytest.mark.parametrize(("threshold", "bodies"), [(0.0, 0), (0.999999, 3)])
def test_deeper_layers_run_while_a_row_survives(
    tiny: eecore.Model, threshold: float, bodies: int
) -> None:
    """Bodies that run per iteration: none when all rows leave at once, else all of four layers."""
    control = Recorder()
    outputs = run(tiny, [ConfidentExit(threshold)], control)
    iterations = control.asked - control.went_on if bodies == 0 else control.asked / bodies
    assert control.went_on == bodies * iterations
    assert iterations >= max(len(output.token_ids) for output in outputs) - 1
    assert {e for output in outputs for e in output.exit_layers[1:]} == {1 + bodies}


def test_rows_that_are_done_write_no_keys(tiny: eecore.Model) -> None:
    """What a plan leaves in the cache is what the plain iteration leaves."""
    caches = []
    for control in (OnHost(), None):
        torch.manual_seed(0)
        engine = Engine(tiny.network, tiny.tokenizer, EngineConfig(kv_cache_tokens=256))
        kv = engine._runner.kv
        kv.k.zero_()
        kv.v.zero_()
        if control is not None:
            engine._planned = PlannedDecoding(engine._runner, control)
        for prompt in PROMPTS:
            engine.add_request(
                prompt, exit=policy_of("softmax", "plain", "each"), sampling=SamplingParams(8)
            )
        list(engine.run())
        caches.append((kv.k.clone(), kv.v.clone()))
    for planned, plain in zip(*caches, strict=True):
        assert torch.equal(planned, plain)


def test_other_requests_go_the_plain_way(tiny: eecore.Model) -> None:
    mixed: list[Exit] = [Full(), policy_of("softmax", "plain", "each"), FixedExit(2)]
    check_same(run(tiny, mixed, OnHost()), run(tiny, mixed, None))
    speculative: list[Exit] = [eecore.SelfSpeculative(2, 3)]
    check_same(run(tiny, speculative, OnHost()), run(tiny, speculative, None))


def test_preempted_requests_come_back(tiny: eecore.Model) -> None:
    policy = policy_of("softmax", "plain", "each")
    settings = {"max_num_seqs": 5, "page_size": 4}
    check_same(run(tiny, [policy], OnHost(), **settings), run(tiny, [policy], None, **settings))
