"""Sampling settings that a request leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import eecore
from eecore.config import ANSWERS
from eecore.errors import RequestError
from eecore.serving.settings import ServerSettings
from servers import Asker, asker
from tiny_models import write_model

SAID = [{"role": "user", "content": "abc"}]
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
SETTINGS = {"max_tokens": 16, "ignore_eos": True, "seed": 7}


@pytest.fixture(scope="module")
def server(tiny: eecore.Model) -> Asker:
    return asker(tiny)


def expected(tiny: eecore.Model, **settings: Any) -> str:
    """The library's answer."""
    assert tiny.tokenizer is not None
    ids = tiny.tokenizer.encode_chat(SAID)
    (output,) = eecore.generate(tiny, ids, **{**SETTINGS, **settings})
    return str(output.text)


def chat(server: Asker, **fields: Any) -> str:
    answer = server.post("/v1/chat/completions", {"messages": SAID, **SETTINGS, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({}, ANSWERS),
        ({"temperature": None}, ANSWERS),
        ({"temperature": 0}, {}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"min_p": 0.1}, {"min_p": 0.1}),
        ({"presence_penalty": 0.5}, {"presence_penalty": 0.5}),
        ({"presence_penalty": 0, "frequency_penalty": 0, "top_p": 1}, {**ANSWERS, "top_p": 1.0}),
        ({"top_k": -1}, {**ANSWERS, "top_k": 0}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"exit": "full"}, ANSWERS),
        ({"exit": "speculative:2,3"}, {}),
        ({"guided_regex": "[a-z]{8}"}, None),
    ],
)
def test_answers_are_sampled_unless_the_request_says_how(
    server: Asker, tiny: eecore.Model, given: dict[str, Any], settings: dict[str, Any] | None
) -> None:
    if settings is None:  # what has to follow a guide is greedy
        assert chat(server, **given) == chat(server, **given, temperature=0)
    else:
        assert chat(server, **given) == expected(tiny, **settings)


def test_every_door_samples_answers_alike(server: Asker, tiny: eecore.Model) -> None:
    body = {"input": "abc", "max_output_tokens": 16, "ignore_eos": True, "seed": 7}
    answer = server.post("/v1/responses", body).json()
    assert answer["output"][0]["content"][0]["text"] == expected(tiny, **ANSWERS)
    assert (answer["temperature"], answer["top_p"]) == (0.7, 0.8)
    completion = server.post("/v1/completions", {"prompt": "abc", **SETTINGS}).json()
    (greedy,) = eecore.generate(tiny, "abc", **SETTINGS)
    assert completion["choices"][0]["text"] == greedy.text
    assert chat(server, tools=TOOLS) == chat(server, tools=TOOLS, **ANSWERS)
    assert chat(server, tools=TOOLS) != chat(server, tools=TOOLS, temperature=0)


def test_the_server_says_how_it_samples(server: Asker, tiny: eecore.Model) -> None:
    cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
    usual = cards[next(name for name in cards if ":" not in name)]
    assert usual["sampling"] == {**ANSWERS, "min_p": 0.0}
    assert server.get("/page/depth.json").json()["temperature"] == ANSWERS["temperature"]
    greedy = asker(tiny, generation_config="none")
    assert chat(greedy) == expected(tiny)
    assert greedy.get("/v1/models").json()["data"][0]["sampling"]["temperature"] == 0
    assert asker(eecore.load()).get("/v1/models").json()["data"][0]["sampling"]["temperature"] == 0


def test_settings_that_are_left_out_are_the_models(tmp_path: Path) -> None:
    path = write_model(tmp_path / "hot")
    own = {"do_sample": True, "temperature": 1.5, "top_k": 40}
    (path / "generation_config.json").write_text(json.dumps(own))
    model = eecore.load(path, dtype="float32", kv_cache_tokens=4096)
    for generation_config, sampling in (
        ("auto", eecore.SamplingParams.of(model, **SETTINGS)),
        ("none", eecore.SamplingParams(**SETTINGS)),
    ):
        server = asker(model, generation_config=generation_config)
        for given, sampled in (({}, sampling), ({"temperature": 0}, SETTINGS)):
            body = {"prompt": "abc", **SETTINGS, **given}
            answer = server.post("/v1/completions", body).json()["choices"][0]["text"]
            as_sampled = eecore.SamplingParams(**sampled) if given else sampled
            assert answer == eecore.generate(model, "abc", sampling=as_sampled)[0].text
    with pytest.raises(RequestError, match="generation_config: expected auto, none, got 'vllm'"):
        ServerSettings(generation_config="vllm")
