"""Workloads of one engine with faults at random lines: no page is lost, nothing done twice.

Requests of every policy over few pages come, begin as others did, are cancelled, put on hold and
preempted, while calls raise at lines that chance picks. Whatever happened, each gives in the end
what it gives alone, or the beginning of that and an error.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch

import eecore
from devices import engine_of
from eecore import Auto, Engine, EngineConfig, ExitClassifier, Guide, Output, SamplingParams
from eecore.exits import Exit
from head_packs import write_pack
from tiny_models import scale_layers, write_model
from tiny_t5 import write_t5
from tripwire import Fault, Interrupt, nothing_done_again
from workloads import SMALL_CACHES, Driver, Request, policies, same, serve

SHARE = 120

CLASSIFIER = ExitClassifier(torch.linspace(-1.0, 1.0, 128).view(2, 64))
# Auto depends on time, so that its failures could not be run again.
POLICIES = [policy for policy in policies(CLASSIFIER) if not isinstance(policy, Auto)]
CONFIGS = [
    *SMALL_CACHES,
    EngineConfig(kv_cache_tokens=96, page_size=2, max_num_seqs=4, max_batch_tokens=24),
]
GUIDES = [
    Guide.json_object(),
    Guide.regex("(ab|ba)*-[0-9]{2,}"),
    Guide.choice(["yes", "no", "yesterday"]),
    Guide.grammar('start: "(" start ")" | "a long end"'),
]
NUM_REQUESTS = 64
BEGINNINGS = [list(range(first, first + 14)) for first in (0, 100)]

MODELS: list[eecore.Model] = []
REQUESTS: list[list[Request]] = []
ENGINES: dict[tuple[int, int, bool], Engine] = {}
ALONE: dict[tuple[int, int], Output] = {}


def prepare() -> None:
    """Make two tiny models, with and without an encoder, and their requests."""
    logging.getLogger("eecore").addHandler(logging.NullHandler())
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    llama = write_model(folder / "llama", num_hidden_layers=3, seed=8)
    scale_layers(llama, {1: 0.3, 2: 0.3})
    write_pack(llama / "exits", eecore.load(llama), taps=(2,), follows_tokens=True)
    t5 = write_t5(folder / "t5")
    for directory in (llama, t5):
        MODELS.append(eecore.load(directory, kv_cache_tokens=128))
        random = Random(4)
        has_head = MODELS[-1].network.draft_head is not None
        able = [policy for policy in POLICIES if has_head or not policy.needs_head]
        REQUESTS.append(
            [make_request(random, able, directory == llama) for _ in range(NUM_REQUESTS)]
        )


def make_request(random: Random, policies: list[Exit], has_scores: bool) -> Request:
    """A request that fits into the smallest cache; may score its prompt if the model allows it."""
    prompt = [random.randrange(256) for _ in range(random.choice((1, 2, 3, 5, 9, 14)))]
    if random.random() < 0.5:  # as another begins, or just the same
        beginning = random.choice(BEGINNINGS)
        prompt = [*beginning[: random.randint(1, 14)], *prompt][:14]
    scores = random.choice((None, None, None, 0, 2)) if has_scores else None
    sampling = SamplingParams(
        max_tokens=random.randint(1 if scores is None else 0, 14),
        temperature=random.choice((0.0, 0.0, 0.9)),
        top_p=random.choice((1.0, 0.8)),
        repetition_penalty=random.choice((1.0, 1.0, 1.3)),
        presence_penalty=random.choice((0.0, 0.0, 0.6)),
        frequency_penalty=random.choice((0.0, 0.0, -0.4)),
        logit_bias=random.choice((None, None, {7: 9.0, 300: -100.0})),
        guide=random.choice((None, None, None, *GUIDES)),
        logprobs=random.choice((None, None, 0, 2)),
        prompt_logprobs=scores,
        stop=random.choice(((), (), ("e",), ("\0never", "zz"))),
        stop_token_ids=random.choice(((), tuple(range(0, 320, 9)))),
        seed=random.getrandbits(60),
    )
    return Request(prompt, random.choice(policies), sampling)


def faults(random: Random, kind: type[BaseException]) -> list[Any]:
    """For each call a line at which it raises, or none; sometimes several in a row.

    All of them are drawn at once: how many calls there are depends on what ran before.
    """
    rate = random.choice((0.05, 0.3, 0.9))
    most = random.choice((30, 300, 3000))
    return [
        (random.randint(1, most), kind) if random.random() < rate else None
        for _ in range(random.randint(1, 40))
    ]


def alone(model: int, number: int) -> Output:
    """The output of a request that runs alone and undisturbed."""
    key = model, number
    if key not in ALONE:
        config = dataclasses.replace(MODELS[model].engine_config, prefix_cache=False)
        (ALONE[key],) = serve(engine_of(MODELS[model], config), [REQUESTS[model][number]])
    return ALONE[key]


def check(output: Output, expected: Output) -> None:
    """An output has to be the expected one, or its beginning if it ended early."""
    if output.finish_reason in ("cancelled", "error"):
        assert output.token_ids == expected.token_ids[: len(output.token_ids)]
    else:
        assert same(output, expected), (output, expected)


@nothing_done_again()
def one(random: Random) -> bool:
    """Try one workload."""
    model, config = random.randrange(len(MODELS)), random.randrange(len(CONFIGS))
    ahead = random.random() < 0.5
    chosen = [random.randrange(NUM_REQUESTS) for _ in range(random.randint(1, 6))]
    kind = random.choice((Interrupt, Fault))
    expected = {str(i): alone(model, number) for i, number in enumerate(chosen)}
    key = model, config, ahead
    is_new = random.random() < 0.02  # programs are captured anew
    engine = None if is_new else ENGINES.pop(key, None)  # back once all of its requests are done
    engine = engine or engine_of(MODELS[model], CONFIGS[config], ahead=ahead)
    driver = Driver(engine, iter(faults(random, kind)))
    waiting = list(expected)
    for _ in range(len(waiting) + random.randrange(24)):
        happens = random.random()
        name = random.choice(list(expected))
        if waiting and happens < 0.5:
            added = waiting.pop(0)
            driver.add(REQUESTS[model][chosen[int(added)]], added)
        elif happens < 0.55 and name in driver.given and name not in driver.outputs:
            driver.cancel(name)
        elif happens < 0.62:
            driver.hold(name)
        elif happens < 0.63:
            engine.reset_prefix_cache()
        elif happens < 0.7:
            driver.resume(name)
        else:
            driver.step()
    for name in expected:
        if name in waiting:
            driver.add(REQUESTS[model][chosen[int(name)]], name)
        driver.resume(name)
    driver.finish()
    for name, output in driver.outputs.items():
        check(output, expected[name])
    ENGINES[key] = engine
    return True
