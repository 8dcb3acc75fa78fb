"""The endpoints."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI
from fastapi import Request as HttpRequest
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

from eecore import build_info
from eecore.errors import EecoreError
from eecore.serving.answering import Answer, Generation, Service, refusal
from eecore.serving.asking import ask_chat, ask_completion, tokens_of
from eecore.serving.docs_page import docs_page
from eecore.serving.metrics import CONTENT_TYPE
from eecore.serving.page_files import about, page_file
from eecore.serving.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Refusal,
    Request,
    ResponsesRequest,
    TokenizeRequest,
    read,
)
from eecore.serving.refusals import ApiError, invalid
from eecore.serving.response_shape import ResponseShape
from eecore.serving.responses import ask_response, read_response
from eecore.serving.served import ServedModel
from eecore.serving.shapes import ChatShape, CompletionShape
from eecore.values import shown


def create_app(
    service: Service, api_keys: Sequence[str] = (), cors_origins: Sequence[str] = ()
) -> FastAPI:
    """The ASGI application of a server.

    Args:
        api_keys: keys, one of which a request to an endpoint that costs compute must have; empty:
            no key is needed.
        cors_origins: sites whose pages may send requests from a browser; "*": all of them.
    """
    app = FastAPI(title="eecore", version=_version(), docs_url=None, redoc_url=None)
    guarded = [Depends(_key_check(api_keys))] if api_keys else []
    served, metrics = service.served, service.metrics
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )

    @app.post("/v1/chat/completions", **_generates(ChatRequest), dependencies=guarded)
    async def chat() -> Response:
        """The answer to a conversation."""
        return Generation(service, partial(read, ChatRequest), ask_chat, ChatShape)

    @app.post("/v1/completions", **_generates(CompletionRequest), dependencies=guarded)
    async def completions() -> Response:
        """The completion of a prompt."""
        return Generation(
            service, partial(read, CompletionRequest), ask_completion, CompletionShape
        )

    @app.post("/v1/responses", **_generates(ResponsesRequest), dependencies=guarded)
    async def responses() -> Response:
        """The answer to input items (OpenAI's newer protocol)."""
        return Generation(service, read_response, ask_response, ResponseShape)

    @app.post("/tokenize", **_takes(TokenizeRequest), dependencies=guarded)
    async def tokenize() -> Response:
        """The tokens of a prompt or a conversation."""
        return Answer(service, partial(read, TokenizeRequest), _tokenized)

    @app.post("/detokenize", **_takes(DetokenizeRequest), dependencies=guarded)
    async def detokenize() -> Response:
        """The text of tokens."""
        return Answer(service, partial(read, DetokenizeRequest), _detokenized)

    @app.get("/v1/models", dependencies=guarded, responses=_refuses(401))
    async def models() -> Response:
        """The model, and an entry for each recommended policy."""
        return JSONResponse({"object": "list", "data": served.cards()})

    @app.get("/v1/models/{name:path}", dependencies=guarded, responses=_refuses(400, 401, 404))
    async def model(name: str) -> Response:
        """The model under one name."""
        return JSONResponse(served.card(name))

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return page_file("index.html")

    @app.get("/page/depth.json", include_in_schema=False)
    async def depth() -> Response:
        return JSONResponse(about(served))

    @app.get("/page/{name}", include_in_schema=False)
    async def file_of_page(name: str) -> Response:
        return page_file(name)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return docs_page(app.openapi())

    @app.get("/health", responses={503: {"description": "Not all requests are taken."}})
    async def health() -> Response:
        """200 while the server takes requests; 503 when it is closing or compiles no guides."""
        up = "compiling no guides" if service.is_stuck else "ok"
        status = "closing" if service.admission.is_closing else up
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @app.get("/version")
    async def version() -> Response:
        """The version of eecore."""
        return JSONResponse({"version": _version()})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def read_metrics() -> Response:
        """Counters in Prometheus's format."""
        return Response(metrics.text(), headers={"content-type": CONTENT_TYPE})

    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(Exception, _of_any)
    for kind in (ApiError, EecoreError):
        app.add_exception_handler(kind, _of_any)
    return app


def _tokenized(served: ServedModel, body: TokenizeRequest) -> dict[str, Any]:
    tokens = tokens_of(served, body)
    texts = [served.token_text(token) for token in tokens] if body.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": served.max_model_len,
        "tokens": tokens,
        "token_strs": texts,
    }


def _detokenized(served: ServedModel, body: DetokenizeRequest) -> dict[str, Any]:
    tokenizer, vocabulary = served.tokenizer, served.model.config.vocab_size
    strange = next((token for token in body.tokens if not 0 <= token < vocabulary), None)
    if strange is not None:
        raise invalid(f"tokens: expected token ids 0..{vocabulary - 1}, got {shown(strange)}")
    return {"prompt": tokenizer.decode(body.tokens)}


def _key_check(keys: Sequence[str]) -> Callable[[HttpRequest], Awaitable[None]]:
    known = [key.encode() for key in keys]

    async def check(request: HttpRequest) -> None:
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1", "replace")
        same = [hmac.compare_digest(given, each) for each in known]  # always compares with all keys
        if kind.lower() != "bearer" or not any(same):
            raise ApiError(
                401,
                "authorization: expected Bearer and a key of this server, got "
                + ("another" if key else "none"),
                code="invalid_api_key",
            )

    return check


def _takes(kind: type[Request]) -> dict[str, Any]:
    """The OpenAPI entry of an endpoint with a body."""
    schema = kind.model_json_schema()
    content = {"application/json": {"schema": _inlined(schema, schema.pop("$defs", {}))}}
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
        "responses": _refuses(400, 401, 404, 408, 413, 415, 429, 500, 503),
    }


def _generates(kind: type[Request]) -> dict[str, Any]:
    """The OpenAPI entry of an endpoint that answers whole or as a stream."""
    content: dict[str, Any] = {"application/json": {}, "text/event-stream": {}}
    said = _takes(kind)
    return {**said, "responses": {200: {"content": content}, **said["responses"], **_refuses(504)}}


def _inlined(part: Any, definitions: Mapping[str, Any]) -> Any:
    """A schema with its definitions in the place of references, which would be relative to the
    whole document.
    """
    if isinstance(part, list):
        return [_inlined(each, definitions) for each in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        return _inlined(definitions[part["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(each, definitions) for name, each in part.items()}


def _refuses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Refusal} for status in statuses}


def _version() -> str:
    return str(build_info()["version"])


async def _of_http(_request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = str(error.detail)
    if error.status_code == 404:
        said = f"expected one of {', '.join(_request.app.openapi()['paths'])}, got another path"
    known = ApiError(error.status_code, f"{_request.method} {_request.url.path}: {said}")
    return JSONResponse(known.body, known.status, headers={**(error.headers or {})})


async def _of_any(_request: HttpRequest, error: Exception) -> Response:
    return refusal(error)
