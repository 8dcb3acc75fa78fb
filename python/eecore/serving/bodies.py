"""The body of a request, within bounds, and what is done beside the event loop with it."""

from __future__ import annotations

import anyio
from starlette.types import Message, Receive, Scope

from eecore.serving.refusals import ApiError

__all__ = ["ClientGoneError", "gone", "read_body"]

BODY_SECONDS = 30.0
"""How long a body may take to come."""
MOST_PASSED_OVER = 64 << 20
"""Bytes of one that is too large."""


UNSAID = (b"", b"application/x-www-form-urlencoded")
"""Content types of bodies whose senders name none: nothing, and what curl says by itself."""
BROWSERS = (b"origin", b"sec-fetch-site")
"""Headers that browsers add to what a page of any site has them send."""


class ClientGoneError(Exception):
    """The client went away, and hears nothing any more."""


async def read_body(scope: Scope, receive: Receive, most: int) -> bytes:
    """All of it.

    Raises:
        ApiError: 413: more than ``most`` bytes, 415: it is said to be something else than JSON,
            408: it does not come.
        ClientGoneError: the client left in the middle.
    """
    headers = {name.lower(): value for name, value in scope["headers"]}
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    # Any site may have a browser send what it does not call JSON; JSON needs its leave (CORS).
    is_of_browser = any(name in headers for name in BROWSERS)
    if kind != b"application/json" and (is_of_browser or kind not in UNSAID):
        raise ApiError(
            415, f"content-type: expected application/json, got {kind.decode('latin-1')!r}"
        )
    length = headers.get(b"content-length", b"0")
    is_large = length.isdigit() and int(length[:20]) > most
    if is_large and b"expect" in headers:  # it has not begun to send
        raise _too_large(most)
    try:
        with anyio.fail_after(BODY_SECONDS):
            body = await _all(receive, most)
    except TimeoutError:
        raise ApiError(408, f"body: expected it within {BODY_SECONDS:g} s, got less") from None
    if body is None:
        raise _too_large(most)
    return body


async def gone(receive: Receive) -> None:
    """Returns when the client has gone."""
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


async def _all(receive: Receive, most: int) -> bytes | None:
    """The body; None for one of more bytes than it may have, which is passed over: a client that is
    still sending does not see an answer.
    """
    parts: list[bytes] = []
    size, more = 0, True
    while more and size <= most + MOST_PASSED_OVER:
        part, more = await _part(receive)
        size += len(part)
        if size <= most:
            parts.append(part)
        else:
            parts.clear()
    return b"".join(parts) if size <= most else None


async def _part(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    return message.get("body", b""), message.get("more_body", False)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"body: expected at most {most} bytes, got more", code="body_too_large")
