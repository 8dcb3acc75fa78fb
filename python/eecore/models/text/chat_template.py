"""Chat templates, which turn a conversation into the text format that a model was trained on.

A template is a program that comes with a model. It runs in jinja2's sandbox, in a worker
(:mod:`eecore.template_process`) that the kernel ends when a rendering exceeds its limits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from eecore.bounded_process import NotPrepared, Workers
from eecore.errors import ModelError, RequestError
from eecore.models.text.messages import given_values

MAX_SOURCE = 128 << 10
"""Characters of a template, at most; large ones of today have 40 thousand."""
SECONDS = 0.5
"""CPU time of a rendering, at most."""
SECONDS_PER_CHARACTER = 2e-7
"""CPU time added to :data:`SECONDS` for each character that the template is given."""
SECONDS_PER_SOURCE = 4e-6
"""CPU time added for each character of the template, which may have to be compiled."""
MEMORY = 256 << 20
"""Bytes of a rendering, at most."""
MEMORY_PER_CHARACTER = 32
"""Bytes added to :data:`MEMORY` for each character that the template is given."""
CHARACTERS = 4 << 20
"""Characters of a rendered text, at most."""
CHARACTERS_PER_CHARACTER = 16
"""Characters added to :data:`CHARACTERS` for each character that the template is given."""
LAST_MESSAGE = re.compile(r"([^{}\n]*)\{\{ messages\[-1\]\['content'\] \}\}([^{}\n]*)")
"""A template of the last message between two fixed texts, rendered here without a worker."""
MARK = "(the answer goes on here) "
"""Marks the end of a message that is to be continued."""
WORKERS = Workers("eecore.template_process")
"""The processes that render all templates."""


class ChatTemplateError(ModelError):
    """The model has no chat template, or one that cannot be used."""


class MessagesRefused(RequestError):
    """The chat template refuses the messages, in its own words."""


class ChatTemplate:
    """A template that has been compiled once.

    Args:
        name: the template's name in errors.

    Raises:
        ChatTemplateError: the source is too large, or is not a template.
    """

    def __init__(self, source: str, name: str = "chat_template") -> None:
        self.source = source
        self.name = name
        if len(source) > MAX_SOURCE:
            raise ChatTemplateError(
                f"{name}: expected at most {MAX_SOURCE} characters, got {len(source)}"
            )
        self._around = LAST_MESSAGE.fullmatch(source)
        if self._around is None:
            self._rendered(None, 0)

    def render(
        self, messages: Any, variables: Mapping[str, Any], *, continues: bool = False
    ) -> str:
        """The text of a conversation.

        Args:
            variables: other values that the template sees.
            continues: whether the text ends with the last message's text, to be continued.

        Raises:
            RequestError: the messages are not a conversation, or the last cannot be continued.
            MessagesRefused: the template refuses the messages.
            ChatTemplateError: the template fails, or exceeds its limits.
        """
        values, num_characters = given_values(messages, variables)
        last = _marked(values["messages"]) if continues else ""
        content = values["messages"][-1].get("content") if values["messages"] else None
        if self._around is not None and isinstance(content, str):
            text = content.join(self._around.groups())
        else:
            text = self._rendered(values, num_characters)
        return _before_mark(text, last) if continues else text

    def _rendered(self, values: dict[str, Any] | None, given: int) -> str:
        """The rendered text of values that have ``given`` characters.

        With None for values the template is only compiled.
        """
        seconds = SECONDS + SECONDS_PER_CHARACTER * given + SECONDS_PER_SOURCE * len(self.source)
        memory = MEMORY + MEMORY_PER_CHARACTER * given
        characters = CHARACTERS + CHARACTERS_PER_CHARACTER * given
        try:
            answer = WORKERS.ask((self.source, values, characters), seconds, memory)
        except NotPrepared as error:
            raise ChatTemplateError(
                f"{self.name}: expected a process to render it in, got: {error}"
            ) from None
        if answer is None:
            raise ChatTemplateError(
                f"{self.name}: expected to take at most {seconds:.1f} s and {memory >> 20} MiB, "
                "got more"
            )
        text, why, is_refusal = answer
        if is_refusal:
            raise MessagesRefused(f"messages: {self.name} refuses them: {why}")
        if text is None:
            raise ChatTemplateError(f"{self.name}: {why}")
        return str(text)


def _marked(messages: list[dict[str, Any]]) -> str:
    """The text of the last message, to which a mark is then added in place."""
    field = "continue_final_message: expected a last message"
    last = messages[-1] if messages else {}
    if last.get("tool_calls"):
        raise RequestError(f"{field} without tool_calls, got some")
    if isinstance(last.get("content"), str):
        text = last["content"]
        last["content"] = text + MARK
        return str(text)
    parts = last.get("content") or []
    part = next((p for p in reversed(parts) if isinstance(p, dict) and "text" in p), {})
    if not isinstance(text := part.get("text"), str):
        raise RequestError(f"{field} with text, got none")
    part["text"] = text + MARK
    return text


def _before_mark(text: str, last: str) -> str:
    """The text of a conversation up to the mark in its last message.

    If the template has trimmed the mark, it would also trim the message, which is done here.
    """
    mark = MARK.strip()
    before, found, after = text.rpartition(mark)
    if not found or last.strip() not in before:
        raise RequestError(
            "continue_final_message: expected a chat template that writes the last message whole"
        )
    return before if after.startswith(MARK[len(mark) :]) else before.rstrip()
