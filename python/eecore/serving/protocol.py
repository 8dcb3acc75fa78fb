"""The fields of requests: OpenAI's and eecore's own.

A field of the wrong kind is refused with a 400 that names it, as is one that asks for what the
server does not do. The names of other servers are in :mod:`eecore.serving.elsewhere`; unknown ones
are logged, once each, and named in the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from eecore.config import SamplingParams
from eecore.exit_text import FORMS
from eecore.serving.elsewhere import WITHOUT_EFFECT, asks_for_nothing, meaning, plain, same
from eecore.serving.refusals import ApiError, invalid
from eecore.values import help_of, shown

MAX_CHOICES = 128
MAX_MESSAGES = 4096
MAX_PROMPTS = 1024
MAX_INPUT = MAX_MESSAGES - 1
"""Input items of a response; its instructions are one more message."""
MAX_UNKNOWN = 256
"""Unknown fields of a request, and their names that are logged."""
MAX_NAME = 64
"""Characters of such a name."""
LOGGER = logging.getLogger("eecore")

# Validation stops at the first error, since a list may be long.
Prompts = Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
Tokens = Annotated[list[int], Field(fail_fast=True)]
TokenPrompts = Annotated[list[Tokens], Field(fail_fast=True, max_length=MAX_PROMPTS)]


Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class Request(BaseModel):
    """The base of all requests. It is strict: text is no number, and what JSON cannot express, such
    as infinity, is refused.
    """

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=()
    )

    model: str | None = Field(None, description="A name of /v1/models; the server's when left out.")
    _ignored: dict[str, None] = PrivateAttr(default_factory=dict)

    @property
    def ignored(self) -> dict[str, Any]:
        """For the answer: the names of the fields that are unknown, if there are any."""
        return {"ignored_fields": list(self._ignored)} if self._ignored else {}

    def ignore(self, name: str) -> None:
        """Note an unknown field."""
        name = name[:MAX_NAME]
        self._ignored[name] = None
        if name not in _unknown and len(_unknown) < MAX_UNKNOWN:
            _unknown.add(name)
            LOGGER.warning("requests have a field that is not known, and ignored: %s", shown(name))


class StreamOptions(BaseModel):
    """Fields of a stream apart from its text."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Without effect."""
    continuous_usage_stats: bool | None = None
    """vLLM's: every chunk has the usage so far of its choice."""


def _setting(name: str, more: str = "", most: float | None = None) -> Any:
    """A field of SamplingParams, with its description; ``most``: OpenAI's limit, if it is lower."""
    return Field(None, le=most, description=f"{help_of(SamplingParams, name)}.{more}")


class AnswerRequest(Request):
    """Fields that all requests for an answer share."""

    temperature: float | None = _setting(
        "temperature",
        " At most 2. When left out, the model's own, as all of these; where the model has none, an "
        "answer in free text is sampled as `eecore chat` does, and everything else is greedy.",
        most=2.0,
    )
    top_p: float | None = _setting("top_p", " 0 keeps only the most probable token.")
    top_k: int | None = _setting("top_k", " -1 does the same.")
    min_p: float | None = _setting("min_p")
    repetition_penalty: float | None = _setting("repetition_penalty")
    presence_penalty: float | None = _setting("presence_penalty")
    frequency_penalty: float | None = _setting("frequency_penalty")
    logit_bias: dict[str, float] | None = _setting("logit_bias")
    seed: int | None = _setting("seed")
    stop: str | list[str] | None = _setting("stop")
    stop_token_ids: list[int] | None = _setting("stop_token_ids")
    ignore_eos: bool | None = _setting("ignore_eos")
    thinking_budget: int | None = _setting(
        "thinking_budget", " Also the variable of that name in `chat_template_kwargs`."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(
        None, description="With `stream` only; a whole answer always has its usage."
    )
    user: str | None = None
    metadata: dict[str, Any] | None = Field(
        None, description="Its `exit` counts where the body has none."
    )
    exit: str | dict[str, Any] | None = Field(
        None,
        description=f"Exit policy: {', '.join(FORMS)}, or an object with a mode and its settings.",
        examples=["auto", "speculative:3,6", {"mode": "confident", "threshold": 0.9}],
    )
    return_exit_layers: bool | None = Field(
        None, description="Exit layer and confidence of each token."
    )
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of `json`, `regex`, `choice`, `grammar`, `json_object`."
    )


