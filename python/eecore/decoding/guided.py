"""Following a guide: which tokens may come next, and whether the text is whole.

llguidance computes a mask on the host in microseconds, for each row of a run before it runs. A
matcher is brought to where the tokens are, however often it is asked: nothing has to be undone
after a failure, a preemption or a round of which little stands.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Ordered
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from eecore.decoding.memory import Array
from eecore.errors import GuideError
from eecore.guide import Guide
from eecore.models import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

__all__ = ["FollowsGuides", "Guided", "Guides"]

MOST_COMPILED = 32
MOST_SHOWN = 300
# Between the parts of JSON: models that are not sure could go on with it for ever.
WHITESPACE = r"( |\n([ ]{0,32}|\t{0,16}))?"


class Guided:
    """One request's way through its guide.

    Args:
        start: a matcher that has seen nothing; it is copied.
        num_words: of a mask.
    """

    def __init__(self, start: LLMatcher, num_words: int) -> None:
        self._start, self.num_words = start, num_words
        self._matcher = start.deep_copy()
        self._seen: list[int] | None = []  # by the matcher; None: an interrupted call knows

    def is_over(self, token_ids: list[int]) -> bool:
        """Whether nothing but an end can follow these tokens."""
        return self._at(token_ids).is_stopped()

    def drafts(
        self, token_ids: list[int], proposed: Ordered[int], most: int, stops: frozenset[int]
    ) -> list[int]:
        """Drafts up to the first that may not come, then what alone can come behind them.

        Args:
            token_ids: of the text so far.
            proposed: drafts.
            most: of them.
            stops: tokens that end the text, of which none is drafted.
        """
        matcher = self._at(token_ids)
        kept = _before(stops, proposed[:most])
        kept = kept[: matcher.validate_tokens(kept)]
        if len(kept) < most:
            self._seen = None
            matcher.consume_tokens(kept)
            forced = _before(stops, matcher.compute_ff_tokens()[: most - len(kept)])
            matcher.rollback(len(kept))
            kept += forced
            self._settle(token_ids)
        return kept

    def write_masks(self, masks: Array, token_ids: list[int], drafts: Ordered[int]) -> None:
        """Which tokens may come behind a text, and behind each of its drafts.

        Args:
            masks: int32 [> num_drafts, num_words], of which the first rows are written.
            token_ids: of the text so far.
            drafts: of :meth:`drafts`.
        """
        matcher = self._at(token_ids)
        self._seen = None
        masks[0] = self._mask()
        for k, draft in enumerate(drafts, 1):
            matcher.consume_token(draft)
            masks[k] = self._mask()
        matcher.rollback(len(drafts))
        self._settle(token_ids)

    def _mask(self) -> Array:
        """Which tokens may come now: int32 [num_words]."""
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        return words[: self.num_words]  # there may be room for one token more

    def _at(self, token_ids: list[int]) -> LLMatcher:
        """The matcher, behind these tokens."""
        seen, self._seen = self._seen, None
        if seen is None or token_ids[: len(seen)] != seen:
            self._matcher, seen = self._start.deep_copy(), []
        self._matcher.consume_tokens(token_ids[len(seen) :])
        self._settle(token_ids)
        return self._matcher

    def _settle(self, token_ids: list[int]) -> None:
        """What the matcher has seen is known."""
        if self._matcher.is_error():
            raise GuideError(f"guide: expected to follow it, got: {_error(self._matcher)}")
        self._seen = list(token_ids)


class FollowsGuides(Protocol):
    """What compiles guides: this process, or the one whose engine follows them."""

    def follow(self, guide: Guide) -> object:
        """A guide, at its beginning.

        Raises:
            GuideError: it cannot be compiled, or nothing can follow it.
        """


class Guides:
    """Compiles guides for one model; from any thread.

    Args:
        tokenizer: of the model.
        vocab_size: of its logits.
        eos_token_ids: that end its texts.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Ordered[int]
    ) -> None:
        self._source, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._compiled: dict[Guide, LLMatcher] = {}

    def follow(self, guide: Guide) -> Guided:
        """A guide, at its beginning.

        Raises:
            GuideError: it cannot be compiled, or nothing can follow it.
        """
        start = self._compiled.pop(guide, None) or self._compile(guide)
        self._compiled[guide] = start  # the newest
        for oldest in list(self._compiled)[:-MOST_COMPILED]:
            self._compiled.pop(oldest, None)
        return Guided(start, -(-self._vocab_size // 32))

    def _compile(self, guide: Guide) -> LLMatcher:
        tokenizer, what = self._tokenizer, f"guide: expected a {guide.kind} that"
        from llguidance import LLMatcher, grammar_from

        try:
            if guide.kind == "json":
                text = LLMatcher.grammar_from_json_schema(
                    guide.text, defaults={"whitespace_pattern": WHITESPACE}
                )
            elif guide.kind == "choice":
                choices = map(_escaped, json.loads(guide.text))
                text = LLMatcher.grammar_from_regex("|".join(choices))
            else:
                text = grammar_from(guide.kind, guide.text)
            matcher = LLMatcher(tokenizer, text, log_level=0, limits=_limits())
        except (ValueError, RecursionError) as error:
            raise GuideError(f"{what} can be compiled, got: {str(error)[:MOST_SHOWN]}") from None
        if matcher.is_error():
            raise GuideError(f"{what} can be compiled, got: {_error(matcher)}")
        first = matcher.deep_copy()
        if not any(first.compute_bitmask()) or first.is_error():
            raise GuideError(f"{what} some text follows, got: {_error(first) or guide.text}")
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The model's, as llguidance reads it."""
        if self._source is None:
            raise GuideError("guide: expected a model with a tokenizer, got one without")
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise GuideError(
                "guide: expected llguidance to be there: pip install 'eecore[guided]'"
            ) from None
        try:
            return LLTokenizer(
                self._source.to_json(),
                n_vocab=self._vocab_size,
                eos_token=self._eos_token_ids or None,
            )
        except ValueError as error:
            raise GuideError(
                f"guide: expected a tokenizer that llguidance reads, got: {str(error)[:MOST_SHOWN]}"
            ) from error


def _limits() -> LLParserLimits:
    """What hostile guides may cost: a few tens of milliseconds at a time."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def _escaped(text: str) -> str:
    """As Rust's regular expressions have it."""
    return "".join(c if c.isalnum() or not c.isascii() else f"\\x{ord(c):02x}" for c in text)


def _before(stops: frozenset[int], tokens: Ordered[int]) -> list[int]:
    """Tokens before the first that is a stop."""
    kept: list[int] = []
    for token in tokens:
        if token in stops:
            break
        kept.append(token)
    return kept


def _error(matcher: LLMatcher) -> str:
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:MOST_SHOWN]
