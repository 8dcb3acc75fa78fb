"""Thoughts with a budget or probes, and guides that begin after a thought.

A thought that has reached its budget ends at the next end of a sentence or line: from there masks
allow only the tokens that close it. A thought with a :class:`~eecore.ThoughtStop` has places at
which it is probed, and may end at each of them. All of this follows from the text alone, so that
drafts, batches and preemptions do not change it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence as Ordered
from functools import reduce
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from eecore.models import IncrementalDecoder, Tokenizer
from eecore.models.text.thinking import AFTER, Part, Reading, Thinking
from eecore.planning.guided import Array, Guided
from eecore.scheduling.sequence import MAX_DRAFTS
from eecore.thought_stop import ThoughtStop

OVERTIME = 32
"""Tokens after the budget in which the end of a sentence or line is awaited."""
ANSWER_ROOM = 16
"""Tokens that a budget leaves for the answer, where ``max_tokens`` has as many."""
# The end of a sentence or line. A point after a digit may be within a number.
ENDS = re.compile(r"\n\s*\Z|(?:(?<!\d)\.|[!?\u2026\u3002\uff01\uff1f])[\"'\u201d\u2019)\]*]*\s*\Z")
KNOWN = 64
"""Last tokens that show whether a text goes on from the last one: it is the text of one request."""
TAIL = 16
"""Last characters of a thought that :data:`ENDS` looks at."""


class Place(NamedTuple):
    """The thought after the first ``num_tokens`` tokens of a text."""

    reading: Reading
    decoder: IncrementalDecoder
    num_tokens: int = 0
    num_thought: int = 0
    """Tokens after the opening marker."""
    tail: str = ""
    """The end of the thought's text."""
    forced: tuple[int, ...] = ()
    """The tokens that have to come next."""
    was_forced: bool = False
    """Whether the tokens before the answer were forced."""
    probed: int = 0
    """Tokens of the thought before its last probe."""
    is_due: bool = False
    """Whether a probe comes here."""
    end: str | None = None
    """What has ended the thought; None: nothing yet, or the model."""
    answer: int | None = None
    """Tokens before the answer, once it has begun."""