class GenerationRequest(AnswerRequest):
    """Fields that completions and chats share."""

    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    response_format: dict[str, Any] | None = Field(
        None,
        description="text, json_object or json_schema.",
        examples=[{"type": "json_schema", "json_schema": {"name": "it", "schema": {}}}],
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="vLLM's: log-probabilities of the prompt's tokens, and of so many others. Not "
        "in a stream.",
    )
    guided_json: Any = Field(None, description="A JSON schema.")
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = Field(None, description="In Lark's syntax, or GBNF.")


class Conversation(Request):
    """Fields that the chat template makes a prompt from."""

    messages: list[dict[str, Any]] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    tools: list[dict[str, Any]] | None = Field(None, description="For the chat template.")
    documents: list[dict[str, Any]] | None = Field(None, description="For the chat template.")
    enable_thinking: bool | Literal["calibrated"] | None = Field(
        None,
        description="For a chat template that names it. `calibrated`: think, until the answer "
        "stands by the rule that `eecore calibrate --think` has put beside the model.",
    )
    reasoning_effort: str | None = Field(
        None,
        description="For a chat template that names it, or enable_thinking, which `none` makes "
        "false.",
    )
    verbosity: str | None = Field(None, description="For a chat template that names it.")
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        None, description="The answer continues the last message."
    )
    add_special_tokens: bool | None = None


class ThoughtfulRequest(AnswerRequest):
    """Fields of the thought before an answer, which chats and responses share."""

    include_reasoning: bool | None = Field(
        None, description="vLLM's: false leaves the thought out of the answer."
    )
    reasoning_format: Literal["auto", "deepseek", "none"] | None = Field(
        None, description="llama.cpp's: `none` leaves the thought and its markers in the text."
    )


class ChatRequest(GenerationRequest, Conversation, ThoughtfulRequest):
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="none, auto, required, a function, or allowed_tools."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most.")


class CompletionRequest(GenerationRequest):
    prompt: str | Prompts | Tokens | TokenPrompts
    max_tokens: int | None = Field(
        None, ge=0, description="0 goes with `echo` or `prompt_logprobs`."
    )
    logprobs: int | None = Field(None, ge=0, le=20, description="With `echo`, the prompt's too.")
    echo: bool | None = None
    best_of: int | None = Field(None, description="The value of `n` only.")
    add_special_tokens: bool | None = None


class ResponsesRequest(ThoughtfulRequest):
    input: str | list[dict[str, Any]] = Field(
        max_length=MAX_INPUT,
        description="Text, or items: message, function_call, function_call_output, reasoning.",
    )
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = Field(None, description="Functions, for the template.")
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="none, auto, required, a function, or allowed_tools."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most.")
    text: dict[str, Any] | None = Field(
        None,
        description="`format`: text, json_object or json_schema; `verbosity` for a chat template "
        "that names it.",
        examples=[{"format": {"type": "json_schema", "name": "it", "schema": {}}}],
    )
    reasoning: dict[str, Any] | None = Field(
        None, description="`effort` for a chat template that names it."
    )
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[Included] | None = Field(
        None, description="message.output_text.logprobs; the others ask for what is not there."
    )
    previous_response_id: str | None = Field(
        None, description="Refused: nothing is stored, and the input has the whole conversation."
    )


class TokenizeRequest(Conversation):
    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Request):
    tokens: Tokens


class Problem(BaseModel):
    """An error of the API."""

    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(BaseModel):
    """The body of a refusal."""

    error: Problem


Kind = TypeVar("Kind", bound=Request)


