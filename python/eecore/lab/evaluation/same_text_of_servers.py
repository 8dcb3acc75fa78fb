"""Whether an OpenAI server's texts hang on their company: requests alone, then some at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from eecore.errors import RequestError

AT_ONCE = 8
DIGITS = 6
"""Decimal digits to which log-probabilities are compared."""
TIMEOUT_S = 600
T = TypeVar("T")


def verify_server(
    url: str,
    prompts: Sequence[str],
    *,
    model: str | None = None,
    requests: int = 200,
    max_tokens: int = 32,
    seed: int = 0,
    ends: float = float("inf"),
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Ask an OpenAI server for completions, one at a time and then eight at once, and compare.

    Half of the requests are greedy; the others are sampled, with a seed.

    Args:
        url: with or without ``/v1``.
        prompts: texts to choose from, the ends of which are cut at random.
        model: the model's name; None: the first that the server lists.
        ends: no new request alone after this time of ``time.monotonic``.

    Returns:
        For greedy and sampled requests the numbers of requests, of texts and of log-probabilities
        that differ, and of answers without log-probabilities; and a line for each difference.

    Raises:
        RequestError: the server does not answer, or refuses a request.
    """
    base = url.rstrip("/").removesuffix("/v1") + "/v1"
    random = Random(seed)
    if model is None:
        model = _call(f"{base}/models", lambda found: str(found["data"][0]["id"]))
    bodies: list[dict[str, Any]] = []
    for number in range(requests):
        prompt = random.choice(prompts)
        is_sampled = number % 2 > 0
        bodies.append(
            {
                "model": model,
                "prompt": prompt[: random.randint(len(prompt) // 2 + 1, len(prompt))],
                "max_tokens": random.randint(1, max_tokens),
                "temperature": 0.8 if is_sampled else 0.0,
                "seed": random.getrandbits(31),
                "logprobs": 1,
            }
        )
    alone = []
    for body in bodies:
        if time.monotonic() > ends:
            break
        alone.append(_answer(base, body))
    order = list(range(len(alone)))
    random.shuffle(order)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        together = dict(
            zip(order, pool.map(lambda i: _answer(base, bodies[i]), order), strict=True)
        )
    names = ("requests", "texts_differ", "logprobs_differ", "without_logprobs")
    rows = {name: dict.fromkeys(names, 0) for name in ("greedy", "sampled, with a seed")}
    found: list[str] = []
    for number, (text, scores) in enumerate(alone):
        row = rows["sampled, with a seed" if number % 2 else "greedy"]
        other_text, other_scores = together[number]
        row["requests"] += 1
        row["texts_differ"] += text != other_text
        row["without_logprobs"] += scores is None
        row["logprobs_differ"] += text == other_text and scores != other_scores
        if text != other_text:
            found.append(f"{bodies[number]['prompt'][-30:]!r}: {text!r}, then {other_text!r}")
        elif scores != other_scores:
            found.append(f"{bodies[number]['prompt'][-30:]!r}: {scores}, then {other_scores}")
    return rows, found


Answer = tuple[str, list[float] | None]
"""The text of a completion and the log-probabilities of its tokens."""


def _answer(base: str, body: dict[str, Any]) -> Answer:
    return _call(f"{base}/completions", _answer_of, body)


def _answer_of(found: Any) -> Answer:
    (choice,) = found["choices"]
    given = choice.get("logprobs") or {}
    scores = given.get("token_logprobs")
    if scores is None and given.get("content"):  # as llama.cpp's server writes them
        scores = [each["logprob"] for each in given["content"]]
    return choice["text"], None if scores is None else [round(each, DIGITS) for each in scores]


def _call(url: str, read: Callable[[Any], T], body: dict[str, Any] | None = None) -> T:
    """What ``read`` takes from a server's reply."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(
            Request(url, data, {"Content-Type": "application/json"}), timeout=TIMEOUT_S
        ) as reply:
            found = json.load(reply)
    except HTTPError as error:
        said = error.read(500).decode(errors="replace")
        raise RequestError(f"{url}: expected 200, got {error.code}: {said}") from None
    except (URLError, ValueError, OSError) as error:
        raise RequestError(f"{url}: expected an OpenAI server, got {error}") from None
    try:
        return read(found)
    except (LookupError, TypeError, ValueError, AttributeError):
        said = json.dumps(found)[:200]
        raise RequestError(f"{url}: expected an OpenAI server's reply, got {said}") from None
