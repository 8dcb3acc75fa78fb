"""The server's errors, in OpenAI's format."""

from __future__ import annotations

from typing import Any

from eecore.errors import EngineClosedError, ExitError, ModelError, RequestError
from eecore.output import RequestFailedError

MAX_MESSAGE = 1000

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
"""OpenAI's type of an error by status; other statuses are server_error from 500 on, and
invalid_request_error below.
"""


class ApiError(Exception):
    """An answer that is an error.

    Args:
        param: the field of the body that is wrong.
        code: a word for programs.
        retry_after: seconds after which it is worth another try.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        kind, known = TYPES.get(self.status, other), {"param": self.param, "code": self.code}
        return {"error": {"message": self.message, "type": kind, **known}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (408, 413, 415):  # the rest of the body is not read
            headers["Connection"] = "close"
        return headers


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The error for a request that can never be served. Most messages begin with the name of the
    field.
    """
    name = message.partition(":")[0].partition("[")[0]
    if param is None and name.isidentifier() and name != "body":
        param = name
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, retry_after: int = 1) -> ApiError:
    """The error of a server that is closing."""
    return ApiError(503, message, code="shutting_down", retry_after=retry_after)


def as_api_error(error: Exception) -> ApiError | None:
    """The answer for one of eecore's errors; None for one that is the server's own fault."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestFailedError):
        return ApiError(500, str(error), code="request_failed")
    if isinstance(error, EngineClosedError):
        return unavailable("the server is shutting down")
    if isinstance(error, ExitError):
        return invalid(str(error), param="exit", code="exit_not_possible")
    if isinstance(error, (RequestError, ModelError)):
        return invalid(str(error))
    return None
