"""Answers without a limit end when they repeat themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import eecore
from eecore.engine.repetition import is_due, repeats_itself
from servers import Asker, asker

CHATS = "/v1/chat/completions"
AGAIN = {"messages": [{"role": "user", "content": "a"}], "logit_bias": {"5": 100}}
"""A chat whose answer is one token, again and again."""


@pytest.fixture(scope="module")
def talker(endless: eecore.Model) -> Iterator[Asker]:
    tokenizer = endless.tokenizer
    assert tokenizer is not None
    before, tokenizer.chat_template = tokenizer.chat_template, "{{ messages[0].content }}"
    yield asker(endless)
    tokenizer.chat_template = before


@pytest.mark.parametrize("more", [{}, {"exit": "full"}, {"exit": "speculative:1,5"}, {"n": 2}])
def test_a_chat_that_repeats_itself_ends(talker: Asker, more: dict[str, Any]) -> None:
    answer = talker.post(CHATS, {**AGAIN, **more}).json()
    count = len(answer["choices"])
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * count
    assert answer["usage"]["completion_tokens"] == 512 * count
    assert answer["usage"]["eecore"]["cut_by"] == "repetition"


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_a_limit_of_the_caller_counts(talker: Asker, limit: str) -> None:
    usage = talker.post(CHATS, {**AGAIN, limit: 600}).json()["usage"]
    assert usage["completion_tokens"] == 600
    assert "cut_by" not in usage["eecore"]


def test_what_a_repetition_is() -> None:
    part = list(range(128))
    assert repeats_itself([9] * 512)
    assert repeats_itself([7] * 64 + part * 4)
    numbered = [token for number in range(128) for token in (1000 + number, *range(30))]
    assert repeats_itself(numbered[: 64 * 20])
    assert not repeats_itself(part * 3 + list(range(200, 328)))
    assert not repeats_itself([*range(129)] * 64)  # a part that is too long
    assert not repeats_itself([9] * 513)  # not at a multiple of 64
    assert not repeats_itself([9] * 448)
    ends = ((511, 1), (508, 8), (512, 8), (447, 1))
    assert [is_due(*each) for each in ends] == [True, True, False, False]
