"""The body of a request, read within bounds."""

from __future__ import annotations

import anyio
from starlette.types import Message, Receive, Scope

from eecore.serving.refusals import ApiError

BODY_SECONDS = 30.0
"""Seconds within which a body must arrive."""
MAX_PASSED_OVER = 64 << 20
"""Bytes of a body that is too large which are read and dropped."""


UNSAID = (b"", b"application/x-www-form-urlencoded")
"""Content types that senders set without meaning them: none, and curl's default."""
BROWSERS = (b"origin", b"sec-fetch-site")
"""Headers that browsers add to requests from pages of any site."""


class ClientGoneError(Exception):
    """The client has gone: there is nothing to answer."""


async def read_body(scope: Scope, receive: Receive, most: int) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413: more than ``most`` bytes. 415: its content type is not JSON. 408: it takes
            too long.
        ClientGoneError: the client left before the end.
    """
    headers = {name.lower(): value for name, value in scope["headers"]}
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    # A page of any site can have a browser send a body, unless it is called JSON, which needs
    # permission (CORS).
    is_of_browser = any(name in headers for name in BROWSERS)
    if kind != b"application/json" and (is_of_browser or kind not in UNSAID):
        raise ApiError(
            415, f"content-type: expected application/json, got {kind.decode('latin-1')!r}"
        )
    length = headers.get(b"content-length", b"0")
    is_large = length.isdigit() and int(length[:20]) > most
    if is_large and b"expect" in headers:  # the client waits before it sends
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
    """The body; None where it has more than ``most`` bytes. The rest is then read and dropped,
    since a client that is still sending reads no answer.
    """
    parts: list[bytes] = []
    size, more = 0, True
    while more and size <= most + MAX_PASSED_OVER:
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
