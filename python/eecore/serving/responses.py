"""The chat that a request to /v1/responses means.

Its input items become messages, its functions tools, its format a response format. After that it is
a request to /v1/chat/completions, with refusals reworded for /v1/responses. Nothing is stored: each
request brings its whole conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from eecore.errors import EecoreError
from eecore.serving.asking import Asked, ask_chat
from eecore.serving.protocol import ChatRequest, ResponsesRequest, ThoughtfulRequest, read
from eecore.serving.refusals import ApiError, as_api_error, invalid
from eecore.serving.served import ServedModel
from eecore.values import shown

LOGPROBS = "message.output_text.logprobs"
"""The value of ``include`` that asks for log-probabilities."""
ROLES = ("user", "assistant", "system", "developer")
# Fields of a chat, and the fields of a response that they are from.
FIELDS = {
    "messages": "input",
    "response_format": "text",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning",
    "verbosity": "text",
}
# Words of a chat's refusals, and the words for a response.
WORDS = (
    (re.compile(r"^tools\[(\d+)\]\.function\b"), r"tools[\1]"),
    (re.compile(r"\bresponse_format\b"), "text.format"),
    (re.compile(r"\bmax_tokens\b"), "max_output_tokens"),
    (re.compile(r"^reasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"^verbosity\b"), "text.verbosity"),
)
ECHOED = ("metadata", "text", "tools", "reasoning")
"""Fields that are part of the answer as they are."""
JSON = json.JSONEncoder(allow_nan=False)
MESSAGE = re.compile(r"^messages\[(\d+)\](\.content)?")


class ResponseChat(ChatRequest):
    """The chat that a request to /v1/responses means."""

    request: ResponsesRequest
    sources: list[str]
    """The part of the request that each message is from."""


def read_response(body: bytes) -> ResponseChat:
    """The chat that a body means.

    Raises:
        ApiError: 400: it is not JSON, a field is missing or of the wrong kind, or asks for what is
            not supported.
    """
    request = read(ResponsesRequest, body)
    if request.previous_response_id is not None:
        raise invalid(
            "previous_response_id: expected the whole conversation in input, since nothing is "
            f"stored, got {shown(request.previous_response_id)}",
            code="previous_response_not_found",
        )
    if request.stream_options is not None and request.stream_options.continuous_usage_stats:
        raise invalid("stream_options: expected no continuous_usage_stats, got true")
    for name in ECHOED:
        try:
            JSON.encode(getattr(request, name))
        except ValueError:
            raise invalid(f"{name}: expected finite numbers, got infinity or NaN") from None
    text, reasoning = request.text or {}, request.reasoning or {}
    items = _Items()
    items.read(request)
    shared = {name: getattr(request, name) for name in ThoughtfulRequest.model_fields}
    return ResponseChat(
        **shared,
        request=request,
        sources=items.sources,
        messages=items.messages,
        max_completion_tokens=request.max_output_tokens,
        tools=[_tool(f"tools[{i}]", tool) for i, tool in enumerate(request.tools or ())],
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(text.get("format")),
        verbosity=_word("text.verbosity", text.get("verbosity")),
        reasoning_effort=_word("reasoning.effort", reasoning.get("effort")),
        logprobs=LOGPROBS in (request.include or ()) or bool(request.top_logprobs),
        top_logprobs=request.top_logprobs,
    )


def ask_response(served: ServedModel, chat: ResponseChat) -> Asked:
    """A request for the answer.

    Raises:
        ApiError: it cannot be served.
    """
    try:
        return ask_chat(served, chat)
    except (ApiError, EecoreError) as error:
        known = as_api_error(error)
        if known is None or known.status != 400:
            raise
        raise _in_its_words(known, chat) from None


def _in_its_words(error: ApiError, chat: ResponseChat) -> ApiError:
    """A chat's refusal, in the words of the request that the chat is from."""

    def source(found: re.Match[str]) -> str:
        index = int(found[1])
        part = found[2] or ""
        if part and chat.messages[index]["role"] == "tool":
            part = ".output"
        return chat.sources[index] + part

    message = MESSAGE.sub(source, error.message)
    for words, others in WORDS:
        message = words.sub(others, message)
    param = None if error.param is None else FIELDS.get(error.param, error.param)
    return ApiError(error.status, message, param=param, code=error.code)


