"""Requests of every kind of client, well-behaved, bad and broken, and what may come of them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

LOSSLESS = ("full", "auto", "speculative:3,6", "lookup", "lookup:4")
EXITS = (
    *LOSSLESS,
    *("fixed:6", "fixed:12", "confident:0.9", "calibrated:softmax", "calibrated:state"),
)
UTTERANCES = (
    "lock the front door",
    "turn on the kitchen lights",
    "set the thermostat to twenty degrees",
    "what is the temperature in the bedroom",
    "open the garage door and close the blinds in the living room",
)
SCHEMA = {
    "type": "object",
    "properties": {"room": {"enum": ["kitchen", "hall"]}, "on": {"type": "boolean"}},
    "required": ["room", "on"],
    "additionalProperties": False,
}
GUIDES: tuple[dict[str, Any], ...] = (
    {"guided_json": SCHEMA},
    {"guided_choice": ["on", "off", "neither of them"]},
    {"guided_regex": "[a-c]{3,9}"},
    {"guided_grammar": 'start: "a" | "b" start'},
)
TOOL = {"type": "function", "function": {"name": "switch", "parameters": SCHEMA}}
JSON, PLAIN = "application/json", "text/plain"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
# Path, body, content type, and the status of the refusal.
WRONG: tuple[tuple[str, bytes, str, int], ...] = (
    (COMPLETIONS, b"", JSON, 400),
    (COMPLETIONS, b'{"prompt": "a"', JSON, 400),
    (COMPLETIONS, b'{"prompt": "\xff\xfe"}', JSON, 400),
    (COMPLETIONS, b'{"prompt": "\\ud800"}', JSON, 400),
    (COMPLETIONS, b'{"prompt": "a", "metadata": ' + b"[" * 9000 + b"]" * 9000 + b"}", JSON, 400),
    (COMPLETIONS, b'{"prompt": 3, "max_tokens": "many"}', JSON, 400),
    (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', JSON, 400),
    (COMPLETIONS, b'{"prompt": "a", "exit": "fixed:99"}', JSON, 400),
    (COMPLETIONS, b'{"prompt": "a", "guided_regex": "(a"}', JSON, 400),
    (COMPLETIONS, b'{"prompt": "' + b"door " * 2000 + b'"}', JSON, 400),
    (COMPLETIONS, b'{"prompt": "a", "model": "another"}', JSON, 404),
    (COMPLETIONS, b'{"prompt": "' + b"a" * 300_000 + b'"}', JSON, 413),
    (COMPLETIONS, b"prompt=a", PLAIN, 415),
    (CHATS, b'{"messages": []}', JSON, 400),
    (CHATS, b'{"messages": [{"role": 3}]}', JSON, 400),
    (CHATS, b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', JSON, 400),
    ("/v1/embeddings", b"{}", JSON, 404),
    ("/tokenize", b"[]", JSON, 400),
)
# The kinds of requests, which the table counts, and how often each is sent.
KINDS = {
    "whole answers": 30,
    "streams": 20,
    "streams that are read slowly": 5,
    "sampled, several choices": 10,
    "left in the middle": 8,
    "tiny deadlines": 6,
    "wrong bodies": 10,
    "guides": 6,
    "calls of tools": 4,
    "too long for the deadline, or nearly": 1,
    "health and metrics": 5,
}
# Errors of an overloaded server, by status.
BUSY = {429: "too_many_requests", 504: "deadline_exceeded"}


@dataclass(frozen=True)
class Ask:
    """A request.

    Args:
        kind: one of :data:`KINDS`.
        path: the path of the endpoint.
        content: the body; None for a GET.
        content_type: the type of the body.
        status: the expected status of the answer.
        says: the expected text; None accepts any text.
        leaves_after: parts of the answer after which the client disconnects; None: never.
        patience: seconds after which the client disconnects.
        pause: seconds between parts, for a client that reads slowly.
    """

    kind: str
    path: str = COMPLETIONS
    content: bytes | None = None
    content_type: str = JSON
    status: int = 200
    says: str | None = None
    leaves_after: int | None = None
    patience: float | None = None
    pause: float = 0.0


def completion(prompt: str, **fields: Any) -> bytes:
    return json.dumps({"prompt": prompt, "max_tokens": 48, **fields}).encode()


def chat(prompt: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": prompt}]
    return json.dumps({"messages": messages, "max_tokens": 96, **fields}).encode()


def any_ask(chance: random.Random, said: dict[tuple[str, str], str]) -> Ask:
    """A random request; ``said``: the answers of an idle server, by exit and utterance."""
    (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
    prompt, exit, lossless = map(chance.choice, (UTTERANCES, EXITS, LOSSLESS))
    streams = chance.random() < 0.5
    if kind in ("whole answers", "streams", "streams that are read slowly"):
        fields = {} if kind == "whole answers" else {"stream": True, "return_exit_layers": True}
        pause = 0.02 if kind == "streams that are read slowly" else 0.0
        body = completion(prompt, exit=exit, **fields)
        return Ask(kind, content=body, says=said[exit, prompt], pause=pause)
    if kind == "sampled, several choices":
        fields = {"temperature": 1.0, "top_p": 0.9, "seed": chance.randrange(1 << 40)}
        fields |= {"n": chance.randint(1, 4), "stream": streams, "exit": lossless}
        return Ask(kind, CHATS, chat(prompt, **fields))
    endless = {"ignore_eos": True, "max_tokens": 200}
    if kind == "left in the middle":
        body = completion(prompt, exit=exit, stream=True, n=chance.randint(1, 3), **endless)
        return Ask(kind, content=body, leaves_after=chance.randint(1, 12))
    if kind == "tiny deadlines":
        body = completion(prompt, exit=exit, stream=streams, **endless)
        return Ask(kind, content=body, patience=chance.uniform(0.001, 0.1))
    if kind == "wrong bodies":
        return Ask(kind, *chance.choice(WRONG))
    if kind == "guides":
        body = completion(prompt, exit=lossless, stream=streams, **chance.choice(GUIDES))
        return Ask(kind, content=body)
    if kind == "calls of tools":
        body = chat(prompt, tools=[TOOL], tool_choice="required", stream=streams)
        return Ask(kind, CHATS, body)
    if kind == "health and metrics":
        return Ask(kind, chance.choice(("/health", "/metrics", "/v1/models")))
    fields = {"n": 12, "max_tokens": 230, "ignore_eos": True, "temperature": 1.0}
    return Ask(kind, content=completion(prompt, exit="full", **fields))


class Finding(Exception):
    """An answer that breaks the server's contract."""


