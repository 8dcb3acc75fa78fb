"""Answers in OpenAI's format: whole ones, and the chunks of a stream."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eecore.output import Output, RequestStats, Saved, StepOutput
from eecore.serving.asking import Asked, Choice
from eecore.serving.offsets import TextOffsets
from eecore.serving.refusals import ApiError
from eecore.serving.scored_prompts import echoed, finite, in_vllms_words, tops_by_text
from eecore.serving.served import ServedModel
from eecore.serving.tool_calls import ToolCall

Tokens = Output | StepOutput

JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
DONE = "data: [DONE]\n\n"
"""The end of a stream."""
PLACE = "\0"
"""Stands for the text of a chunk, whose other parts are the same from token to token."""


@dataclass
class Shape:
    """The answer to one request, in the format of an endpoint."""

    served: ServedModel
    asked: Asked
    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        policy = self.asked.choices[0].prepared.exit
        self._fingerprint = self.served.engine.engine.fingerprint(policy)
        self._frames: dict[tuple[int, bool], list[str]] = {}
        """The parts of a choice's chunks around their text, and around that of its thought."""
        self._counts: dict[int, int] = {}
        """Tokens so far of each choice that has begun."""
        self._is_plain = not (self._wants_tokens or self.asked.counts_usage)
        """Whether a stream has text only."""

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The whole answer."""
        choices = [self._choice(i, output) for i, output in enumerate(outputs)]
        body = {**self._head(self.whole_object), "choices": choices}
        return {**body, "usage": usage(self.served, self.asked, outputs)}

    def events(self, index: int, step: StepOutput) -> str:
        """The events that a step adds to the stream of a choice, ready to be sent."""
        found: list[str] = []
        if index not in self._counts:
            self._counts[index] = 0
            first = self.first(index, step)
            found += [] if first is None else [event(first)]
        self._counts[index] += len(step.token_ids)
        if self._is_plain:
            for text, is_thought in ((step.thought, True), (step.text, False)):
                if text:
                    frame = self._frame(index, is_thought=is_thought)
                    found.append(JSON.encode(text).join(frame))
        else:
            found += map(event, self.deltas(index, step))
        if step.output is not None:
            found.append(event(self.last(index, step.output)))
        return "".join(found)

    def first(self, index: int, step: StepOutput) -> dict[str, Any] | None:
        """A chunk before all others of a choice, if it needs one; ``step`` is the first."""
        raise NotImplementedError

    def deltas(self, index: int, step: StepOutput) -> list[dict[str, Any]]:
        """The chunks of a step; none where it adds nothing visible."""
        added = self._added(index, step)
        if not added and step.token_ids and self._wants_tokens:
            added = [self._text("")]
        details = self._details(index, step)
        return [
            self._chunk(index, each, **({} if number else details))
            for number, each in enumerate(added)
        ]

    def last(self, index: int, output: Output) -> dict[str, Any]:
        """The last chunk of a choice."""
        reason = self._reason(index, output)
        return self._chunk(index, self._text(None), finish_reason=reason)

    def total(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The chunk with the usage, after all choices."""
        total = usage(self.served, self.asked, outputs)
        return {**self._head(self.chunk_object), "choices": [], "usage": total}

    def end(self, outputs: Sequence[Output]) -> str:
        """The end of a stream after all choices, ready to be sent."""
        total = event(self.total(outputs)) if self.asked.includes_usage else ""
        return total + DONE

    def failed(self, error: ApiError) -> str:
        """The end of a stream that an error cut off, ready to be sent."""
        return event(error.body) + DONE

    @property
    def _wants_tokens(self) -> bool:
        return bool(self.asked.body.return_exit_layers) or self.asked.logprobs is not None

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.asked.model,
            "system_fingerprint": self._fingerprint,
            **self.asked.body.ignored,
        }

    def _frame(self, index: int, *, is_thought: bool) -> list[str]:
        """The parts of a chunk of a choice around its text."""
        frame = self._frames.get((index, is_thought))
        if frame is None:
            part = self._thought(PLACE) if is_thought else self._text(PLACE)
            frame = event(self._chunk(index, part)).split(JSON.encode(PLACE))
            self._frames[index, is_thought] = frame
        return frame

    def _chunk(self, index: int, part: dict[str, Any], **details: Any) -> dict[str, Any]:
        """A chunk with a part of one choice."""
        choice = {"index": index, **part, "logprobs": None, "finish_reason": None, **details}
        chunk = {**self._head(self.chunk_object), "choices": [choice]}
        if not self.asked.includes_usage:
            return chunk
        return {**chunk, "usage": self._usage_so_far(index) if self.asked.counts_usage else None}

    def _usage_so_far(self, index: int) -> dict[str, int]:
        prompt, count = self.asked.choices[index].prompt_tokens, self._counts[index]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "total_tokens": prompt + count,
        }

    def _details(self, index: int, tokens: Tokens) -> dict[str, Any]:
        """Log-probabilities and exit layers of tokens."""
        known: dict[str, Any] = {"logprobs": None}
        if self.asked.logprobs is not None:
            known["logprobs"] = self._logprobs(index, tokens)
        if self.asked.body.return_exit_layers:
            known["token_ids"] = tokens.token_ids
            known["tokens"] = [self.served.token_text(token) for token in tokens.token_ids]
            known["exit_layers"] = tokens.exit_layers
            known["confidences"] = [
                value if math.isfinite(value) else None for value in tokens.confidences
            ]
        return known

    def _added(self, index: int, step: StepOutput) -> list[dict[str, Any]]:  # noqa: ARG002
        """The parts of a chunk for the text of a step: text, or what the format makes of it."""
        thought = [self._thought(step.thought)] if step.thought else []
        return [*thought, self._text(step.text)] if step.text else thought

    def _reason(self, index: int, output: Output) -> str:  # noqa: ARG002
        return output.finish_reason

    def _scored(self, output: Output) -> dict[str, Any]:
        """The prompt's log-probabilities in vLLM's format, when the request asks for them."""
        count, entries = self.asked.body.prompt_logprobs, output.prompt_logprobs
        if count is None or entries is None:
            return {}
        return {"prompt_logprobs": in_vllms_words(self.served, entries, count)}

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        raise NotImplementedError

    def _text(self, text: str | None) -> dict[str, Any]:
        raise NotImplementedError

    def _thought(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, index: int, tokens: Tokens) -> dict[str, Any]:
        raise NotImplementedError


