"""Answers as OpenAI's clients read them, and their further fields."""

from __future__ import annotations

from typing import Any

import pytest

import eecore
from servers import Asker, assert_idle, events

PROMPT = "lock the front door"
OTHER = "turn the kitchen lights down to 20 percent"
TEXT = "[HassTurnOn [name front door]]"


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "intent", "messages": [{"role": "user", "content": text}], **fields}


def completion(prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    return {"model": "intent", "prompt": prompt, "max_tokens": 64, **fields}


def test_a_completion(server: Asker, intent: eecore.Model) -> None:
    body = server.post("/v1/completions", completion(exit="full")).json()
    (expected,) = eecore.generate(intent, PROMPT, exit="full", max_tokens=64)
    (choice,) = body["choices"]
    assert body["object"] == "text_completion"
    assert body["model"] == "intent"
    assert body["system_fingerprint"] == expected.stats.fingerprint
    assert choice == {
        "index": 0,
        "text": expected.text,
        "logprobs": None,
        "finish_reason": "stop",
    }
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(expected.prompt_token_ids)
    assert usage["completion_tokens"] == len(expected.token_ids)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["eecore"].pop("tokens_per_s") > 0.0
    assert usage["eecore"] == {
        "contract": "full: every layer",
        "num_layers": 12,
        "full_passes": len(expected.token_ids) - 1,
        "mean_exit_layer": 12.0,
        "layers_run": 12 * (len(expected.token_ids) - 1),
        "layers_skipped": 0,
        "layers_per_token": 12.0,
        "full_depth_tokens_per_s": None,  # it ran so
        "speedup": None,
        "lossless": True,
        "drafted": 0,
        "accepted": 0,
    }


def test_a_chat(server: Asker) -> None:
    parts = [{"type": "text", "text": PROMPT}]
    for content in (PROMPT, parts):
        body = server.post("/v1/chat/completions", chat(content, max_completion_tokens=64)).json()  # type: ignore[arg-type]
        assert body["object"] == "chat.completion"
        message = {"role": "assistant", "content": TEXT, "refusal": None}
        assert body["choices"][0]["message"] == message
        assert body["choices"][0]["finish_reason"] == "stop"


def test_a_chat_without_a_limit_goes_on_to_the_end(server: Asker) -> None:
    body = server.post("/v1/chat/completions", chat(PROMPT, ignore_eos=True)).json()
    assert body["usage"]["total_tokens"] == 256
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("usage", [False, True])
def test_streams_add_up(server: Asker, usage: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": usage}}
    answer = server.post("/v1/chat/completions", chat(PROMPT, **options))
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = events(answer.text)
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 8
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["delta"].get("content", "") for c in choices) == TEXT
    assert [c["finish_reason"] for c in choices][-2:] == [None, "stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1

    chunks = events(server.post("/v1/completions", completion(echo=True, **options)).text)
    texts = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(texts) == PROMPT + TEXT
    assert_idle(server.service)


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_several_times(server: Asker, stream: bool) -> None:
    fields = {"n": 2, "temperature": 1.5, "seed": 7, "stream": stream, "max_tokens": 6}
    answer = server.post("/v1/completions", completion([PROMPT, OTHER], **fields))
    if stream:
        chunks = [choice for chunk in events(answer.text) for choice in chunk["choices"]]
        texts = ["".join(c["text"] for c in chunks if c["index"] == i) for i in range(4)]
    else:
        body = answer.json()
        texts = [choice["text"] for choice in body["choices"]]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert body["usage"]["prompt_tokens"] < 20  # each once
    sampling = [
        eecore.SamplingParams(max_tokens=6, temperature=1.5, seed=seed) for seed in (7, 8, 7, 8)
    ]
    model = server.service.served.model
    expected = eecore.generate(model, [PROMPT, PROMPT, OTHER, OTHER], sampling=sampling)
    assert texts == [output.text for output in expected]
    assert server.service.admission.taken == 0


def test_prompts_of_token_ids(server: Asker, intent: eecore.Model) -> None:
    assert intent.tokenizer is not None
    ids = intent.tokenizer.encode(PROMPT)
    for prompt in (ids, [ids], [ids, ids]):
        body = server.post("/v1/completions", completion(prompt)).json()
        assert {choice["text"] for choice in body["choices"]} == {TEXT}


def test_stops_and_penalties_reach_the_engine(server: Asker, intent: eecore.Model) -> None:
    fields: dict[str, Any] = {"repetition_penalty": 1.3, "min_p": 0.1, "top_k": 5, "top_p": 0.9}
    fields |= {"temperature": 1.2, "seed": 3, "ignore_eos": True, "max_tokens": 20}
    fields |= {"presence_penalty": 0.4, "frequency_penalty": -0.3, "logit_bias": {"40": 2.5}}
    body = server.post("/v1/completions", completion(**fields)).json()
    fields["logit_bias"] = {40: 2.5}
    assert body["choices"][0]["text"] == eecore.generate(intent, PROMPT, **fields)[0].text
    for stop in (" front", [" front", "zzz"]):
        body = server.post("/v1/completions", completion(stop=stop)).json()
        assert body["choices"][0]["text"] == "[HassTurnOn [name"
        assert body["choices"][0]["finish_reason"] == "stop"
    assert intent.tokenizer is not None
    (whole,) = eecore.generate(intent, PROMPT, max_tokens=64)
    body = server.post("/v1/completions", completion(stop_token_ids=[whole.token_ids[3]])).json()
    assert body["choices"][0]["text"] == intent.tokenizer.decode(whole.token_ids[:3])


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(server: Asker, intent: eecore.Model, stream: bool) -> None:
    (expected,) = eecore.generate(intent, PROMPT, max_tokens=64, logprobs=2)
    assert expected.logprobs is not None
    asked = completion(logprobs=2, stream=stream)
    answer = server.post("/v1/completions", asked)
    if stream:
        choices = [choice for chunk in events(answer.text) for choice in chunk["choices"]]
        parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    else:
        parts = [answer.json()["choices"][0]["logprobs"]]
    tokens = [token for part in parts for token in part["tokens"]]
    assert "".join(tokens) == TEXT + "<|end|>"
    assert [v for p in parts for v in p["token_logprobs"]] == pytest.approx(expected.logprobs)
    assert [at for p in parts for at in p["text_offset"]][:3] == [0, 1, 11]
    assert all(len(top) == 2 for part in parts for top in part["top_logprobs"])

    asked = chat(PROMPT, logprobs=True, top_logprobs=3, stream=stream)
    answer = server.post("/v1/chat/completions", asked)
    if stream:
        choices = [choice for chunk in events(answer.text) for choice in chunk["choices"]]
        parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    else:
        parts = [answer.json()["choices"][0]["logprobs"]]
    entries = [entry for part in parts for entry in part["content"]]
    assert [entry["token"] for entry in entries] == tokens
    assert entries[1]["bytes"] == list(b"HassTurnOn")
    assert all(len(entry["top_logprobs"]) == 3 for entry in entries)
    assert entries[0]["top_logprobs"][0]["token"] == "["


def test_models_and_their_policies(server: Asker) -> None:
    cards = server.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == [
        "intent",
        "intent:full",
        "intent:auto",
        "intent:speculative-3-6",
        "intent:calibrated-softmax",
        "intent:calibrated-state",
        "intent:calibrated-classifier",
    ]
    assert {card["max_model_len"] for card in cards} == {256}
    card = server.get("/v1/models/intent:lookup-4").json()
    assert card["exit"] == "lookup:4"
    assert "lossless" in card["contract"]


def test_tokens_and_back(server: Asker) -> None:
    body = server.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True}).json()
    assert body["count"] == len(body["tokens"]) == 5
    assert "".join(body["token_strs"]) == PROMPT + "<|parse|>"
    text = server.post("/detokenize", {"tokens": body["tokens"]}).json()["prompt"]
    assert text == PROMPT
    conversation = server.post("/tokenize", {"messages": chat(PROMPT)["messages"]}).json()
    assert conversation["tokens"] == body["tokens"]
    bare = server.post("/v1/completions", completion(add_special_tokens=False)).json()
    assert bare["usage"]["prompt_tokens"] == 4


