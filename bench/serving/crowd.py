"""Requests of every kind of client: well-behaved, bad and broken."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LOSSLESS = ("full", "auto", "speculative:3,6", "lookup", "lookup:4")
EXITS = (
    *LOSSLESS,
    "fixed:6",
    "fixed:12",
    "confident:0.9",
    "calibrated:softmax",
    "calibrated:state",
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
JSON = {"content-type": "application/json"}
PLAIN = {"content-type": "text/plain"}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
WRONG: tuple[tuple[str, bytes, dict[str, str], int], ...] = (
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


@dataclass(frozen=True)
class Ask:
    """A request.

    Args:
        kind: the row of the table that counts it.
        path: the path of the endpoint.
        content: the body; None for a GET.
        headers: the headers of the body.
        status: the expected status of the answer.
        says: the expected text; None accepts any text.
        leaves_after: parts of the answer after which the client disconnects; None: never.
        patience: seconds after which the client disconnects.
        pause: seconds between parts, for a client that reads slowly.
    """

    kind: str
    path: str
    content: bytes | None = None
    headers: dict[str, str] = field(default_factory=lambda: JSON)
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


class Crowd:
    """Makes random requests.

    Args:
        said: the answers of an idle server, by exit and utterance.
    """

    def __init__(self, said: dict[tuple[str, str], str]) -> None:
        self._said = said
        self._kinds: list[tuple[int, Callable[[random.Random], Ask]]] = [
            (30, self._whole),
            (20, self._stream),
            (5, self._slow),
            (10, self._sampled),
            (8, self._leaving),
            (6, self._impatient),
            (10, self._wrong),
            (6, self._guided),
            (4, self._tools),
            (1, self._long),
            (5, self._poll),
        ]

    def __call__(self, chance: random.Random) -> Ask:
        weights = [weight for weight, _ in self._kinds]
        (make,) = chance.choices([make for _, make in self._kinds], weights)
        return make(chance)

    def _whole(self, chance: random.Random) -> Ask:
        prompt, exit = chance.choice(UTTERANCES), chance.choice(EXITS)
        body = completion(prompt, exit=exit)
        return Ask("whole answers", COMPLETIONS, body, says=self._said[exit, prompt])

    def _stream(self, chance: random.Random, pause: float = 0.0) -> Ask:
        prompt, exit = chance.choice(UTTERANCES), chance.choice(EXITS)
        body = completion(prompt, exit=exit, stream=True, return_exit_layers=True)
        kind = "streams that are read slowly" if pause else "streams"
        return Ask(kind, COMPLETIONS, body, says=self._said[exit, prompt], pause=pause)

    def _slow(self, chance: random.Random) -> Ask:
        return self._stream(chance, 0.02)

    def _sampled(self, chance: random.Random) -> Ask:
        fields = {"temperature": 1.0, "top_p": 0.9, "seed": chance.randrange(1 << 40)}
        fields |= {"n": chance.randint(1, 4), "stream": chance.random() < 0.5}
        body = chat(chance.choice(UTTERANCES), exit=chance.choice(LOSSLESS), **fields)
        return Ask("sampled, several choices", CHATS, body)

    def _leaving(self, chance: random.Random) -> Ask:
        fields = {"stream": True, "ignore_eos": True, "max_tokens": 200, "n": chance.randint(1, 3)}
        body = completion(chance.choice(UTTERANCES), exit=chance.choice(EXITS), **fields)
        parts = chance.randint(1, 12)
        return Ask("left in the middle", COMPLETIONS, body, leaves_after=parts)

    def _impatient(self, chance: random.Random) -> Ask:
        fields = {"ignore_eos": True, "max_tokens": 200, "stream": chance.random() < 0.5}
        body = completion(chance.choice(UTTERANCES), exit=chance.choice(EXITS), **fields)
        return Ask("tiny deadlines", COMPLETIONS, body, patience=chance.uniform(0.001, 0.1))

    def _wrong(self, chance: random.Random) -> Ask:
        path, content, headers, status = chance.choice(WRONG)
        return Ask("wrong bodies", path, content, headers, status)

    def _guided(self, chance: random.Random) -> Ask:
        fields = {**chance.choice(GUIDES), "stream": chance.random() < 0.3}
        body = completion(chance.choice(UTTERANCES), exit=chance.choice(LOSSLESS), **fields)
        return Ask("guides", COMPLETIONS, body)

    def _tools(self, chance: random.Random) -> Ask:
        fields = {"tools": [TOOL], "tool_choice": "required", "stream": chance.random() < 0.5}
        return Ask("calls of tools", CHATS, chat(chance.choice(UTTERANCES), **fields))

    def _long(self, chance: random.Random) -> Ask:
        fields = {"n": 12, "max_tokens": 230, "ignore_eos": True, "exit": "full"}
        body = completion(chance.choice(UTTERANCES), temperature=1.0, **fields)
        return Ask("too long for the deadline, or nearly", COMPLETIONS, body)

    def _poll(self, chance: random.Random) -> Ask:
        return Ask("health and metrics", chance.choice(("/health", "/metrics", "/v1/models")))
