"""What a server does before it takes requests, so that the first ones need not wait for it.

Programs are recorded, or captured as CUDA graphs, when they first run, weights are first read, and
templates compiled; ``usage`` compares with passes of full depth that have to be measured once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from eecore.config import SamplingParams
from eecore.engine.async_engine import Prepared
from eecore.errors import EecoreError
from eecore.exits import Auto
from eecore.generation import PASSES
from eecore.serving.asking import Asked, ask_chat, ask_completion
from eecore.serving.protocol import ChatRequest, CompletionRequest
from eecore.serving.refusals import ApiError
from eecore.serving.served import ServedModel

SECONDS = 10.0
"""The longest time that the warm-up takes."""
MAX_TOKENS = 12
MAX_TOGETHER = 8
"""The most requests that run together; every power of two has programs of its own."""
PROMPT = "Say one two three, one two three, one two three, one two three."
"""A text that repeats itself, so that drafts are looked up in it."""


def warm_up(served: ServedModel, seconds: float = SECONDS) -> None:
    """Answer some short requests, the most usual first: the default policy, sampled and greedy,
    passes of full depth to compare with, the listed policies, several requests at once.

    Only recorded programs and measured times remain. A failure here is not reported: the same
    request reports it again.

    Args:
        served: the model, before the server takes requests.
        seconds: the longest time that the warm-up takes; the requests that remain are left out.
    """
    asyncio.run(_within(served, seconds))


async def _within(served: ServedModel, seconds: float) -> None:
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_all(served), seconds)
    served.engine.reset_prefix_cache()


async def _all(served: ServedModel) -> None:
    for requests in _requests(served):
        await asyncio.gather(*map(served.engine.generate, requests), return_exceptions=True)


def _requests(served: ServedModel) -> Iterator[list[Prepared]]:
    """The requests that run together, each time; one that cannot be served is left out."""
    depths = served.depths
    asked: list[tuple[str, dict[str, float], int]] = [(depths.default, {}, 1)]
    asked += [(said, {"temperature": 0.0}, 1) for said in (depths.default, *depths.aliases)]
    together = 2
    while together <= min(MAX_TOGETHER, served.max_choices):
        asked.append((depths.default, {}, together))
        together *= 2
    for index, (said, settings, count) in enumerate(asked):
        if index == 2:
            yield [_of_full_depth(served)]
        try:
            choices = _asked(served, said, settings, count).choices
        except (EecoreError, ApiError):
            continue
        yield [choice.prepared for choice in choices]


def _asked(served: ServedModel, said: str, settings: dict[str, float], count: int) -> Asked:
    """Requests as a client makes them: a chat, or a completion of tokens without a template."""
    more: Any = {"exit": said, "n": count, "max_tokens": MAX_TOKENS, "ignore_eos": True, **settings}
    tokenizer = served.model.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        return ask_completion(served, CompletionRequest(prompt=[0] * MAX_TOKENS, **more))
    messages = [{"role": "user", "content": PROMPT}]
    return ask_chat(served, ChatRequest(messages=messages, **more))


def _of_full_depth(served: ServedModel) -> Prepared:
    """Passes of full depth, each of which is timed."""
    plain = Auto(lookup=False, head=False, exit_layers=())
    sampling = SamplingParams(max_tokens=PASSES + 1, ignore_eos=True)
    return served.engine.prepare([0], exit=plain, sampling=sampling)
