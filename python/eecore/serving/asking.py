"""Requests for the engine, made from a request's body: checked, tokenized, ready to run.

All of it runs in a thread beside the event loop, since a long text takes time to tokenize.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from eecore.config import SamplingParams
from eecore.engine.async_engine import Prepared
from eecore.engine.text import TextStream
from eecore.errors import GuideError
from eecore.serving.conversation import conversation
from eecore.serving.guides import expected_calls, guide_of, refusal_of
from eecore.serving.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    TokenizeRequest,
)
from eecore.serving.refusals import ApiError, invalid
from eecore.serving.served import ServedModel
from eecore.serving.tool_calls import ExpectedCalls
from eecore.values import MIN_POSITIVE, shown

# OpenAI's default of a completion. A chat may go on until the context is full.
MAX_TOKENS = 16
SEEDS = 2**64
LONGEST_ID = 10  # digits


@dataclass(frozen=True)
class Choice:
    """One of the answers that a request asks for."""

    prompt_tokens: int
    echo: str
    """The prompt's text, where the answer begins with it."""
    prepared: Prepared


@dataclass(frozen=True)
class Asked:
    """A request that has been checked and can be served."""

    model: str
    """The model's name as the request has it."""
    choices: list[Choice]
    num_prompts: int
    body: GenerationRequest
    logprobs: int | None
    """Alternative tokens reported at each position; None: no log-probabilities."""
    calls: ExpectedCalls | None = None
    """The tool calls that may be found in the answer."""

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        options = self.body.stream_options
        return options is not None and bool(options.include_usage or self.counts_usage)

    @property
    def counts_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far of its choice."""
        options = self.body.stream_options
        if options is None or options.include_usage is False:
            return False
        return bool(options.continuous_usage_stats)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; a prompt with several answers counts once."""
        per_prompt = len(self.choices) // self.num_prompts
        return sum(choice.prompt_tokens for choice in self.choices[::per_prompt])


def ask_completion(served: ServedModel, body: CompletionRequest) -> Asked:
    """A request for completions: each prompt ``n`` times.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid(f"best_of: expected as many as n={body.n or 1}, got {body.best_of}")
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise invalid("max_tokens: expected at least 1 without echo and prompt_logprobs, got 0")
    prompts = _prompts(body.prompt)
    _count(served, len(prompts) * (body.n or 1))
    special = body.add_special_tokens is not False
    encoded = [_encoded(served, prompt, special) for prompt in prompts]
    echoes = [_text(served, prompt) if body.echo else "" for prompt in prompts]
    given = list(zip(encoded, echoes, strict=True))
    most = MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return _asked(served, body, given, most, body.logprobs)


def ask_chat(served: ServedModel, body: ChatRequest) -> Asked:
    """A request for the answers to a conversation.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs: expected logprobs=true with it", "top_logprobs")
    _count(served, body.n or 1)
    calls = expected_calls(body, served.tool_format)
    text = conversation(served, body, with_tools=body.tool_choice != "none")
    encoded = served.encode(text, add_special_tokens=bool(body.add_special_tokens))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    most = body.max_completion_tokens or body.max_tokens
    asked = _asked(served, body, [(encoded, "")], most, logprobs, calls)
    return asked if calls is None else _with_calls(served, asked, calls)


def compile_guide(served: ServedModel, body: GenerationRequest) -> None:
    """Compile the guide of the answer. Errors in it are reported by the ``ask_`` functions."""
    form = served.tool_format
    with suppress(ApiError, GuideError):
        calls = expected_calls(body, form) if isinstance(body, ChatRequest) else None
        if (made := guide_of(body, calls)) is not None:
            served.engine.compile(made[1])


def tokens_of(served: ServedModel, body: TokenizeRequest) -> list[int]:
    """The tokens of a prompt or conversation."""
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt: expected either prompt or messages, got both or none", "prompt")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        return served.encode(body.prompt, add_special_tokens=special)
    text = conversation(served, body)
    return served.encode(text, add_special_tokens=bool(body.add_special_tokens))


