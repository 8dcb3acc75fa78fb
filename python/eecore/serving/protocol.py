"""What the endpoints take: the fields of OpenAI's requests, and eecore's own.

Fields that are not known are passed over. A field of the wrong kind is a 400 that names it.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eecore.serving.refusals import ApiError, invalid

__all__ = [
    "NOT_SUPPORTED",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerationRequest",
    "Refusal",
    "TokenizeRequest",
    "read",
]

MOST_CHOICES = 128
MOST_MESSAGES = 4096
MOST_PROMPTS = 1024
# What the engine lacks. To pass over it would be to answer something else than was asked.
NOT_SUPPORTED = (
    "use_beam_search",
    "functions",
    "suffix",
)
_LACKING: Any = Field(None, description="Not supported: a 400, unless it says what is so anyway.")


# The first thing that is wrong is enough: a list may be long.
Prompts = Annotated[list[str], Field(fail_fast=True, max_length=MOST_PROMPTS)]
Tokens = Annotated[list[int], Field(fail_fast=True)]
TokenPrompts = Annotated[list[Tokens], Field(fail_fast=True, max_length=MOST_PROMPTS)]


class Request(BaseModel):
    """Strict: text is no number. What JSON cannot say, infinity for one, is refused."""

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=()
    )

    model: str | None = Field(None, description="A name of /v1/models; the server's when left out.")


class GenerationRequest(Request):
    """What completions and chats have in common."""

    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, description="0, greedy, when left out.")
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 and -1 keep all tokens.")
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Token ids to biases.")
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stream: bool | None = None
    stream_options: dict[str, Any] | None = Field(None, examples=[{"include_usage": True}])
    response_format: dict[str, Any] | None = Field(
        None,
        description="text, json_object or json_schema.",
        examples=[{"type": "json_schema", "json_schema": {"name": "it", "schema": {}}}],
    )
    user: str | None = None
    metadata: dict[str, Any] | None = Field(
        None, description="`exit` in it is heeded where the body has none."
    )
    exit: str | dict[str, Any] | None = Field(
        None,
        description="How deep to go: `speculative:3,6`, or an object with a mode.",
        examples=["auto", "speculative:3,6", {"mode": "confident", "threshold": 0.9}],
    )
    return_exit_layers: bool | None = Field(
        None, description="Exit layer and confidence of each token."
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="vLLM's: of each token of the prompt, and of so many others. Not in a stream.",
    )
    use_beam_search: bool | None = _LACKING
    guided_json: Any = Field(None, description="A JSON schema.")
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = Field(None, description="In Lark's syntax, or GBNF.")
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of `json`, `regex`, `choice`, `grammar`, `json_object`."
    )


class ChatRequest(GenerationRequest):
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = Field(None, description="For the chat template.")
    functions: list[Any] | None = _LACKING
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="none, auto, required, or a function."
    )
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


class CompletionRequest(GenerationRequest):
    prompt: str | Prompts | Tokens | TokenPrompts
    max_tokens: int | None = Field(
        None, ge=0, description="0 goes with `echo` or `prompt_logprobs`."
    )
    logprobs: int | None = Field(
        None, ge=0, le=20, description="With `echo` those of the prompt, too."
    )
    echo: bool | None = None
    suffix: str | None = _LACKING
    best_of: int | None = Field(None, description="As n alone.")
    add_special_tokens: bool | None = None


class TokenizeRequest(Request):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1, max_length=MOST_MESSAGES)
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Request):
    tokens: Tokens


class Problem(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(BaseModel):
    """What an answer is that is none."""

    error: Problem


Kind = TypeVar("Kind", bound=Request)


def read(kind: type[Kind], body: bytes) -> Kind:
    """The request in a body.

    Raises:
        ApiError: 400: it is not JSON, or a field is missing or of the wrong kind.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"body: expected JSON, got: {error}", code="invalid_json") from None


def _refusal(error: ValidationError) -> ApiError:
    """Of many errors the first: kinds that a field might have had would fill the page."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"].startswith("json_"):
        return invalid(f"body: expected JSON, got: {first['msg']}", code="invalid_json")
    if not first["loc"]:
        return invalid(f"body: expected an object, got: {first['msg']}")
    field = str(first["loc"][0])
    where = ".".join(str(part) for part in first["loc"])[:100]
    return invalid(f"{where}: {first['msg']}", param=field)
