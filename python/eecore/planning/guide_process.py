"""The processes in which guides are compiled and followed: llguidance runs nowhere else.

A guide comes from a client, and can ask for any amount of work, when it is compiled or in the mask
of any later token. So each guide has a process of its own, which the kernel ends when a call
exceeds its limits of time or memory. All are forked from one process that has read the tokenizer.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from eecore.bounded_process import MAX_SHOWN, bounded_seconds, limit_memory, used_memory
from eecore.channel import Channel
from eecore.guide import enforceable
from eecore.planning.gbnf import is_gbnf, lark_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Whitespace between the parts of JSON, bounded: an uncertain model could write it without end.
WHITESPACE = r"( |\n([ ]{0,32}|\t{0,16}))?"


def prepared(text: str, vocab_size: int, eos_token_ids: list[int]) -> Callable[[Channel], None]:
    """The function that the process of a guide runs: see :class:`eecore.bounded_process.Fork`.

    Args:
        text: the model's tokenizer, as a tokenizer.json.
        vocab_size: number of the model's logits.
        eos_token_ids: tokens that end a text.

    Raises:
        ValueError: llguidance cannot read the tokenizer.
    """
    from llguidance import LLTokenizer

    tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_token_ids or None)
    return lambda channel: _Follower(tokenizer, channel).run()


class _Follower:
    """Compiles one guide, and calls its matchers."""

    def __init__(self, tokenizer: LLTokenizer, channel: Channel) -> None:
        self._tokenizer, self._channel = tokenizer, channel
        self._matchers: dict[int, LLMatcher] = {}

    def run(self) -> None:
        """Answer messages until the engine has gone, or a call exceeds its limits."""
        message = self._channel.receive()
        if message is None:
            return
        *guide, bounds = message
        compile_seconds, call_seconds, mask_seconds, memory = bounds
        limit_memory(used_memory() + memory)
        with bounded_seconds(compile_seconds):
            error = self._compile(*guide)
        self._channel.send((error,))
        seconds = call_seconds
        while (message := self._channel.receive()) is not None:
            number, calls, forgotten = message
            for each in forgotten:
                self._matchers.pop(each, None)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            answers = [self._call(number, *call) for call in calls]
            error = _error(self._matchers[number])
            left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
            masks = sum(call[0] == "compute_bitmask" for call in calls)
            seconds = min(left + mask_seconds * masks, call_seconds)
            self._channel.send((error, answers))

    def _compile(self, kind: str, text: str, limits: dict[str, Any]) -> str:
        """Why a guide cannot be followed; empty if it can."""
        from llguidance import LLMatcher, LLParserLimits

        can = "can be compiled, got:"
        try:
            grammar = _grammar(kind, text)
            given = LLParserLimits(verbose_errors=False, **limits)
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=given)
        except (ValueError, RecursionError) as error:
            return f"{can} {str(error)[:MAX_SHOWN]}"
        if matcher.is_error():
            return f"{can} {_error(matcher)}"
        first = matcher.deep_copy()
        if not any(first.compute_bitmask()) or first.is_error():
            return f"matches some text, got: {_error(first) or text[:MAX_SHOWN]}"
        self._matchers[0] = matcher
        return ""

    def _call(self, number: int, name: str, *values: Any) -> Any:
        if name == "deep_copy":
            self._matchers[values[0]] = self._matchers[number].deep_copy()
            return None
        return getattr(self._matchers[number], name)(*values)


def _grammar(kind: str, text: str) -> str:
    """The grammar of a guide, for llguidance to compile.

    Raises:
        ValueError, RecursionError: the text is not of this kind.
    """
    from llguidance import LLMatcher

    if kind == "json":
        return LLMatcher.grammar_from_json_schema(
            json.dumps(enforceable(json.loads(text))),
            defaults={"whitespace_pattern": WHITESPACE},
        )
    if kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(_escaped, json.loads(text))))
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    return LLMatcher.grammar_from_lark(lark_of(text) if is_gbnf(text) else text)


def _escaped(text: str) -> str:
    """A text, escaped for a regular expression of Rust."""
    return "".join(c if c.isalnum() or not c.isascii() else f"\\x{ord(c):02x}" for c in text)


def _error(matcher: LLMatcher) -> str:
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:MAX_SHOWN]
