"""Other models than decoders with a tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

import eecore
from head_packs import write_pack
from servers import Asker, asker, assert_idle, events
from tiny_models import write_model
from tiny_t5 import write_t5

PROMPT = [5, 6, 7]


def answered(server: Asker, **fields: object) -> list[int]:
    body = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "return_exit_layers": True}
    tokens: list[list[int]] = []
    for stream in (False, True):
        answer = server.post("/v1/completions", {**body, **fields, "stream": stream})
        chunks = events(answer.text) if stream else [answer.json()]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        tokens.append([token for choice in choices for token in choice.get("token_ids", [])])
    assert tokens[0] == tokens[1]
    assert_idle(server.service)
    return tokens[0]


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    model = eecore.load(write_model(tmp_path, tokenizer=False), kv_cache_tokens=256)
    (expected,) = eecore.generate(model, PROMPT, max_tokens=6, ignore_eos=True)
    server = asker(model)
    assert answered(server, logprobs=2) == expected.token_ids
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": PROMPT, "echo": True}),
        ("/v1/completions", {"prompt": PROMPT, "stop": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/detokenize", {"tokens": PROMPT}),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 400
        assert "tokenizer" in answer.json()["error"]["message"]


def test_a_t5(tmp_path: Path) -> None:
    model = eecore.load(write_t5(tmp_path), kv_cache_tokens=1024)
    server = asker(model)
    (expected,) = eecore.generate(model, PROMPT, max_tokens=6, ignore_eos=True)
    assert answered(server) == expected.token_ids
    assert answered(server, exit="speculative:2,2") == expected.token_ids
    most = server.service.served.max_prompt
    too_long = server.post("/v1/completions", {"prompt": [5] * (most + 1)})
    assert too_long.status_code == 400
    assert too_long.json()["error"]["code"] == "context_length_exceeded"


def test_a_model_with_a_draft_head(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    with pytest.raises(eecore.ExitError, match="expected a model with a draft head"):
        asker(eecore.load(directory, kv_cache_tokens=256), exit="head")
    write_pack(directory / "exits", eecore.load(directory), follows_tokens=True)
    model = eecore.load(directory, kv_cache_tokens=256)
    server = asker(model, exit="head")
    assert "m:head" in [card["id"] for card in server.get("/v1/models").json()["data"]]
    (expected,) = eecore.generate(model, PROMPT, max_tokens=6, ignore_eos=True)
    assert answered(server) == answered(server, exit="head:2") == expected.token_ids


def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    (directory / "tokenizer_config.json").unlink(missing_ok=True)
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    server = asker(eecore.load(directory, kv_cache_tokens=256))
    body = {"messages": [{"role": "user", "content": "a"}]}
    error = server.post("/v1/chat/completions", body).json()["error"]
    assert "chat_template: expected one in the model directory" in error["message"]
    assert len(answered(server)) == 6