def outcome(ask: Ask, status: int, body: bytes) -> str:
    """The outcome of an answer: answered, refused, busy or late.

    Raises:
        Finding: the answer is not the expected one.
    """
    if status != ask.status or status >= 400:
        error = _parsed(body).get("error")
        if not isinstance(error, dict) or not error.get("message") or "code" not in error:
            raise Finding(f"expected a reason, got {body[:200]!r}")
        if status == ask.status:
            return "refused"
        if error["code"] == BUSY.get(status, ""):
            return "late" if status == 504 else "busy"
        raise Finding(f"expected {ask.status}, got {status}: {error}")
    if ask.content is None:
        return "answered"
    if not body.startswith(b"data: "):
        choices = _parsed(body)["choices"]
        text = choices[0].get("text")
        ends = [choice["finish_reason"] for choice in choices]
    else:
        *events, last, rest = body.split(b"\n\n")
        if last != b"data: [DONE]" or rest or not events:
            raise Finding(f"expected a stream with an end, got {body[-200:]!r}")
        found = [_parsed(event.removeprefix(b"data: ")) for event in events]
        if "error" in found[-1]:
            if found[-1]["error"]["code"] == BUSY[504]:
                return "late"
            raise Finding(f"a stream ended with {found[-1]}")
        choices = [choice for event in found for choice in event["choices"]]
        text = "".join(choice.get("text") or "" for choice in choices)
        ended = {each["index"]: each["finish_reason"] for each in choices}  # the last one counts
        ends = list(ended.values())
    if not all(end in ("stop", "length", "tool_calls") for end in ends):
        raise Finding(f"expected an end of each choice, got {ends}")
    if ask.says is not None and text != ask.says:
        raise Finding(f"expected {ask.says!r}, got {text!r}")
    return "answered"


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        raise Finding(f"expected JSON, got {body[:200]!r}") from None