def _asked(
    served: ServedModel,
    body: GenerationRequest,
    given: list[tuple[list[int], str]],
    most: int | None,
    logprobs: int | None,
    calls: ExpectedCalls | None = None,
) -> Asked:
    options = body.stream_options
    if options is not None and not body.stream and (set_ := options.model_dump(exclude_none=True)):
        raise invalid(f"stream_options: expected stream=true with it, got {shown(set_)}")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs: expected none in a stream")
    echoes = isinstance(body, CompletionRequest) and bool(body.echo)
    said = served.says(body.model)
    from_metadata = (body.metadata or {}).get("exit")
    for each in (from_metadata, body.exit):
        if isinstance(each, (str, dict)):
            said = each  # type: ignore[assignment]
        elif each is not None:
            raise invalid(f"metadata.exit: expected text or an object, got {shown(each)}")
    policy = served.depths.chosen(said)
    guided = guide_of(body, calls)
    answers = isinstance(body, ChatRequest) and guided is None
    choices = []
    for ids, echo in given:
        max_tokens = _max_tokens(served, len(ids), most)
        settings = _settings(body, max_tokens, logprobs, echoes=echoes)
        settings["ends_repetition"] = most is None
        sampling = served.sampling(policy, settings, answers=answers)
        if guided is not None:
            sampling = replace(sampling, guide=guided[1])
        for index in range(body.n or 1):
            own = sampling
            if sampling.seed is not None:
                own = replace(sampling, seed=(sampling.seed + index) % SEEDS)
            try:
                prepared = served.engine.prepare(ids, exit=policy, sampling=own)
            except GuideError as error:
                raise refusal_of(guided[0] if guided else "guide", error) from None
            if prepared.text is not None:
                _place_thought(prepared.text, body)
            choices.append(Choice(len(ids), echo, prepared))
    return Asked(body.model or served.name, choices, len(given), body, logprobs)


def _place_thought(text: TextStream, body: GenerationRequest) -> None:
    """Put the thought before an answer where the request wants it."""
    if not isinstance(body, ChatRequest):
        text.join()  # a completion is all text
    elif body.include_reasoning is False and text.may_think:
        if body.logprobs or body.return_exit_layers:
            raise invalid(
                "include_reasoning: expected true with logprobs or return_exit_layers, which tell "
                "the tokens of the thought, got false"
            )
        text.has_thought = False
    elif body.reasoning_format == "none":
        text.join(opens=True)


def _with_calls(served: ServedModel, asked: Asked, calls: ExpectedCalls) -> Asked:
    """The request, with answers that show the markers of tool calls even where these are special
    tokens.
    """
    if hidden := served.tokenizer.hidden(calls.format.markers):
        for choice in asked.choices:
            assert choice.prepared.text is not None
            choice.prepared.text.show(hidden)
    return replace(asked, calls=calls)


def _settings(
    body: GenerationRequest, max_tokens: int, logprobs: int | None, *, echoes: bool
) -> dict[str, Any]:
    """The fields of SamplingParams that a request has."""
    settings: dict[str, Any] = {
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": _prompt_logprobs(body, max_tokens, logprobs if echoes else None),
    }
    for field in fields(SamplingParams):
        value = getattr(body, field.name, None)
        if field.name not in settings and value is not None:
            settings[field.name] = value
    if isinstance(body, ChatRequest) and "thinking_budget" in (body.chat_template_kwargs or ()):
        settings.setdefault("thinking_budget", (body.chat_template_kwargs or {})["thinking_budget"])
    if getattr(body, "enable_thinking", None) == "calibrated":
        settings["think"] = "calibrated"
    if settings.get("top_k") == -1:
        settings["top_k"] = 0
    if settings.get("top_p") == 0:
        settings["top_p"] = MIN_POSITIVE
    if "seed" in settings:
        settings["seed"] %= SEEDS
    if "logit_bias" in settings:
        settings["logit_bias"] = _biases(settings["logit_bias"])
    return settings


def _prompt_logprobs(body: GenerationRequest, max_tokens: int, echoed: int | None) -> int | None:
    """Alternative tokens reported for the prompt: as many as its echo or the field asks for; 0
    where the request generates nothing, None where nothing is to be reported.
    """
    needed = [count for count in (body.prompt_logprobs, echoed) if count is not None]
    return max(needed, default=None if max_tokens else 0)


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """Biases by token id; JSON has the ids as text."""
    for token in given:
        if not (token.isascii() and token.isdigit() and len(token) <= LONGEST_ID):
            raise invalid(f"logit_bias: expected token ids, got {shown(token)}")
    return {int(token): bias for token, bias in given.items()}


def _max_tokens(served: ServedModel, prompt_tokens: int, most: int | None) -> int:
    room = served.room(prompt_tokens)
    if room < (1 if most is None else most):
        wanted = f" and max_tokens={most}" if most is not None else ""
        raise invalid(
            f"prompt of {prompt_tokens} tokens{wanted}: expected at most {served.max_model_len} "
            "together, what the model's context and the KV cache hold",
            code="context_length_exceeded",
        )
    return room if most is None else most


def _count(served: ServedModel, count: int) -> None:
    """Check the number of sequences, before a long list of prompts is tokenized."""
    if count > (most := served.max_choices):
        raise invalid(f"n: expected at most {most} choices, over all prompts, got {count}", "n")


def _prompts(given: str | list[Any]) -> list[str | list[int]]:
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid("prompt: expected at least one token or prompt, got none", "prompt")
    return [given] if isinstance(given[0], int) else given


def _encoded(served: ServedModel, prompt: str | list[int], special: bool) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    if not prompt:
        raise invalid("prompt: expected some text, got an empty string")
    return served.encode(prompt, add_special_tokens=special)


def _text(served: ServedModel, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else served.tokenizer.decode(prompt)
