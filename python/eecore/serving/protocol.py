"""The fields of requests: OpenAI's and eecore's own.

A field of the wrong kind is refused with a 400 that names it, as is one that asks for what the
server does not do. Fields without effect on an answer are listed here; the names of unknown fields
are logged, once each.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eecore.config import SamplingParams
from eecore.exit_text import FORMS
from eecore.serving.refusals import ApiError, invalid
from eecore.values import help_of, shown

MAX_CHOICES = 128
MAX_MESSAGES = 4096
MAX_PROMPTS = 1024
MAX_INPUT = MAX_MESSAGES - 1
"""Input items of a response; its instructions are one more message."""
MAX_UNKNOWN = 256
"""Names of unknown fields that are logged."""
LOGGER = logging.getLogger("eecore")

# Fields without effect on an answer: about the user, queues, bills, storage and speed.
WITHOUT_EFFECT = frozenset(
    {
        "access_programs",
        "cache_prompt",
        "guided_decoding_backend",
        "id_slot",
        "keep_alive",
        "max_tool_calls",  # limits tools that a server itself has
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "rid",
        "safety_identifier",
        "service_tier",
        "store",
        # Without effect, since reasoning is part of the answer's text.
        "separate_reasoning",
        "stream_reasoning",
        # Tokenizers add no spaces between special tokens.
        "spaces_between_special_tokens",
    }
)
# Fields that are not supported, each with the values that ask for nothing. Other values are
# refused, since an answer that ignores one would be wrong.
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "audio": (),
    "background": (False,),
    "background_options": ({},),
    "best_of": (1,),
    "context_management": ([],),
    "conversation": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "image": ({},),
    "modalities": (["text"], []),
    "moderation": (),
    "suffix": ("",),
    "truncation": ("disabled",),
    "web_search_options": (),
    # vLLM's
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": (),
    "chat_template": (),
    "ec_transfer_params": (),
    "early_stopping": (False,),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "min_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "repetition_detection": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "structural_tag": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    # SGLang's
    "custom_logit_processor": (),
    "ebnf": ("",),
    "lora_path": (),
    "no_stop_trim": (False,),
    "regex": ("",),
    "return_hidden_states": (False,),
    "session_params": (),
    "stop_regex": ("", []),
    # of llama.cpp, Ollama and others
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "enable_thinking": (),
    "format": ("",),
    "grammar": ("",),
    "json_schema": ("", {}),
    "lora": ([],),
    "mirostat": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "options": ({},),
    "repeat_penalty": (1,),
    "samplers": (),
    "tfs_z": (1,),
    "think": (),
    "thinking": (),
    "top_a": (0,),
    "top_n_sigma": (-1,),
    "typical_p": (1,),
    "xtc_probability": (0,),
}
# Values that ask for nothing in fields of other endpoints.
NOTHING: tuple[Any, ...] = (False, "", [], {})


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


class StreamOptions(BaseModel):
    """Fields of a stream apart from its text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Without effect."""
    continuous_usage_stats: bool | None = None
    """vLLM's: every chunk has the usage so far of its choice."""


def _setting(name: str, more: str = "") -> Any:
    """A field of SamplingParams, with its range and description."""
    return Field(None, description=f"{help_of(SamplingParams, name)}.{more}")


class AnswerRequest(Request):
    """Fields that all requests for an answer share."""

    temperature: float | None = _setting(
        "temperature",
        " When left out, the model's own, as all of these; where the model has none, an answer in "
        "free text is sampled as `eecore chat` does, and everything else is greedy.",
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
    reasoning_effort: str | None = Field(None, description="For a chat template that names it.")
    verbosity: str | None = Field(None, description="For a chat template that names it.")
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        None, description="The answer continues the last message."
    )
    add_special_tokens: bool | None = None


class ChatRequest(GenerationRequest, Conversation):
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


class ResponsesRequest(AnswerRequest):
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
    _check_others(request)
    return request


def _check_others(request: Request) -> None:
    """Refuse fields that this kind of request does not have and that would change its answer."""
    for name, value in (request.model_extra or {}).items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name in NOT_SUPPORTED or name in FIELDS:
            matters = name in NOT_SUPPORTED or isinstance(request, AnswerRequest)
            if matters and value not in NOT_SUPPORTED.get(name, NOTHING):
                said = f"{name}: is not supported, got {shown(value)}"
                raise invalid(said, name, "not_supported")
        elif name not in _unknown and len(_unknown) < MAX_UNKNOWN:
            _unknown.add(name)
            LOGGER.warning("requests have a field that is not known, and ignored: %s", shown(name))


FIELDS = frozenset(
    name
    for kind in (ChatRequest, CompletionRequest, ResponsesRequest)
    for name in kind.model_fields
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