class ChatShape(Shape):
    """The answer of /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = self.asked.calls
        self._readers = [] if expected is None else [expected.reader() for _ in self.asked.choices]
        self._is_plain = self._is_plain and not self._readers

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        return {**super().whole(outputs), **self._scored(outputs[0])}

    def first(self, index: int, step: StepOutput) -> dict[str, Any]:  # noqa: ARG002
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        text = output.text or ""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._readers:
            parts = self._readers[index].add(text, last=True)
            calls = [part.whole() for part in parts if isinstance(part, ToolCall)]
            if calls:
                text = "".join(part for part in parts if isinstance(part, str))
                message |= {"content": text or None, "tool_calls": calls}
        if output.thought:
            message |= {**reasoning(output.thought), "content": message["content"] or None}
        choice = {"index": index, "message": message, **self._details(index, output)}
        return {**choice, "finish_reason": self._reason(index, output)}

    def _added(self, index: int, step: StepOutput) -> list[dict[str, Any]]:
        if not self._readers:
            return super()._added(index, step)
        reader, number = self._readers[index], self._readers[index].num_calls
        added = [self._thought(step.thought)] if step.thought else []
        for part in reader.add(step.text, last=step.finished):
            if isinstance(part, str):
                added.append(self._text(part))
                continue
            added += [{"delta": {"tool_calls": [piece]}} for piece in part.pieces(number)]
            number += 1
        return added

    def _reason(self, index: int, output: Output) -> str:
        """The finish reason: an answer that ends after tool calls waits for their results."""
        has_calls = bool(self._readers) and self._readers[index].num_calls > 0
        return (
            "tool_calls" if has_calls and output.finish_reason == "stop" else output.finish_reason
        )

    def _text(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}

    def _thought(self, text: str) -> dict[str, Any]:
        return {"delta": reasoning(text)}

    def _logprobs(self, index: int, tokens: Tokens) -> dict[str, Any]:  # noqa: ARG002
        tops: Sequence[dict[int, float]] = tokens.top_logprobs or [{} for _ in tokens.token_ids]
        each = zip(tokens.token_ids, tokens.logprobs or (), tops, strict=False)
        content = [
            {**self._entry(token, value), "top_logprobs": [self._entry(*t) for t in top.items()]}
            for token, value, top in each
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, spelled = self.served.token_text(token), self.served.token_bytes(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(spelled)}


class CompletionShape(Shape):
    """The answer of /v1/completions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._offsets: dict[int, TextOffsets] = {}
        """Offsets of each choice whose tokens have begun."""

    def first(self, index: int, step: StepOutput) -> dict[str, Any] | None:
        echo, logprobs = self.asked.choices[index].echo, self._echoed(index, step)
        if not echo and logprobs is None:
            return None
        return self._chunk(index, {"text": echo}, logprobs=logprobs)

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        text = self.asked.choices[index].echo + (output.text or "")
        choice = {"index": index, "text": text, **self._details(index, output)}
        logprobs = self._echoed(index, output)
        if logprobs is not None:
            choice["logprobs"] = {
                name: [*(values or ()), *(choice["logprobs"][name] or ())] or None
                for name, values in logprobs.items()
            }
        return {**choice, "finish_reason": output.finish_reason, **self._scored(output)}

    def _echoed(self, index: int, tokens: Tokens) -> dict[str, Any] | None:
        """Log-probabilities of the prompt that a text begins with."""
        is_asked = self.asked.logprobs is not None and getattr(self.asked.body, "echo", False)
        if not is_asked or tokens.prompt_logprobs is None:
            return None
        choice, count = self.asked.choices[index], self.asked.logprobs or 0
        ids, entries = choice.prepared.prompt_ids, tokens.prompt_logprobs
        return echoed(self.served, ids, entries, choice.echo, count)

    def _text(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}

    def _logprobs(self, index: int, tokens: Tokens) -> dict[str, Any]:
        texts = [self.served.token_text(token) for token in tokens.token_ids]
        logprobs = [finite(value) for value in tokens.logprobs or ()]
        tops = [
            tops_by_text(self.served, text, own, top)
            for text, own, top in zip(texts, logprobs, tokens.top_logprobs or (), strict=False)
        ]
        return {
            "tokens": texts,
            "token_logprobs": logprobs,
            "top_logprobs": tops or None,
            "text_offset": list(map(self._offsets_of(index).add, tokens.token_ids)),
        }

    def _offsets_of(self, index: int) -> TextOffsets:
        """The offsets of a choice's tokens, after its prompt where that is echoed."""
        if index not in self._offsets:
            choice = self.asked.choices[index]
            prompt_ids = choice.prepared.prompt_ids
            self._offsets[index] = TextOffsets(self.served, prompt_ids, len(choice.echo))
        return self._offsets[index]


