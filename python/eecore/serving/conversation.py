"""The text that the model's chat template makes from a request's messages.

OpenAI's clients send answers back with nulls, parts, refusals and arguments as text. Most templates
expect text in one piece, arguments that are an object, and no nulls. What else a template needs is
found out once, by rendering tools and calls with it. One that does not show them gets them as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from eecore.errors import ModelError, RequestError
from eecore.models import ChatTemplate
from eecore.serving.protocol import Conversation
from eecore.serving.refusals import invalid
from eecore.serving.served import ServedModel
from eecore.serving.tool_calls import FORMATS, ToolFormat
from eecore.values import shown

Message = dict[str, Any]

TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The kinds of parts that are text, and the field that has it."""
# Names that servers and templates use for the reasoning in an answer.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# Template variables that are fields of the request, or not supported.
OWN_FIELDS = ("messages", "add_generation_prompt", "continue_final_message", "chat_template")
# Values that a template without the variable follows anyway; of a model that does not think, too.
USUAL = {"verbosity": "medium"}
WITHOUT_THOUGHTS = {**USUAL, "reasoning_effort": "none", "enable_thinking": False}


def conversation(served: ServedModel, body: Conversation, *, with_tools: bool = True) -> str:
    """The text that the model's chat template makes from messages.

    Raises:
        ApiError: 400: the messages are malformed, or the template refuses them.
    """
    tokenizer = served.tokenizer
    variables = dict(body.chat_template_kwargs or {})
    for name in OWN_FIELDS:
        if name in variables:
            raise invalid(f"chat_template_kwargs: expected variables of the template, got {name}")
    if body.tools and with_tools:
        variables["tools"] = body.tools
    if body.documents:
        variables["documents"] = body.documents
    messages = [_message(f"messages[{i}]", each) for i, each in enumerate(body.messages or ())]
    try:
        source = tokenizer.template_for(variables)
        variables = {**_chosen(served, body, source), **variables}
        tools = variables.get("tools") or []
        if tools or any(each.get("role") == "tool" or "tool_calls" in each for each in messages):
            special = tuple(sorted(tokenizer.special_tokens.items()))
            habits = _habits(source, special)
            form = served.tool_format or FORMATS["hermes"]
            if tools and not habits.shows_tools and habits.tools_in:
                del variables["tools"]
                messages = _with_tools(_in_text(messages, form), tools, form, habits.tools_in)
            elif habits.shows_calls or not habits.tools_in:
                messages = habits.written(messages)
            else:
                messages = _in_text(messages, form, results=not habits.shows_results)
        return tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            **variables,
        )
    except (ModelError, RequestError) as error:  # a client does not get to see the model's path
        text = str(error).replace(f"{tokenizer.name}: ", "")
        field = text.partition(":")[0]
        raise invalid(text, field if field in type(body).model_fields else "messages") from None


def _chosen(served: ServedModel, body: Conversation, source: str) -> Message:
    """The template's variables that a request has as fields.

    A reasoning effort also says whether to think, where the template can be told.

    Raises:
        ApiError: 400: the template does not have one.
    """
    thinks = served.engine.engine.intake.thinking is not None
    usual = USUAL if thinks else WITHOUT_THOUGHTS
    fields = ("enable_thinking", "reasoning_effort", "verbosity")
    given = {name: value for name in fields if (value := getattr(body, name)) is not None}
    if given.get("enable_thinking") == "calibrated":
        given["enable_thinking"] = True
        usual = {**usual, "enable_thinking": True} if thinks else usual
    effort = given.get("reasoning_effort")
    if effort is not None and "enable_thinking" in source:
        given = {"enable_thinking": effort != "none", **given}
        if effort == "none" or "reasoning_effort" not in source:
            del given["reasoning_effort"]
    for name, value in given.items():
        if name not in source and value != usual.get(name):
            raise invalid(f"{name}: expected a chat template that names it, got {shown(value)}")
    return {name: value for name, value in given.items() if name in source}