def test_health_version_and_schema(server: Asker) -> None:
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/version").json() == {"version": "0.1.0"}
    schema = server.get("/openapi.json").json()
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    fields = body["content"]["application/json"]["schema"]["properties"]
    assert {"exit", "messages", "return_exit_layers"} <= set(fields)
    options, _ = fields["stream_options"]["anyOf"]
    assert "include_usage" in options["properties"]


def test_references_of_the_schema_lead_to_a_part_of_it(server: Asker) -> None:
    schema = server.get("/openapi.json").json()
    references = 0
    parts: list[Any] = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            parts += part.values()
            if isinstance(path := part.get("$ref"), str):
                target, references = schema, references + 1
                for name in path.removeprefix("#/").split("/"):
                    target = target[name]
    assert references


@pytest.mark.parametrize(
    ("path", "method", "body", "status"),
    [
        ("/v1/completions", "post", b"{}", "400"),
        ("/v1/chat/completions", "post", b'{"messages": [], "model": "it"}', "400"),
        ("/v1/completions", "post", b'{"prompt": "a", "model": "other"}', "404"),
        ("/tokenize", "post", b"x" * (5 << 20), "413"),
        ("/detokenize", "post", b"tokens", "415"),
        ("/v1/responses", "post", b"{}", "400"),
        ("/v1/models/{name}", "get", None, "404"),
    ],
)
def test_refusals_are_in_the_schema(
    server: Asker, path: str, method: str, body: bytes | None, status: str
) -> None:
    schema = server.get("/openapi.json").json()
    kind = "text/plain" if status == "415" else "application/json"
    settings: dict[str, Any] = {"content": body, "headers": {"content-type": kind}}
    ask = getattr(server, method)
    answer = ask(path.format(name="other"), **(settings if body is not None else {}))
    assert answer.status_code == int(status)
    said = schema["paths"][path][method]["responses"][status]["content"]["application/json"]
    name = said["schema"]["$ref"].rpartition("/")[2]
    parts = schema["components"]["schemas"]
    assert set(answer.json()) == set(parts[name]["properties"]) == {"error"}
    assert set(answer.json()["error"]) == set(parts["Problem"]["properties"])