def reasoning(thought: str) -> dict[str, str]:
    """A thought under the names that clients of llama.cpp and of vLLM read."""
    return {"reasoning_content": thought, "reasoning": thought}


def event(content: Any) -> str:
    """An event of a stream."""
    return f"data: {JSON.encode(content)}\n\n"


def usage(served: ServedModel, asked: Asked, outputs: Sequence[Output]) -> dict[str, Any]:
    """The usage of a request: its tokens, and the layers that they ran."""
    per_prompt = len(asked.choices) // asked.num_prompts
    prompt = asked.prompt_tokens
    cached = sum(output.stats.cached_tokens for output in outputs[::per_prompt])
    generated = sum(len(output.token_ids) for output in outputs)
    stats = [output.stats for output in outputs]
    took = Saved.of(stats)
    depth = sum(each.mean_exit_layer * each.generated_tokens for each in stats)
    run = sum(each.layers_run for each in stats)
    # The first token comes with the prompt, at full depth.
    full = sum(max(each.generated_tokens - 1, 0) for each in stats) * served.num_layers
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": sum(each.thought_tokens for each in stats)
        },
        "eecore": {
            "speedup": took.speedup,
            "lossless": took.is_lossless,
            "contract": stats[0].contract,
            "num_layers": served.num_layers,
            "full_passes": sum(each.full_passes for each in stats),
            "mean_exit_layer": depth / generated if generated else 0.0,
            "layers_run": run,
            "layers_skipped": max(full - run, 0),
            "layers_per_token": took.layers_run,
            "tokens_per_s": took.tokens_per_s,
            "full_depth_tokens_per_s": took.full_depth_tokens_per_s,
            "drafted": sum(each.drafted for each in stats),
            "accepted": sum(each.accepted for each in stats),
            **({"cut_by": "repetition"} if any(map(_repeats, asked.choices, outputs)) else {}),
            **_thoughts(stats),
        },
    }


def _thoughts(stats: Sequence[RequestStats]) -> dict[str, Any]:
    """What ended the thoughts of some outputs, where it may be something other than the model."""
    ends = [each.thought_end for each in stats]
    if not any(ends):
        return {}
    return {
        "thought_end": ends[0] if len(ends) == 1 else ends,
        "thought_contract": stats[0].thought_contract,
        "probe_rows": sum(each.probe_rows for each in stats),
    }


def _repeats(choice: Choice, output: Output) -> bool:
    """Whether an answer was ended since it repeated itself."""
    sampling, count = choice.prepared.sampling, len(output.token_ids)
    is_cut = sampling.ends_repetition and output.finish_reason == "length"
    return is_cut and count < sampling.max_tokens
