"""A server's figures for prompts with a common beginning."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import eecore
from servers import Asker, asker, assert_idle

PROMPT = "You are somebody who answers in verse, whatever the question may be. "
PAGE = 16
CACHED = len(PROMPT) // PAGE * PAGE  # a token a byte
SHORT = {"max_tokens": 2, "ignore_eos": True}


@pytest.fixture
def fresh(endless: eecore.Model) -> Iterator[Asker]:
    """A server whose cache is empty."""
    server = asker(endless, max_num_seqs=8)
    yield server
    assert_idle(server.service)


def counted(server: Asker) -> dict[str, float]:
    lines = server.get("/metrics").text.splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


def cached(server: Asker, prompt: str, **fields: object) -> tuple[int, int]:
    """The numbers of tokens of the prompt, and of cached ones."""
    answer = server.post("/v1/completions", {"prompt": prompt, **SHORT, **fields})
    usage = answer.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_usage_says_how_much_of_a_prompt_was_cached(fresh: Asker) -> None:
    assert cached(fresh, PROMPT + "Why?") == (len(PROMPT) + 4, 0)
    assert cached(fresh, PROMPT + "Who is it?") == (len(PROMPT) + 10, CACHED)
    # A prompt counts once, however many answers it has.
    assert cached(fresh, PROMPT + "Where to?", n=3) == (len(PROMPT) + 9, CACHED)


def test_two_prompts_of_a_request_count_each(fresh: Asker) -> None:
    cached(fresh, PROMPT)
    body = {"prompt": [PROMPT + "Why?", PROMPT + "When?"], "n": 2, **SHORT}
    usage = fresh.post("/v1/completions", body).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2 * CACHED}


def test_metrics_count_tokens_asked_for_and_found(fresh: Asker) -> None:
    for question in ("Why?", "Who?", "How?"):
        cached(fresh, PROMPT + question)
    number = counted(fresh)
    asked, found = 3 * (len(PROMPT) + 4), 2 * CACHED
    model = '{model_name="endless"}'
    assert number["eecore_prefix_cache_queries_total"] == asked
    assert number["eecore_prefix_cache_hits_total"] == found
    assert number[f"vllm:prefix_cache_queries_total{model}"] == asked
    assert number[f"vllm:prefix_cache_hits_total{model}"] == found
    assert number["eecore_kv_pages_used"] == 0
    assert number["eecore_kv_pages_cached"] == CACHED // PAGE


def test_prompts_that_are_scored_do_not_ask_for_any(fresh: Asker) -> None:
    assert cached(fresh, PROMPT) == (len(PROMPT), 0)
    assert cached(fresh, PROMPT, prompt_logprobs=0) == (len(PROMPT), 0)
    assert cached(fresh, PROMPT, echo=True, logprobs=1) == (len(PROMPT), 0)
    number = counted(fresh)
    assert number["eecore_prefix_cache_queries_total"] == len(PROMPT)
    assert number["eecore_prompt_tokens_total"] == 3 * len(PROMPT)


def test_without_a_cache_nothing_is_counted(endless: eecore.Model) -> None:
    server = asker(endless.without_prefix_cache(), max_num_seqs=8)
    for _ in range(2):
        assert cached(server, PROMPT) == (len(PROMPT), 0)
    number = counted(server)
    assert number["eecore_prefix_cache_queries_total"] == 0
    assert number["eecore_kv_pages_cached"] == 0
