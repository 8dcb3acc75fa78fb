"""Outcomes of requests, and findings: answers that break the server's contract."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from bench.serving.crowd import Ask

MAX_FINDINGS = 20
# Errors of an overloaded server, by status.
BUSY = {429: "too_many_requests", 504: "deadline_exceeded"}


class Finding(Exception):
    """An answer that breaks the server's contract."""


def outcome(ask: Ask, status: int, body: bytes) -> str:
    """The outcome of an answer: answered, refused, busy or late.

    Raises:
        Finding: the answer is not the expected one.
    """
    if status != ask.status or status >= 400:
        error = _reason(body)
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
        events = _events(body)
        if "error" in events[-1]:
            if events[-1]["error"]["code"] == BUSY[504]:
                return "late"
            raise Finding(f"a stream ended with {events[-1]}")
        choices = [choice for event in events for choice in event["choices"]]
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


def _reason(body: bytes) -> dict[str, Any]:
    error = _parsed(body).get("error")
    if not isinstance(error, dict) or not error.get("message") or "code" not in error:
        raise Finding(f"expected a reason, got {body[:200]!r}")
    return error


def _events(body: bytes) -> list[Any]:
    *events, last, rest = body.split(b"\n\n")
    if last != b"data: [DONE]" or rest or not events:
        raise Finding(f"expected a stream with an end, got {body[-200:]!r}")
    return [_parsed(event.removeprefix(b"data: ")) for event in events]


@dataclass
class Book:
    """The outcomes of all requests.

    Attributes:
        counts: the number of requests, by kind and outcome.
        findings: the messages of the first findings.
    """

    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    findings: list[str] = field(default_factory=list)

    def note(self, kind: str, outcome: str) -> None:
        self.counts[kind][outcome] += 1

    def find(self, kind: str, words: str) -> None:
        self.counts[kind]["unexpected"] += 1
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(f"{kind}: {words}")
