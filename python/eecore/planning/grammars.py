"""Guides, compiled by llguidance.

A guide comes from a client, and can ask for any amount of work. So it is first compiled in a
worker, which the kernel ends when that takes too much time or memory, or when llguidance crashes;
what could be compiled there is compiled here. The limits of llguidance bound each later step.
"""

from __future__ import annotations

import importlib.util
import json
import re
import resource
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from eecore.bounded_process import MAX_SHOWN, NotPrepared, Workers
from eecore.errors import GuideError
from eecore.guide import Guide, enforceable
from eecore.planning.gbnf import is_gbnf, lark_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from eecore.models import Tokenizer

COMPILE_SECONDS = 2.0
"""CPU time until the first mask."""
MEMORY = 256 << 20
"""Bytes until the first mask."""
STACK = 4 << 20
"""Bytes of the stack of a worker: less than a thread has here, whose stack then suffices, too."""
# Limits of llguidance for each step: the costliest mask of ten ambiguous grammars took 0.4 s, and a
# character of the text up to 8 KB.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 1_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
}
UNWRITTEN = "\ufdd2"
"""Begins the names of special tokens: Unicode has no character there."""
IN_BRACKETS = re.compile(r"(?s)<.+>")
TOKEN_NAME = re.compile(r"<[^<>\s\[\]]+>")
# The comments, texts, regular expressions and names of tokens in a grammar of Lark's.
LARK = re.compile(rf"""//.*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|{TOKEN_NAME.pattern}""")
# Whitespace between the parts of JSON, bounded: an uncertain model could write it without end.
WHITESPACE = r"( |\n([ ]{0,32}|\t{0,16}))?"


class Grammars:
    """Compiles guides within bounds of time and memory; from any thread.

    Args:
        vocab_size: number of the model's logits.
        eos_token_ids: tokens that end a text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._source = tokenizer
        self._sizes = vocab_size, list(eos_token_ids)
        self._lock = threading.Lock()

    def compiled(self, guide: Guide) -> LLMatcher:
        """A matcher at the beginning of a guide.

        Raises:
            GuideError: the guide cannot be compiled within bounds, or no text matches it.
        """
        with self._lock:
            workers = self._workers
        expected = f"guide: expected a {guide.kind} that"
        try:
            answer = workers.ask((guide.kind, guide.text), COMPILE_SECONDS, MEMORY)
        except NotPrepared as error:
            raise GuideError(
                f"guide: expected a tokenizer that llguidance reads, got: {error}"
            ) from None
        if answer is None:
            raise GuideError(f"{expected} can be compiled within bounds, got one too complex")
        why, grammar = answer
        if why:
            raise GuideError(f"{expected} {why}")
        with self._lock:
            tokenizer = self._tokenizer
        return matcher_of(tokenizer, grammar)

    @cached_property
    def _workers(self) -> Workers:
        if self._source is None:
            raise GuideError("guide: expected a model with a tokenizer, got one without")
        if importlib.util.find_spec("llguidance") is None:
            raise GuideError(
                "guide: expected llguidance to be there: pip install '.[guided]' in a clone"
            )
        return Workers(__name__, self._source.to_json(), *self._sizes)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        assert self._source is not None
        return _tokenizer(self._source.to_json(), *self._sizes)


def matcher_of(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of a grammar of llguidance; its error, if it has one, says why it
    cannot be used.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False, **LIMITS)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def error_of(matcher: LLMatcher) -> str:
    """Why a matcher cannot go on."""
    told = re.sub(rf"<non-verbose/>|{UNWRITTEN}|\\u{{fdd2}}", "", matcher.get_error())
    return " ".join(told.split())[:MAX_SHOWN]


def _tokenizer(text: str, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer(_renamed(text), n_vocab=vocab_size, eos_token=eos_token_ids or None)


def _renamed(text: str) -> str:
    """A tokenizer.json whose special tokens have names that are in no text.

    Where a guide forces the name of such a token as text, llguidance 1.9 allows the token alone,
    and then rejects it. Added tokens in angle brackets are special to it, whatever the file says.
    """
    made = json.loads(text)
    model = made["model"]
    for token in made["added_tokens"]:
        name = token["content"]
        if not (token["special"] or IN_BRACKETS.fullmatch(name)):
            continue
        token["content"] = hidden = _hidden(name)
        if isinstance(model["vocab"], dict) and name in model["vocab"]:
            model["vocab"][hidden] = model["vocab"].pop(name)
        elif isinstance(model["vocab"], list) and token["id"] < len(model["vocab"]):
            model["vocab"][token["id"]][0] = hidden
        if model.get("unk_token") == name:
            model["unk_token"] = hidden
    return json.dumps(made, ensure_ascii=False)


def _hidden(name: str) -> str:
    """The name of a special token for llguidance."""
    return f"<{UNWRITTEN}{name[1:-1] if IN_BRACKETS.fullmatch(name) else name}>"


# The code that runs in a worker


def prepared(
    text: str, vocab_size: int, eos_token_ids: list[int]
) -> Callable[[str, str], tuple[str, str]]:
    """The function that compiles: see :class:`eecore.bounded_process.Workers`.

    Args:
        text: the model's tokenizer, as a tokenizer.json.
        vocab_size: number of the model's logits.
        eos_token_ids: tokens that end a text.

    Raises:
        ValueError: llguidance cannot read the tokenizer.
    """
    tokenizer = _tokenizer(text, vocab_size, eos_token_ids)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    return lambda kind, text: _checked(tokenizer, kind, text)


def _checked(tokenizer: LLTokenizer, kind: str, text: str) -> tuple[str, str]:
    """Why a guide cannot be followed, empty if it can, and its grammar."""
    can = "can be compiled, got:"
    try:
        grammar = _grammar(kind, text)
        matcher = matcher_of(tokenizer, grammar)
    except (ValueError, RecursionError) as error:
        return f"{can} {str(error)[:MAX_SHOWN]}", ""
    if matcher.is_error():
        return f"{can} {error_of(matcher)}", ""
    if not any(matcher.compute_bitmask()) or matcher.is_error():
        return f"matches some text, got: {error_of(matcher) or text[:MAX_SHOWN]}", ""
    return "", grammar


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
    if is_gbnf(text):
        return LLMatcher.grammar_from_lark(lark_of(text))
    return LLMatcher.grammar_from_lark(LARK.sub(lambda found: _named(found[0]), text))


def _named(part: str) -> str:
    """A part of a grammar of Lark's; tokens have their names of :func:`_renamed`."""
    return _hidden(part) if TOKEN_NAME.fullmatch(part) else part


def _escaped(text: str) -> str:
    """A text, escaped for a regular expression of Rust."""
    return "".join(c if c.isalnum() or not c.isascii() else f"\\x{ord(c):02x}" for c in text)
