"""The answer to a request to /v1/responses: its items, and the events of its stream.

A thought is an item of its own before the message, with its text as content.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from eecore.output import Output, Piece, StepOutput
from eecore.serving.refusals import ApiError
from eecore.serving.responses import ResponseChat
from eecore.serving.shapes import JSON, PLACE, ChatShape, Tokens, usage
from eecore.serving.tool_calls import ToolCall

KINDS = {"message": ("msg", "output_text"), "reasoning": ("rs", "reasoning_text")}
"""The items that are text: the beginning of their ids, and the type of their part."""
NOT_SAID = {"description": None, "parameters": None, "strict": None}
"""The fields that a tool has in an answer, though its request may leave them out."""
BEGINNING = ("created", "in_progress")
"""The events before any item."""


class ResponseShape(ChatShape):
    """The answer to a request to /v1/responses: reasoning, messages and calls of functions, in
    their order.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.id = f"resp_{uuid.uuid4().hex}"
        body = self.asked.body
        assert isinstance(body, ResponseChat)
        self._request = body.request
        self._items: list[dict[str, Any]] = []
        self._open = ""
        """The kind of the last item while it is unfinished text."""
        self._texts: list[str] = []
        """The text of that item, piece by piece."""
        self._ids: list[int] = []
        """The tokens so far, where details of them are wanted."""
        self._details_left: dict[str, list[Any]] = {}
        """Details of tokens that no event has reported yet."""
        self._num_events = 0
        self._around = ("", "")
        """The parts of a delta event before and after its text, for the unfinished item."""

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        (output,) = outputs
        self._added_events(Piece(output.text or "", output.thought or ""), output, output)
        return self._response(output)

    def events(self, index: int, step: StepOutput) -> str:  # noqa: ARG002
        found = []
        if not self._num_events:
            begun = self._response(None)
            found += [self._event(f"response.{kind}", response=begun) for kind in BEGINNING]
        return "".join([*found, *self._added_events(step.added, step, step.output)])

    def end(self, outputs: Sequence[Output]) -> str:
        response = self._response(outputs[0])
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> str:
        closed = self._closed("incomplete")
        # OpenAI has fewer codes of failures than a chat.
        problem = {"code": "server_error", "message": error.message}
        response = {**self._response(None), "status": "failed", "error": problem}
        return "".join([*closed, self._event("response.failed", response=response)])

    def _added_events(self, added: Piece, tokens: Tokens, output: Output | None) -> list[str]:
        """The events of added text; the last ones where there is an output."""
        if self._wants_tokens:
            self._ids += tokens.token_ids
            for name, values in self._named_details(tokens).items():
                self._details_left.setdefault(name, []).extend(values)
        parts: list[str | ToolCall] = [added.text] if added.text else []
        if self._readers:
            parts = self._readers[0].add(added.text, last=output is not None)
        events = self._text_events(added.thought, "reasoning") if added.thought else []
        for part in parts:
            events += self._text_events(part) if isinstance(part, str) else self._call_events(part)
        if output is not None:
            if not self._items or (self._open and self._details_left):
                events += self._text_events("", self._open or "message")
            events += self._closed(
                "incomplete" if output.finish_reason == "length" else "completed"
            )
        return events

    def _named_details(self, tokens: Tokens) -> dict[str, list[Any]]:
        details = self._details(0, tokens)
        logprobs = details.pop("logprobs")
        return {**details, **({} if logprobs is None else {"logprobs": logprobs["content"]})}

    def _text_events(self, text: str, kind: str = "message") -> list[str]:
        events = []
        if self._open != kind:
            if self._open == "reasoning" and "logprobs" in self._details_left:
                thinking = self.served.engine.engine.intake.thinking
                assert thinking is not None
                del self._details_left["logprobs"][: thinking.num_tokens(self._ids)]
            events = [*self._closed("completed"), *self._begun(kind)]
        self._texts.append(text)
        if not self._details_left:
            number, (before, after) = self._num_events, self._around
            self._num_events += 1
            return [*events, f"{before}{JSON.encode(text)}{after}{number}}}\n\n"]
        details, self._details_left = self._details_left, {}
        if kind == "message":
            self._items[-1]["content"][0]["logprobs"] += details.setdefault("logprobs", [])
        elif "logprobs" in details:  # they belong to the answer
            self._details_left = {"logprobs": details.pop("logprobs")}
        place = {**self._place(), "content_index": 0}
        name = f"response.{KINDS[kind][1]}.delta"
        return [*events, self._event(name, **place, **details, delta=text)]

    def _begun(self, kind: str) -> list[str]:
        """The events that begin a message, or reasoning."""
        prefix, part = KINDS[kind]
        is_message = kind == "message"
        item: dict[str, Any] = {"role": "assistant"} if is_message else {"summary": []}
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, **item}
        scores: dict[str, Any] = {"logprobs": []} if is_message else {}
        empty: dict[str, Any] = {"type": part, "text": "", **scores}
        if is_message:
            empty["annotations"] = []
        self._items.append({**item, "status": "in_progress", "content": []})
        self._open = kind
        events = [self._item_event("added")]
        place = {**self._place(), "content_index": 0}
        events.append(self._event("response.content_part.added", **place, part=empty))
        self._items[-1]["content"] = [empty]
        name = f"response.{part}.delta"
        delta = {"type": name, **place, **scores, "delta": PLACE, "sequence_number": 0}
        before, after = JSON.encode(delta).split(JSON.encode(PLACE))
        self._around = (f"event: {name}\ndata: {before}", after.removesuffix("0}"))
        return events

    def _closed(self, status: str) -> list[str]:
        """The events that end the unfinished item; none where there is none."""
        if not self._open:
            return []
        name, self._open = f"response.{KINDS[self._open][1]}.done", ""
        item = self._items[-1]
        item["status"] = status
        part = item["content"][0]
        part["text"], self._texts = "".join(self._texts), []
        place = {**self._place(), "content_index": 0}
        said = {key: part[key] for key in ("text", "logprobs") if key in part}
        return [
            self._event(name, **place, **said),
            self._event("response.content_part.done", **place, part=part),
            self._item_event("done"),
        ]

    def _call_events(self, call: ToolCall) -> list[str]:
        closed = self._closed("completed")
        item = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        self._items.append(item)
        added = self._item_event("added")
        item |= {"arguments": call.arguments, "status": "completed"}
        details, self._details_left = self._details_left, {}
        details.pop("logprobs", None)  # log-probabilities belong to texts
        place, arguments = self._place(), call.arguments
        kind = "response.function_call_arguments"
        return [
            *closed,
            added,
            self._event(f"{kind}.delta", **place, delta=arguments, **details),
            self._event(f"{kind}.done", **place, name=call.name, arguments=arguments),
            self._item_event("done"),
        ]

    def _place(self) -> dict[str, Any]:
        """The id and the index of the last item."""
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _item_event(self, kind: str) -> str:
        place = {"output_index": len(self._items) - 1}
        return self._event(f"response.output_item.{kind}", **place, item=self._items[-1])

    def _event(self, kind: str, **fields: Any) -> str:
        content = {"type": kind, **fields, "sequence_number": self._num_events}
        self._num_events += 1
        return f"event: {kind}\ndata: {JSON.encode(content)}\n\n"

    def _response(self, output: Output | None) -> dict[str, Any]:
        """The response as it is now; with an output, as it ends."""
        asked, request = self.asked, self._request
        sampling = asked.choices[0].prepared.sampling
        is_cut = output is not None and output.finish_reason == "length"
        ended = "incomplete" if is_cut else "completed"
        details = {} if output is None else self._details(0, output)
        details.pop("logprobs", None)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None if output is None or is_cut else int(time.time()),
            "status": "in_progress" if output is None else ended,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": asked.model,
            "instructions": request.instructions,
            "output": self._items,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": self._said("max_tool_calls", int),
            "tools": [{**NOT_SAID, **tool} for tool in request.tools or ()],
            "tool_choice": request.tool_choice or "auto",
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "text": {"format": {"type": "text"}, **(request.text or {})},
            "reasoning": {"effort": None, "summary": None, **(request.reasoning or {})},
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if request.top_p is None else request.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "top_logprobs": request.top_logprobs or 0,
            "truncation": "disabled",
            "background": False,
            "service_tier": "default",
            "store": False,
            "previous_response_id": None,
            "metadata": request.metadata or {},
            "user": request.user,
            "safety_identifier": self._said("safety_identifier", str),
            "prompt_cache_key": self._said("prompt_cache_key", str),
            "usage": None if output is None else self._usage(output),
            **details,
            **request.ignored,
        }

    def _said(self, name: str, kind: type) -> Any:
        """The value of a field without effect; None where it is missing or of another kind."""
        value = (self._request.model_extra or {}).get(name)
        return value if isinstance(value, kind) else None

    def _usage(self, output: Output) -> dict[str, Any]:
        """Numbers of tokens by the names of /v1/responses."""
        known = usage(self.served, self.asked, [output])
        cached = known["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": known["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": known["completion_tokens"],
            "output_tokens_details": known["completion_tokens_details"],
            "total_tokens": known["total_tokens"],
            "eecore": known["eecore"],
        }