def _message(where: str, given: Mapping[str, Any]) -> Message:
    """A message as most templates expect it."""
    message = {name: value for name, value in given.items() if value is not None}
    role = message.get("role")
    if role == "developer":
        message["role"] = "system"
    for name in ("audio", "function_call"):
        if name in message:
            got = shown(message[name])
            raise invalid(f"{where}.{name}: is not supported, got {got}", "messages")
    content = message.get("content", [] if role == "assistant" else None)
    texts = _texts(f"{where}.content", content)
    if "refusal" in message:
        texts = [*filter(None, texts), *_texts(f"{where}.refusal", message.pop("refusal"))]
    message["content"] = "\n".join(texts)
    thoughts = next((message[name] for name in THOUGHTS if name in message), None)
    if thoughts is not None:
        message = {**dict.fromkeys(THOUGHTS, thoughts), **message}
    calls = message.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise invalid(f"{where}.tool_calls: expected a list, got {shown(calls)}", "messages")
    if calls and role != "assistant":
        raise invalid(
            f"{where}.tool_calls: expected them in an assistant's message, got {shown(role)}",
            "messages",
        )
    if calls:
        message["tool_calls"] = [_call(f"{where}.tool_calls[{i}]", c) for i, c in enumerate(calls)]
    return message


def _texts(where: str, content: Any) -> list[str]:
    """The texts of a message's content."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        got = "nothing" if content is None else shown(content)
        raise invalid(f"{where}: expected text or a list of parts, got {got}", "messages")
    return [_text(where, part) for part in content]


def _text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    fields = part if isinstance(part, dict) else {"type": part}
    kind = fields.get("type")
    text = fields.get(TEXTS[kind]) if isinstance(kind, str) and kind in TEXTS else None
    if not isinstance(text, str):
        raise invalid(f"{where}: expected text, got {shown(kind)}", "messages")
    return text


def _call(where: str, call: Any) -> Message:
    """A function call in an answer, without the fields that clients add to it."""
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if function is None or not isinstance(name, str):
        raise invalid(f"{where}: expected a call of a function, got {shown(call)}", "messages")
    arguments = _arguments(function.get("arguments"))
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made if call.get("id") is None else {"id": call["id"], **made}


def _arguments(given: Any) -> Any:
    """The value of JSON text; an empty object for None or an empty text. Text that is not JSON
    stays as it is.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else None
        except (ValueError, RecursionError):
            return given
    return {} if given is None else given


@dataclass(frozen=True)
class _Habits:
    """The form in which a chat template expects answers with calls, and what it shows.

    Args:
        null_content: the template writes calls only where the content is null.
        text_arguments: arguments are JSON text.
        one_call: an answer has one call at most.
        shows_calls: the template writes calls.
        shows_tools: the text has the tools.
        shows_results: the text has the tools, and the results of calls.
        tools_in: the role of the message that can describe tools; "": the text has only the last
            message, whatever that is.
    """

    null_content: bool = False
    text_arguments: bool = False
    one_call: bool = False
    shows_calls: bool = False
    shows_tools: bool = False
    shows_results: bool = False
    tools_in: str = ""

    def written(self, messages: Iterable[Message]) -> list[Message]:
        """Messages in the form that the template expects."""
        made = [each for message in messages for each in self._written(message)]
        return _one_by_one(made) if self.one_call else made

    def _written(self, message: Message) -> list[Message]:
        if "tool_calls" not in message:
            return [message]
        message = {**message, "tool_calls": [self._call(call) for call in message["tool_calls"]]}
        if not self.null_content:
            return [message]
        before = [{"role": message["role"], "content": message["content"]}]
        return [*(before if message["content"] else ()), {**message, "content": None}]

    def _call(self, call: Message) -> Message:
        arguments = call["function"]["arguments"]
        if not self.text_arguments or isinstance(arguments, str):
            return call
        text = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": text}}


NAMES = ("first_of_these", "second_of_these")
"""Names of functions that are looked for in a rendered text."""
ARGUMENT = "of_this_name"
MARK = "the_text_of_this"
"""A message's text that is looked for in a rendered text."""


