"""The access log: for each request a line of JSON with the client, the path, the status, the reason
of a refusal and the seconds.

The line holds neither text of the request or the answer, nor a key.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send


class AccessLog:
    """Middleware that writes the access log of an application."""

    def __init__(self, app: ASGIApp, write: Callable[[str], Any]) -> None:
        self._app, self._write = app, write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # None: the client left before the answer
        told: dict[str, Any] = {"status": None, "bytes": 0}
        refusal = b""

        async def watched(message: Any) -> None:
            nonlocal refusal
            if message["type"] == "http.response.start":
                told["status"] = message["status"]
            body = message.get("body", b"")
            told["bytes"] += len(body)
            if (told["status"] or 0) >= 400:
                refusal += body
            await send(message)

        began = time.time()
        try:
            await self._app(scope, receive, watched)
        finally:
            client = scope.get("client") or (None,)
            line = {
                "time": round(began, 3),
                "client": client[0],
                "method": scope["method"],
                "path": scope["path"],
                **told,
                **_reason(refusal),
                "seconds": round(time.time() - began, 6),
            }
            self._write(json.dumps(line))


def _reason(refusal: bytes) -> dict[str, str]:
    """For the line: the message of a refusal, without the values that the request had."""
    try:
        message = json.loads(refusal)["error"]["message"]
    except (ValueError, KeyError):
        return {}  # no refusal, or one of another form
    return {"reason": message.partition(", got")[0]}
