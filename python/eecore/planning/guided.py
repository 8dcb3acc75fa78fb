"""Following a guide: which tokens are allowed next, and whether the text is complete.

llguidance computes a mask in microseconds, for each row of a run before it runs. It does so in a
process of the guide's own, so that a hostile guide costs no other request anything. Each question
names the tokens that it is about, and the matcher is moved there: nothing has to be undone after a
failure, a preemption or rejected drafts.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence as Ordered
from concurrent.futures import Future
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from eecore.errors import GuideError
from eecore.guide import Guide
from eecore.models import Tokenizer
from eecore.planning.matchers import GuideFork, GuideProcess, Matcher

Array = npt.NDArray[Any]

# Guides that are remembered, with their processes or errors.
MAX_KNOWN = 256
# Guides that are compiled at the same time.
MAX_COMPILING = 8


class Guided:
    """The progress of one request through its guide.

    Args:
        guides: start the guide's process again if it has ended.
        num_words: int32 words of a mask.
    """

    def __init__(self, guides: Guides, guide: Guide, process: GuideProcess, num_words: int) -> None:
        self._guides, self._guide, self.num_words = guides, guide, num_words
        self._start = Matcher(process)
        self._matcher: Matcher | None = None
        self._seen: list[int] = []  # tokens that the matcher has read; [] while unknown
        self._looked: _Look | None = None
        self._ahead: list[int] = []
        """Tokens of the text and drafts for which masks were last written."""
        self._over: dict[int, bool] = {}
        """By a number of these tokens: whether the text is over after them."""

    def is_over(self, token_ids: list[int]) -> bool:
        """Whether only the end of the text can follow these tokens. False where the guide cannot
        be followed: the next mask raises that error.
        """
        known = self._over.get(len(token_ids))
        if known is not None and token_ids == self._ahead[: len(token_ids)]:
            return known
        try:
            return self._look(token_ids).is_over
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
        if not kept:
            return _before(stops, self._look(token_ids).forced[:most])
        kept = kept[: self._at(token_ids, ("validate_tokens", kept))[0]]
        if len(kept) < most:
            calls = [("consume_tokens", kept), ("compute_ff_tokens",), ("rollback", len(kept))]
            forced: list[int] = self._at(token_ids, *calls)[1]
            kept += _before(stops, forced[: most - len(kept)])
        return kept

    def write_masks(self, masks: Array, token_ids: list[int], drafts: Ordered[int]) -> None:
        """Write the masks of allowed tokens after a text, and after each of its drafts.

        Args:
            masks: int32 [> num_drafts, num_words], of which the first rows are written.
            token_ids: tokens of the text so far.
            drafts: drafts from :meth:`drafts`.
        """
        if not drafts:
            masks[0] = self._mask(self._look(token_ids).mask)
            return
        calls: list[tuple[Any, ...]] = [("compute_bitmask",)]
        for draft in drafts:
            calls += [("consume_token", draft), ("is_stopped",), ("compute_bitmask",)]
        answers = self._at(token_ids, *calls, ("rollback", len(drafts)))
        self._ahead = [*token_ids, *drafts]
        self._over = dict(enumerate(answers[2::3], len(token_ids) + 1))
        for row, mask in zip(masks, answers[:-1:3], strict=False):
            row[:] = self._mask(mask)

    def _look(self, token_ids: list[int]) -> _Look:
        """The matcher's answers after a text without drafts, from one message."""
        looked = self._looked
        if looked is None or self._seen != token_ids:
            calls = [("is_stopped",), ("compute_ff_tokens",), ("compute_bitmask",)]
            looked = self._looked = _Look(*self._at(token_ids, *calls))
        return looked

    def _mask(self, mask: bytes) -> Array:
        """The words of a mask: int32 [num_words]."""
        words = np.frombuffer(mask, dtype=np.int32)
        return words[: self.num_words]  # llguidance may have room for one more token

    def _at(self, token_ids: list[int], *calls: tuple[Any, ...]) -> list[Any]:
        """Call the matcher after these tokens; the calls together leave it where it was."""
        seen, self._seen, self._looked = self._seen, [], None
        matcher = self._matcher
        if self._start.is_closed:
            self._start, matcher = Matcher(self._guides.process(self._guide)), None
        if matcher is None or not seen or token_ids[: len(seen)] != seen:
            seen, matcher = [], self._start.deep_copy()
        self._matcher = matcher
        _, *answers = matcher.calls(("consume_tokens", token_ids[len(seen) :]), *calls)
        self._seen = list(token_ids)
        return answers


class _Look(NamedTuple):
    """The matcher's answers after a text."""

    is_over: bool
    forced: list[int]
    """The next tokens, as far as there is only one choice."""
    mask: bytes


class Guides:
    """Compiles guides for one model; from any thread.

    Args:
        vocab_size: number of the model's logits.
        eos_token_ids: tokens that end a text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Ordered[int]
    ) -> None:
        self._source, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._compiled: dict[Guide, Future[GuideProcess]] = {}
        self._compiling = threading.BoundedSemaphore(MAX_COMPILING)

    def follow(self, guide: Guide) -> Guided:
        """A guide, at its beginning.

        Raises:
            GuideError: it cannot be compiled, or no text matches it.
        """
        process = self.process(guide, restarts=False)
        return Guided(self, guide, process, -(-self._vocab_size // 32))

    def knows(self, guide: Guide) -> bool:
        """Whether :meth:`follow` would return or raise at once."""
        known = self._compiled.get(guide)
        return known is not None and known.done()

    def process(self, guide: Guide, *, restarts: bool = True) -> GuideProcess:
        """The process of a guide, compiled once for all callers that wait for it.

        Args:
            restarts: whether a process that was ended to make room is started again.

        Raises:
            GuideError: it cannot be compiled, or no text matches it.
        """
        known = self._compiled.setdefault(guide, Future())
        if restarts and _has_ended(known):
            known = self._compiled[guide] = Future()
        if not (known.running() or known.done()):
            # In a thread of its own, which no interrupt reaches: each waiting caller gets a result.
            threading.Thread(target=self._compile, args=(guide, known), daemon=True).start()
        for oldest in list(self._compiled)[:-MAX_KNOWN]:
            self._compiled.pop(oldest, None)
        process = known.result()
        if process.failure is not None:
            raise process.failure
        return process

    def _compile(self, guide: Guide, found: Future[GuideProcess]) -> None:
        """Start the process of a guide, a few at a time, unless another thread has begun."""
        with self._lock:
            if found.running() or found.done():
                return
            found.set_running_or_notify_cancel()
        try:
            with self._lock:
                fork = self._fork
            with self._compiling:
                found.set_result(fork.process(guide))
        except BaseException as error:
            if not isinstance(error, GuideError):  # it may compile another time
                self._compiled.pop(guide, None)
            found.set_exception(error)

    @cached_property
    def _fork(self) -> GuideFork:
        if self._source is None:
            raise GuideError("guide: expected a model with a tokenizer, got one without")
        return GuideFork(self._source.to_json(), self._vocab_size, self._eos_token_ids)


def _has_ended(known: Future[GuideProcess]) -> bool:
    """Whether the guide had a process, which ended through no fault of the guide."""
    if not known.done() or known.exception() is not None:
        return False
    process = known.result()
    return process.is_closed and process.failure is None


def _before(stops: frozenset[int], tokens: Ordered[int]) -> list[int]:
    """Tokens before the first that is a stop."""
    return list(takewhile(lambda token: token not in stops, tokens))