def read(kind: type[Kind], body: bytes) -> Kind:
    """The request in a body.

    Raises:
        ApiError: 400: it is not JSON, or a field is missing or of the wrong kind.
    """
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"body: expected JSON, got: {error}", code="invalid_json") from None
    _read_others(request, "", request.model_extra or {}, type(request).model_fields)
    for path, type_, known in PARTS:
        part: Any = request
        for name in path.split("."):
            part = part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)
        if isinstance(part, StreamOptions):
            part = part.model_extra
        if isinstance(part, Mapping) and type_ in (None, part.get("type")):
            others = {name: value for name, value in part.items() if name not in known}
            _read_others(request, f"{path}.", others, known)
    return request


def _read_others(
    request: Request, where: str, others: Mapping[str, Any], known: Collection[str]
) -> None:
    """Honour, refuse or ignore the fields that a request, or the part of it at ``where``, does not
    have.
    """
    if len(others) > MAX_UNKNOWN:
        raise invalid(f"body: expected at most {MAX_UNKNOWN} unknown fields, got {len(others)}")
    fields, given = frozenset(known), {plain(name): value for name, value in others.items()}
    for name, value in others.items():
        key = plain(name)
        if value is None or (key in WITHOUT_EFFECT and not where):
            continue
        is_foreign = bool(where) or name not in FIELDS
        if not where and is_foreign and (meant := same(key, fields)):
            _set(request, meant, name, value)
            continue
        ours, is_known = meaning(key, fields)
        if is_foreign and not is_known:
            request.ignore(where + name)
        elif isinstance(request, AnswerRequest) and not asks_for_nothing(key, value, given):
            expected = f"{ours} in its place" if ours else "none, since it is not supported here"
            said = f"{where}{name[:MAX_NAME]}: expected {expected}, got {shown(value)}"
            raise invalid(said, (where + name).partition(".")[0], "not_supported")


def _set(request: Request, fields: list[str], name: str, value: Any) -> None:
    """Set the first of some fields, which mean the same as one that a request has."""
    is_limit = fields[0] == "thinking_budget" or not isinstance(request, CompletionRequest)
    if value in ("", [], {}) or (value == -1 and is_limit):
        return  # nothing, or no limit
    for field in fields:
        if (own := getattr(request, field)) not in (None, value):
            expected = f"none with {field}={shown(own)}, or its value"
            raise invalid(f"{name}: expected {expected}, got {shown(value)}", name)
    try:
        type(request).__pydantic_validator__.validate_assignment(request, fields[0], value)
    except ValidationError as error:
        reason = error.errors(include_url=False, include_input=False)[0]["msg"]
        raise invalid(f"{name}: expected a value of {fields[0]}: {reason}", name) from None


FIELDS = frozenset(
    name
    for kind in (ChatRequest, CompletionRequest, ResponsesRequest)
    for name in kind.model_fields
)
_SCHEMA = ("name", "schema", "strict", "description")
# Parts of requests, their type where it matters, and the fields that they have.
PARTS: tuple[tuple[str, str | None, Collection[str]], ...] = (
    ("stream_options", None, StreamOptions.model_fields),
    ("response_format", "text", ("type",)),
    ("response_format", "json_object", ("type", "schema")),
    ("response_format", "json_schema", ("type", "json_schema")),
    ("response_format.json_schema", None, _SCHEMA),
    ("text", None, ("format", "verbosity")),
    ("text.format", "text", ("type",)),
    ("text.format", "json_object", ("type",)),
    ("text.format", "json_schema", ("type", *_SCHEMA)),
    ("reasoning", None, ("effort", "summary", "generate_summary")),
)
_unknown: set[str] = set()


def _refusal(error: ValidationError) -> ApiError:
    """The first of many errors, since the kinds that a field allows each report one."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"].startswith("json_"):
        return invalid(f"body: expected JSON, got: {first['msg']}", code="invalid_json")
    if not first["loc"]:
        return invalid(f"body: expected an object, got: {first['msg']}")
    field = str(first["loc"][0])
    where = ".".join(str(part) for part in first["loc"])[:100]
    return invalid(f"{where}: {first['msg']}", param=field)