class _Items:
    """The messages made from input items."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.sources: list[str] = []
        self._thoughts: list[str] = []
        """Reasoning before the next answer."""
        self._calls: set[str] = set()
        self._has_instructions = False
        self._kinds: dict[str, Callable[[str, Mapping[str, Any]], None]] = {
            "message": self._message,
            "function_call": self._call,
            "function_call_output": self._output,
            "reasoning": self._reasoning,
        }

    def read(self, request: ResponsesRequest) -> None:
        """Read all items of a request, after its instructions."""
        self._has_instructions = bool(request.instructions)
        if self._has_instructions:
            self._add("instructions", {"role": "system", "content": request.instructions})
        if isinstance(request.input, str):
            self._add("input", {"role": "user", "content": request.input})
        elif not request.input:
            raise invalid("input: expected text or at least one item, got none")
        else:
            for index, item in enumerate(request.input):
                self._item(f"input[{index}]", item)

    def _item(self, where: str, item: Mapping[str, Any]) -> None:
        kind = item.get("type") or "message"
        if not isinstance(kind, str) or kind not in self._kinds:
            expected = ", ".join(self._kinds)
            raise invalid(f"{where}.type: expected one of {expected}, got {shown(kind)}")
        self._kinds[kind](where, item)

    def _add(self, where: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.sources.append(where)

    def _message(self, where: str, item: Mapping[str, Any]) -> None:
        role, content = item.get("role"), item.get("content")
        if not isinstance(role, str) or role not in ROLES:
            raise invalid(f"{where}.role: expected one of {', '.join(ROLES)}, got {shown(role)}")
        if role == "assistant":
            self._add_answer(where, content=content)
            return
        self._thoughts = []  # an answer that was all thought is not part of a conversation
        if role != "user" and len(self.messages) == 1 and self._has_instructions:
            # Most templates take one system message only.
            before = _parts(self.messages.pop()["content"])
            self.sources.pop()
            both = [*before, *_parts(content)] if isinstance(content, list | str) else content
            self._add(where, {"role": "system", "content": both})
        else:
            self._add(where, {"role": role, "content": content})

    def _add_answer(self, where: str, **parts: Any) -> None:
        """Add text or calls to an answer. Text after calls belongs to the same message."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or ("content" in parts and "tool_calls" not in last):
            last = {"role": "assistant"}
            if self._thoughts:
                last["reasoning_content"] = "\n".join(self._thoughts)
            self._add(where, last)
        self._thoughts = []
        for name, value in parts.items():
            is_more = name in last and isinstance(value, list | str)
            last[name] = [*_parts(last[name]), *_parts(value)] if is_more else value

    def _call(self, where: str, item: Mapping[str, Any]) -> None:
        name, call_id = _text(where, item, "name"), _text(where, item, "call_id")
        arguments = item.get("arguments")
        if not isinstance(arguments, str | None):
            raise invalid(f"{where}.arguments: expected JSON as text, got {shown(arguments)}")
        self._calls.add(call_id)
        function = {"name": name, "arguments": arguments or ""}
        call = {"id": call_id, "type": "function", "function": function}
        self._add_answer(where, tool_calls=[call])

    def _output(self, where: str, item: Mapping[str, Any]) -> None:
        call_id = _text(where, item, "call_id")
        if call_id not in self._calls:
            raise invalid(
                f"{where}.call_id: expected that of a function_call before it, got {shown(call_id)}"
            )
        self._add(where, {"role": "tool", "tool_call_id": call_id, "content": item.get("output")})

    def _reasoning(self, where: str, item: Mapping[str, Any]) -> None:
        """A thought, which belongs to the next answer."""
        for name in ("content", "summary"):
            parts = item.get(name) or []
            if not isinstance(parts, list):
                raise invalid(f"{where}.{name}: expected a list of parts, got {shown(parts)}")
            texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
            found = [text for text in texts if isinstance(text, str)]
            if found:
                self._thoughts += found
                return


def _parts(content: Any) -> list[Any]:
    return [content] if isinstance(content, str) else list(content or ())


def _text(where: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise invalid(f"{where}.{name}: expected text, got {shown(value)}")
    return value


def _word(where: str, value: Any) -> str | None:
    if not isinstance(value, str | None):
        raise invalid(f"{where}: expected text, got {shown(value)}", where.partition(".")[0])
    return value


def _tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function in a chat's form."""
    kind = tool.get("type")
    if kind != "function":
        raise invalid(f"{where}.type: expected function, got {shown(kind)}")
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | Mapping[str, Any] | None) -> Any:
    """A tool choice in a chat's form. A malformed one stays as it is, and is refused there."""
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") != "allowed_tools":
        return _named(choice)
    tools = choice.get("tools")
    named = [_named(tool) for tool in tools] if isinstance(tools, list) else tools
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}


def _named(tool: Any) -> Any:
    """A choice of one function by its name."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {"name": tool.get("name")}}


def _format(given: Any) -> dict[str, Any] | None:
    """A text format in a chat's form."""
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else given
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind != "json_schema":
        expected = "text, json_object or json_schema"
        raise invalid(f"text.format: expected {expected}, got {shown(kind)}", "text")
    schema = given.get("schema")
    if not isinstance(schema, Mapping):
        raise invalid(f"text.format.schema: expected a JSON schema, got {shown(schema)}", "text")
    return {"type": kind, "json_schema": {"name": given.get("name"), "schema": schema}}