class GuidedThought:
    """The progress of one request through its thought, and through its guide after that.

    Args:
        start: the beginning of the text.
        budget: tokens of the thought; None: no limit.
        max_tokens: of the request.
        stops: tokens that end the request.
        guided: the beginning of the answer's guide; None: the answer is free.
        vocab_size: number of the model's logits.
        stop: where the thought is probed; None: nowhere.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        thinking: Thinking,
        start: Reading,
        prompt_ids: Ordered[int],
        budget: int | None,
        max_tokens: int,
        stops: frozenset[int],
        guided: Guided | None,
        vocab_size: int,
        stop: ThoughtStop | None = None,
    ) -> None:
        self._thinking, self._guided = thinking, guided
        self._budget = max_tokens if budget is None and stop is not None else budget
        self._stop, self._verdict = stop, (-1, "")
        self.num_words = -(-vocab_size // 32)
        self._closing_id = thinking.closing_id
        self._quiet_until = 0
        """A number of tokens: see :meth:`is_quiet`."""
        self.binds_all = guided is not None
        """Whether any token may have a mask, so that drafts have to be known before it."""
        self.max_probe = thinking.max_closing
        """Tokens of a probe, at most."""
        if stop is not None:
            self.max_probe += stop.max_answer
            self.max_probe += len(tokenizer.encode(stop.stem, add_special_tokens=False))
        self._max_probed = max_tokens - self.max_probe
        """Tokens of the text before a probe, at most."""
        left = max_tokens - thinking.max_closing
        self._max_thought = left - min(ANSWER_ROOM, (left + 1) // 2)
        self._unstopped = np.full(self.num_words, -1, dtype=np.int32)
        for token in stops:
            if token < vocab_size:
                self._unstopped.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)
        decoder = tokenizer.incremental(prompt_ids, shown=thinking.shown)
        self._start = self._planned(Place(start, decoder))
        self._place, self._seen = self._start, list[int]()

    def is_over(self, token_ids: list[int]) -> bool:
        """Whether only the end of the text can follow these tokens."""
        if self._guided is None:
            return False
        answer = self.at(token_ids).answer
        return answer is not None and self._guided.is_over(token_ids[answer:])

    def is_quiet(self, token_ids: list[int], more: list[int]) -> bool:
        """Whether no probe and no mask comes after any of the tokens ``more`` of a text."""
        return len(token_ids) + len(more) < self._quiet_until and self._closing_id not in more

    def may_mask(self, token_ids: list[int], most: int) -> bool:
        """Whether the next token, or one after some of ``most`` drafts, may have a mask."""
        place = self.at(token_ids)
        if self.binds_all:
            return True
        if place.answer is not None or self._budget is None:
            return place.was_forced and place.answer == place.num_tokens
        left = min(self._budget - place.num_thought, self._max_thought - place.num_tokens)
        return bool(place.forced) or left <= most

    def closing(self, place: Place) -> tuple[int, ...]:
        """The tokens between a place and the answer, if the thought ends there."""
        if place.forced or place.reading.part is Part.CLOSED:
            return place.forced or self._thinking.after
        return self._thinking.closing(at_line=place.tail.endswith("\n"))

    def is_thought(self, token_ids: list[int]) -> bool:
        """Whether the next token comes before the answer."""
        return self.at(token_ids).answer is None

    def end_of(self, token_ids: list[int]) -> str | None:
        """What has ended a thought: ``model``, ``budget`` or a verdict; None: nothing yet."""
        place = self.at(token_ids)
        return (place.end or "model") if place.answer else None

    def end(self, num_tokens: int, verdict: str) -> None:
        """End the thought after these tokens, which are the text so far."""
        self._verdict = num_tokens, verdict
        self._place = self._planned(self._place)
        self._quiet_until = self._next_event(self._place)

    def drafts(
        self, token_ids: list[int], proposed: Ordered[int], most: int, stops: frozenset[int]
    ) -> list[int]:
        """The proposed tokens up to the first that is not allowed, then the tokens that are forced.

        Args:
            token_ids: tokens of the text so far.
            proposed: proposed drafts.
            most: maximum number of drafts to return.
            stops: tokens that end the text, which are not drafted.
        """
        place, kept = self.at(token_ids), list[int]()
        left = list(takewhile(lambda token: token not in stops, proposed[:most]))
        is_beginning = place.reading.part is Part.BEGINNING
        if self._guided is not None and is_beginning and left[:1] != [self._thinking.opening_id]:
            return self._guided.drafts([], left, most, stops)
        while len(kept) < most and (place.answer is None or self._guided is None):
            if not left and not place.forced:
                return kept
            if place.forced and left[:1] != [place.forced[0]]:
                left = []
            token = left.pop(0) if left else place.forced[0]
            kept.append(token)
            place = self._after(place, token)
        if self._guided is None or place.answer is None:
            return kept
        known = [*token_ids, *kept][place.answer :]
        return kept + self._guided.drafts(known, left, most - len(kept), stops)

    def write_masks(self, masks: Array, token_ids: list[int], drafts: Ordered[int]) -> None:
        """Write the masks of allowed tokens after a text, and after each of its drafts.

        Args:
            masks: int32 [> num_drafts, num_words], of which the first rows are written.
            token_ids: tokens of the text so far.
            drafts: drafts from :meth:`drafts`.
        """
        place = self.at(token_ids)
        if not self.binds_all:
            masks[len(drafts) + 1 :] = -1  # drafts that layers make come where no mask binds
        for row in range(len(drafts) + 1):
            if place.answer is not None and self._guided is not None:
                known = [*token_ids, *drafts[:row]][place.answer :]
                self._guided.write_masks(masks[row:], known, drafts[row:])
                return
            self._write_mask(masks[row], place)
            if row < len(drafts):
                place = self._after(place, drafts[row])

    def _write_mask(self, mask: Array, place: Place) -> None:
        """Write the mask of a place in the thought, or in a free answer."""
        opening, words = self._thinking.opening_id, mask.view(np.uint32)
        if place.forced:
            mask[:] = 0
            words[place.forced[0] // 32] = 1 << place.forced[0] % 32
        elif self._guided is not None and place.reading.part is Part.BEGINNING:
            self._guided.write_masks(mask[None], [], ())
            if opening is not None:
                words[opening // 32] |= np.uint32(1 << opening % 32)
        elif self._guided is not None or (place.was_forced and place.answer == place.num_tokens):
            mask[:] = self._unstopped  # the answer is not empty
        else:
            mask[:] = -1

    def at(self, token_ids: list[int]) -> Place:
        """The place after these tokens; once the answer has begun, the place where it did."""
        count = len(self._seen)
        if token_ids[max(count - KNOWN, 0) : count] != self._seen[-KNOWN:]:
            self._place, self._seen, self._quiet_until, count = self._start, [], 0, 0
        if count < len(token_ids):
            quiet = token_ids[count : max(self._quiet_until - 1, 0)]
            self._place = self._after_quiet(self._place, quiet)
            for token in token_ids[count + len(quiet) :]:
                self._place = self._after(self._place, token)
            self._seen += token_ids[count:]
            self._quiet_until = self._next_event(self._place)
        return self._place

    def _next_event(self, place: Place) -> int:
        """Tokens of the text at which a probe or a mask may come, if the thought goes on."""
        if self._guided is not None or place.forced:
            return 0
        until = sys.maxsize
        if place.reading.part is not Part.THOUGHT:
            return until if place.answer is not None and place.answer < place.num_tokens else 0
        if self._budget is not None:
            left = min(self._budget - place.num_thought, self._max_thought - place.num_tokens)
            until = place.num_tokens + left - MAX_DRAFTS
        if self._stop is not None:
            if self._stop.records and self._closing_id is None:
                return 0  # the end of a thought is a place as well, and has to be found at once
            left = self._stop.every - (place.num_thought - place.probed)
            until = min(until, place.num_tokens + left)
        return until

    def _after_quiet(self, place: Place, token_ids: Ordered[int]) -> Place:
        """The place after tokens without an event, unless they close the thought."""
        if not token_ids:
            return place
        decoder, count = place.decoder.copy(), len(token_ids)
        text = decoder.extend(token_ids)
        reading, _, _ = self._thinking.read(place.reading, text)
        if reading.part is not Part.THOUGHT:
            return reduce(self._after, token_ids, place)
        return place._replace(
            reading=reading,
            decoder=decoder,
            num_tokens=place.num_tokens + count,
            num_thought=place.num_thought + count,
            tail=(place.tail + text)[-TAIL:],
            is_due=False,
        )

    def _after(self, place: Place, token: int) -> Place:
        """The place after one more token."""
        count = place.num_tokens + 1
        if place.answer is not None:
            return place._replace(num_tokens=count, is_due=False)
        decoder = place.decoder.copy()
        text = decoder.add(token)
        reading, thought, _ = self._thinking.read(place.reading, text)
        if self._guided is not None and reading.part is Part.BEGINNING:
            reading = Reading(Part.ANSWER)  # a guided answer begins with its first token
        was_in = place.reading.part in (Part.OPENED, Part.THOUGHT)
        made = place._replace(
            reading=reading,
            decoder=decoder,
            num_tokens=count,
            num_thought=place.num_thought + was_in,
            tail="" if thought is None else (place.tail + text)[-TAIL:] if was_in else "",
            forced=place.forced[1:],
            is_due=False,
        )
        if place.reading.part is Part.BEGINNING and reading.part is Part.ANSWER:
            return made._replace(answer=0)  # there is no thought
        if not made.forced:
            made = self._planned(made)
        return self._probed(made, text) if was_in and self._stop is not None else made

    def _probed(self, place: Place, text: str) -> Place:
        """The place after a token of a thought with this text, with whether a probe comes there."""
        assert self._stop is not None
        count, every = place.num_thought - place.probed, self._stop.every
        is_end = place.reading.part not in (Part.OPENED, Part.THOUGHT)
        is_due = is_end and self._stop.records
        if not is_end and not place.forced:
            is_end = text != "" and place.tail.endswith(AFTER)
            is_due = count >= 2 * every or (count >= every and is_end)
        if not is_due or place.num_tokens > self._max_probed:
            return place
        return place._replace(probed=place.num_thought, is_due=True)

    def _planned(self, place: Place) -> Place:
        """The place with the tokens that have to come next, or the beginning of the answer."""
        part, count, budget = place.reading.part, place.num_tokens, self._budget
        if part in (Part.OPENED, Part.THOUGHT):
            if budget is None:
                return place
            over, (probed, verdict) = place.num_thought - budget, self._verdict
            is_end = budget == 0 or over >= OVERTIME or (over >= 0 and ENDS.search(place.tail))
            end = verdict if count == probed else None
            if count >= self._max_thought or is_end:
                end = "budget"
            if end is not None:
                forced = self.closing(place)
                return place._replace(forced=forced, was_forced=True, end=end)
        elif part in (Part.CLOSED, Part.ANSWER):
            after = self._thinking.after
            if self._guided is not None and part is Part.CLOSED and not place.was_forced and after:
                return place._replace(forced=after, was_forced=True)
            return place._replace(answer=count)
        return place
