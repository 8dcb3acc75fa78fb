"""Log-probabilities of prompts, as OpenAI's completions echo them and as vLLM reports them."""

from __future__ import annotations

import math
from typing import Any

import pytest

import eecore
from eecore.output import PromptLogprob
from servers import Asker, asker, assert_idle, events
from tiny_models import write_model
from tiny_t5 import write_t5

PROMPT = "lock the front door"
OTHER = "turn the kitchen lights down to 20 percent"
TEXT = "[HassTurnOn [name front door]]"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def scores(model: eecore.Model, prompt: str | list[int], **fields: Any) -> list[PromptLogprob]:
    """The engine's scores of a prompt's tokens except the first."""
    (output,) = eecore.generate(model, prompt, max_tokens=0, **{"prompt_logprobs": 20, **fields})
    assert output.prompt_logprobs is not None
    return [entry for entry in output.prompt_logprobs if entry is not None]


def choices_of(server: Asker, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = server.post(COMPLETIONS, body)
    assert answer.status_code == 200, answer.text
    assert_idle(server.service)
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return choices


def text_of(server: Asker, token: int) -> str:
    text: str = server.service.served.token_text(token)
    return text


def joined(chunks: list[Any]) -> dict[str, Any]:
    """The parts of a stream, as one choice."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {
        "text": "".join(choice["text"] for choice in choices),
        "logprobs": {name: [v for part in parts for v in part[name] or ()] for name in names},
        "finish_reason": choices[-1]["finish_reason"],
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 64])
def test_a_completion_begins_with_its_prompt(
    server: Asker, intent: eecore.Model, max_tokens: int, stream: bool
) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": max_tokens}
    answer = server.post(COMPLETIONS, {**body, "stream": stream})
    choice = joined(events(answer.text)) if stream else answer.json()["choices"][0]
    assert intent.tokenizer is not None
    ids = intent.tokenizer.encode(PROMPT)
    expected = scores(intent, PROMPT)
    logprobs, count = choice["logprobs"], len(ids)
    assert logprobs["tokens"][:count] == ["lock", " the", " front", " door", "<|parse|>"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:count] == [entry.logprob for entry in expected]
    for entry, top in zip(expected, logprobs["top_logprobs"][1:count], strict=True):
        assert top[text_of(server, entry.token_id)] == entry.logprob
        best = list(entry.top_logprobs.items())[:2]
        assert list(top.items())[:2] == [(text_of(server, t), value) for t, value in best]
        assert len(top) == (2 if entry.rank <= 2 else 3)
    end = len(PROMPT)
    assert logprobs["text_offset"][:count] == [0, 4, 8, 14, end]
    if max_tokens == 0:
        assert choice["text"] == PROMPT
        assert {len(values) for values in logprobs.values()} == {count}
        assert choice["finish_reason"] == "length"
        return
    (wrote,) = eecore.generate(intent, PROMPT, max_tokens=max_tokens, logprobs=2)
    assert choice["text"] == PROMPT + (wrote.text or "")
    assert logprobs["token_logprobs"][count:] == pytest.approx(wrote.logprobs)
    assert logprobs["text_offset"][count : count + 2] == [end, end + 1][:max_tokens]
    assert {len(values) for values in logprobs.values()} == {count + len(wrote.token_ids)}
    assert choice["finish_reason"] == wrote.finish_reason


def test_a_prompt_alone_may_fill_the_context(server: Asker) -> None:
    ids = [5 + i % 1000 for i in range(256)]
    body = {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0}
    (choice,) = choices_of(server, body)
    assert len(choice["logprobs"]["token_logprobs"]) == 256
    assert choice["logprobs"]["top_logprobs"] is None
    answer = server.post(COMPLETIONS, {**body, "max_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Asker:
    """A model whose tokens are bytes."""
    directory = write_model(tmp_path_factory.mktemp("scored") / "tiny")
    return asker(eecore.load(directory, kv_cache_tokens=1024))


def test_of_tokens_with_one_text_the_most_probable_one_is_listed(tiny: Asker) -> None:
    """Bytes that are no characters all have the same text."""
    prompt = [65, *range(128, 256, 3)]
    body = {"prompt": prompt, "echo": True, "logprobs": 20, "max_tokens": 0}
    (choice,) = choices_of(tiny, body)
    expected = scores(tiny.service.served.model, prompt)
    collided = 0
    for entry, top in zip(expected, choice["logprobs"]["top_logprobs"][1:], strict=True):
        best: dict[str, float] = {}
        for token, value in (*entry.top_logprobs.items(), (entry.token_id, entry.logprob)):
            text = text_of(tiny, token)
            best[text] = max(value, best.get(text, -math.inf))
        assert top == best
        collided += len(best) < len({*entry.top_logprobs, entry.token_id})
    assert collided > 10


# vLLM's


def in_vllms_words(server: Asker, expected: list[PromptLogprob], count: int) -> list[Any]:
    found: list[Any] = [None]
    for entry in expected:
        best = dict(list(entry.top_logprobs.items())[:count])
        ranks = {token: rank for rank, token in enumerate(best, 1)}
        every = {entry.token_id: entry.logprob, **best}
        found.append(
            {
                str(token): {
                    "logprob": logprob,
                    "rank": ranks.get(token, entry.rank),
                    "decoded_token": text_of(server, token),
                }
                for token, logprob in every.items()
            }
        )
    return found


@pytest.mark.parametrize("count", [0, 2])
def test_prompt_logprobs_of_completions(server: Asker, intent: eecore.Model, count: int) -> None:
    for fields in ({"max_tokens": 4}, {"max_tokens": 0}, {"max_tokens": 2, "logprobs": 5}):
        body = {"prompt": [PROMPT, OTHER], "prompt_logprobs": count, **fields}
        for choice, prompt in zip(choices_of(server, body), (PROMPT, OTHER), strict=True):
            expected = in_vllms_words(server, scores(intent, prompt), count)
            assert choice["prompt_logprobs"] == expected
            assert (choice["logprobs"] is not None) == ("logprobs" in fields)


def test_prompt_logprobs_of_chats(server: Asker, intent: eecore.Model) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    ids = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    body = {"messages": messages, "prompt_logprobs": 1, "max_tokens": 64}
    answer = server.post(CHATS, body).json()
    assert answer["prompt_logprobs"] == in_vllms_words(server, scores(intent, ids), 1)
    assert answer["choices"][0]["message"]["content"] == TEXT
    assert "prompt_logprobs" not in answer["choices"][0]
    del body["prompt_logprobs"]
    assert "prompt_logprobs" not in server.post(CHATS, body).json()


def test_a_model_with_an_encoder_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    server = asker(eecore.load(write_t5(tmp_path_factory.mktemp("t5")), kv_cache_tokens=512))
    for fields in ({"prompt_logprobs": 0}, {"echo": True, "logprobs": 1}):
        answer = server.post(COMPLETIONS, {"prompt": [1, 2], "max_tokens": 1, **fields})
        assert answer.status_code == 400
        assert "a model without an encoder" in answer.json()["error"]["message"]
