"""Following a guide: which tokens are allowed next, and whether the text is complete.

llguidance computes a mask in microseconds, for each row of a run before it runs. Each question
names the tokens that it is about, and the matcher is moved there: nothing has to be undone after a
failure, a preemption or rejected drafts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from eecore.errors import GuideError
from eecore.guide import Guide
from eecore.models import Tokenizer
from eecore.planning.grammars import Grammars, error_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

Array = npt.NDArray[Any]

MAX_KNOWN = 64
"""Guides that are remembered, compiled or refused."""
MAX_COMPILING = 8
"""Guides that are compiled at the same time."""
CALL_SECONDS = 1.0
"""CPU time that a request's guide may take in addition to :data:`MASK_SECONDS`."""
MASK_SECONDS = 0.02
"""CPU time of a mask on average."""


class Compiled:
    """A guide that was compiled.

    Args:
        start: a matcher that has read no token.
    """

    def __init__(self, start: LLMatcher) -> None:
        self.start = start
        self.refusal: str | None = None
        """Why the guide cannot be followed any more."""

    def check(self) -> None:
        """Raise an error if the guide cannot be followed.

        Raises:
            GuideError: why it cannot.
        """
        if self.refusal is not None:
            raise GuideError(self.refusal)


class Guided:
    """The progress of one request through its guide.

    Args:
        num_words: int32 words of a mask.
    """

    binds_all = True
    """Whether any token may have a mask, so that drafts have to be known before it."""

    def __init__(self, guide: Guide, compiled: Compiled, num_words: int) -> None:
        self._guide, self._compiled, self.num_words = guide, compiled, num_words
        self._matcher: LLMatcher | None = None
        self._seen: list[int] = []  # tokens that the matcher has read; [] while unknown
        self._seconds = CALL_SECONDS  # of CPU time that are left

    def is_quiet(self, token_ids: list[int], more: list[int]) -> bool:  # noqa: ARG002
        """Whether no token after these has a mask; a guide may have one everywhere."""
        return False

    def is_over(self, token_ids: list[int]) -> bool:
        """Whether only the end of the text can follow these tokens. False where the guide cannot
        be followed: the next mask raises that error.
        """
        try:
            with self._at(token_ids) as matcher:
                return matcher.is_stopped()
        except GuideError:
            return False

    def drafts(
        self, token_ids: list[int], proposed: Ordered[int], most: int, stops: frozenset[int]
    ) -> list[int]:
        """The proposed tokens up to the first that the guide forbids, then the tokens it forces.

        Args:
            token_ids: tokens of the text so far.
            proposed: proposed drafts.
            most: maximum number of drafts to return.
            stops: tokens that end the text, which are not drafted.
        """
        kept = _before(stops, proposed[:most])
        with self._at(token_ids) as matcher:
            if kept:
                kept = kept[: matcher.validate_tokens(kept)]
            if len(kept) < most:
                matcher.consume_tokens(kept)
                forced = matcher.compute_ff_tokens()
                matcher.rollback(len(kept))
                kept += _before(stops, forced[: most - len(kept)])
        return kept

    def write_masks(self, masks: Array, token_ids: list[int], drafts: Ordered[int]) -> None:
        """Write the masks of allowed tokens after a text, and after each of its drafts.

        Args:
            masks: int32 [> num_drafts, num_words], of which the first rows are written.
            token_ids: tokens of the text so far.
            drafts: drafts from :meth:`drafts`.
        """
        with self._at(token_ids, 1 + len(drafts)) as matcher:
            masks[0] = self._mask(matcher)
            for row, draft in enumerate(drafts, 1):
                matcher.consume_token(draft)
                masks[row] = self._mask(matcher)
            matcher.rollback(len(drafts))

    def _mask(self, matcher: LLMatcher) -> Array:
        """The words of a mask: int32 [num_words]."""
        words = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
        return words[: self.num_words]  # llguidance may have room for one more token

    @contextmanager
    def _at(self, token_ids: list[int], num_masks: int = 0) -> Iterator[LLMatcher]:
        """The matcher after these tokens, for calls that together leave it where it was.

        Args:
            num_masks: masks that the calls compute.

        Raises:
            GuideError: the matcher cannot go on, or has exceeded its bounds.
        """
        self._compiled.check()
        seen, self._seen = self._seen, []
        matcher = self._matcher
        began = time.thread_time()
        if matcher is None or not seen or token_ids[: len(seen)] != seen:
            seen, matcher = [], self._compiled.start.deep_copy()
            self._matcher = matcher
        matcher.consume_tokens(token_ids[len(seen) :])
        yield matcher
        self._seconds -= time.thread_time() - began
        if self._seconds < 0:
            self._compiled.refusal = (
                f"guide: expected a {self._guide.kind} that can be followed within bounds, got one "
                "too complex"
            )
            self._compiled.check()
        self._seconds = min(self._seconds + MASK_SECONDS * num_masks, CALL_SECONDS)
        if matcher.is_error():
            raise GuideError(f"guide: expected to follow it, got: {error_of(matcher)}")
        self._seen = list(token_ids)


class Guides:
    """The guides of one model, each compiled once for all requests; from any thread.

    Args:
        vocab_size: number of the model's logits.
        eos_token_ids: tokens that end a text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Ordered[int]
    ) -> None:
        self._grammars = Grammars(tokenizer, vocab_size, eos_token_ids)
        self._num_words = -(-vocab_size // 32)
        self._lock = threading.Lock()
        self._compiling = threading.BoundedSemaphore(MAX_COMPILING)
        self._known: dict[Guide, Future[Compiled]] = {}

    def follow(self, guide: Guide) -> Guided:
        """A guide, at its beginning. It is compiled once for all callers that wait for it.

        Raises:
            GuideError: it cannot be compiled, or no text matches it.
        """
        known = self._known.setdefault(guide, Future())
        if not (known.running() or known.done()):
            # In a thread of its own, which no interrupt reaches: each waiting caller gets a result.
            threading.Thread(target=self._compile, args=(guide, known), daemon=True).start()
        for oldest in list(self._known)[:-MAX_KNOWN]:
            self._known.pop(oldest, None)
        compiled = known.result()
        compiled.check()
        return Guided(guide, compiled, self._num_words)

    def _compile(self, guide: Guide, found: Future[Compiled]) -> None:
        """Compile a guide, a few at a time, unless another thread has begun."""
        with self._lock:
            if found.running() or found.done():
                return
            found.set_running_or_notify_cancel()
        try:
            with self._compiling:
                found.set_result(Compiled(self._grammars.compiled(guide)))
        except BaseException as error:
            if not isinstance(error, GuideError):  # it may compile another time
                self._known.pop(guide, None)
            found.set_exception(error)


def _before(stops: frozenset[int], tokens: Ordered[int]) -> list[int]:
    """Tokens before the first that is a stop."""
    return list(takewhile(lambda token: token not in stops, tokens))