@lru_cache(maxsize=16)
def _habits(source: str, special_tokens: tuple[tuple[str, str], ...]) -> _Habits:
    """The form of calls that a template renders most completely."""
    template = ChatTemplate(source)
    variables: dict[str, Any] = {"tools": None, "documents": None, **dict(special_tokens)}
    variables["add_generation_prompt"] = True
    user: Message = {"role": "user", "content": "a"}
    system: Message = {"role": "system", "content": MARK}
    turns: list[Message] = [{**user, "content": MARK}, {"role": "assistant", "content": "a"}, user]

    def rendered(messages: list[Message], tools: Any = None) -> str:
        """The text of messages; empty where the template refuses them."""
        try:
            return template.render(messages, {**variables, "tools": tools})
        except (ModelError, RequestError):
            return ""

    def called(habits: _Habits, names: Sequence[str]) -> str:
        """The text of a conversation with calls."""
        messages = [user, {"role": "assistant", "content": "", "tool_calls": []}]
        for number, name in enumerate(names):
            function = {"name": name, "arguments": {ARGUMENT: 1}}
            call = {"id": f"call0000{number}", "type": "function", "function": function}
            messages[1]["tool_calls"].append(call)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": MARK})
        return rendered(habits.written(messages))

    def seen(habits: _Habits, names: Sequence[str]) -> int:
        """How many of the functions' names and arguments the rendered text has."""
        text = called(habits, names)
        return sum(each in text for each in (*names, ARGUMENT, f'"{ARGUMENT}"'))

    either = (False, True)
    tried = [_Habits(*each) for each in product(either, either)]
    best = max(tried, key=lambda habits: seen(habits, NAMES[:1]))
    one = seen(best, NAMES[:1])
    parameters = {"type": "object", "properties": {ARGUMENT: {"type": "string"}}}
    function = {"name": NAMES[0], "description": "a", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    texts = list(filter(None, (rendered(each, tools) for each in ([user], [system, user]))))
    shows_tools = bool(texts) and all(NAMES[0] in text for text in texts)
    answered = [user, {"role": "assistant", "content": "a"}, {"role": "tool", "content": MARK}]
    places = {"system": [system, user], "user": turns}
    return replace(
        best,
        one_call=one > 0 and seen(best, NAMES) <= one,
        shows_calls="tool_calls" in source and bool(called(best, NAMES[:1])),
        shows_tools=shows_tools,
        shows_results=shows_tools and MARK in rendered(answered),
        tools_in=next((role for role in places if MARK in rendered(places[role])), ""),
    )


def _in_text(
    messages: Iterable[Message], form: ToolFormat, *, results: bool = True
) -> list[Message]:
    """Messages whose calls are text, and whose results are text of the user.

    Args:
        results: False: the results stay messages of a tool.
    """
    made: list[Message] = []
    is_result = False
    for message in messages:
        follows_result, is_result = is_result, results and message.get("role") == "tool"
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            message = {"role": "user", "content": text}
        elif "tool_calls" in message:
            functions = [call["function"] for call in message["tool_calls"]]
            calls = form.written((each["name"], each["arguments"]) for each in functions)
            text = "\n".join(filter(None, (message["content"], calls)))
            message = {name: each for name, each in message.items() if name != "tool_calls"}
            message["content"] = text
        if follows_result and message.get("role") == "user":  # many templates alternate the roles
            message["content"] = f"{made.pop()['content']}\n{message['content']}"
        made.append(message)
    return made


def _with_tools(
    messages: list[Message], tools: Iterable[Any], form: ToolFormat, role: str
) -> list[Message]:
    """Messages of which the system's, or else the user's first, describes tools."""
    text = "\n".join(
        [
            "You can call functions. Their signatures are JSON within <tools></tools>:",
            "<tools>",
            *(json.dumps(tool, ensure_ascii=False) for tool in tools),
            "</tools>",
            "To call a function, answer in this form, with its name and its arguments:",
            form.written([("function-name", {"argument-name": "value"})]),
        ]
    )
    near = messages[:1] if role == "system" else messages
    at = next((i for i, message in enumerate(near) if message.get("role") == role), None)
    if at is None:
        return [{"role": role, "content": text}, *messages]
    texts = [messages[at]["content"], text]
    both = "\n\n".join(texts if role == "system" else reversed(texts))
    return [*messages[:at], {**messages[at], "content": both}, *messages[at + 1 :]]


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Answers with one call each, each followed by the result of its call."""
    made: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            made.append(message)
            continue
        results = []
        while at < len(messages) and messages[at].get("role") == "tool":
            results.append(messages[at])
            at += 1
        for call in calls:
            made.append({**message, "tool_calls": [call]})
            message = {**message, "content": message["content"] and ""}
            own = [each for each in results if each.get("tool_call_id") == call.get("id")]
            own = own if "id" in call else results[:1]
            made += own
            results = [each for each in results if each not in own]
        made += results
    return made
