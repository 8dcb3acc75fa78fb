"""A line of JSON for each request: who asked for what, how it went, how long it took.

Nothing that a request or an answer says is in it, nor a key.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["AccessLog"]


class AccessLog:
    """Around an application.

    Args:
        app: the application.
        write: takes a line.
    """

    def __init__(self, app: ASGIApp, write: Callable[[str], Any]) -> None:
        self._app, self._write = app, write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told: dict[str, Any] = {"status": None, "bytes": 0}  # None: the client left before

        async def watched(message: Any) -> None:
            if message["type"] == "http.response.start":
                told["status"] = message["status"]
            told["bytes"] += len(message.get("body", b""))
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
                "seconds": round(time.time() - began, 6),
            }
            self._write(json.dumps(line))
