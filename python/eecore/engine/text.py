"""The text of a request as it grows: incremental decoding, thoughts and stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from eecore.models import IncrementalDecoder, Tokenizer
from eecore.models.text.thinking import Part, Reading, Thinking
from eecore.output import Piece

Shown = tuple[int, int]
"""Characters of the answer and of the thought."""


class Decoded(NamedTuple):
    """The text of a request's first tokens; decoding more tokens makes another ``Decoded``."""

    decoder: IncrementalDecoder
    num_tokens: int = 0
    text: str = ""
    stops: bool = False
    """A stop string has appeared; the text ends before it."""
    is_whole: bool = False
    """The decoder holds back no more text."""
    reading: Reading | None = None
    """How far the thought before the text has been read; None: there can be none."""
    thought: str | None = None
    """The thought, which is not part of the text."""


class TextStream:
    """Turns tokens into text that can be shown at once, and watches for stop strings. These end the
    answer alone: a thought may have them.

    Text that may begin a stop string is held back. Tokens are decoded when the caller asks for the
    text, or at once where there are stop strings: most requests are never read step by step, and
    decoding takes as long as other large parts of a step. The caller may read the steps of a
    request in another thread, since the state is never half changed.

    Args:
        token_ids: the request's tokens, a list that grows.
        thinking: the markers around a thought; None: all is text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        stop: tuple[str, ...],
        token_ids: list[int],
        thinking: Thinking | None = None,
    ) -> None:
        self._tokenizer, self._prompt_ids = tokenizer, prompt_ids
        self._stop = stop
        self.watches = bool(stop)
        """Whether there are stop strings."""
        self._longest = max(map(len, stop), default=1)
        self._token_ids = token_ids
        self._shown: Shown = 0, 0
        self._last_piece = 0, False, Piece()
        self._hidden: dict[int, str] = {}
        self._opening = ""
        """Text of the prompt that the text begins with."""
        self.has_thought = True
        """Whether the thought is part of the result."""
        self._begin(thinking)

    def _begin(self, thinking: Thinking | None) -> None:
        """Begin without tokens."""
        reading = None if thinking is None else thinking.start(self._prompt_ids)
        self._thinking = None if reading is None else thinking
        shown = {} if self._thinking is None else self._thinking.shown
        thought = "" if reading is not None and reading.part is Part.OPENED else None
        decoder = self._tokenizer.incremental(self._prompt_ids, shown={**self._hidden, **shown})
        self._decoded = Decoded(decoder, text=self._opening, reading=reading, thought=thought)

    def show(self, tokens: Mapping[int, str]) -> None:
        """Give special tokens a text, before there are any tokens."""
        self._hidden = {**self._hidden, **tokens}
        self._begin(self._thinking)

    @property
    def may_think(self) -> bool:
        """Whether a thought may come before the answer."""
        return self._thinking is not None

    def join(self, *, opens: bool = False) -> None:
        """Leave a thought and its markers in the text, before there are any tokens.

        Args:
            opens: whether the text has both markers, even where the prompt opened the thought, and
                where they are special tokens.
        """
        if opens and self._thinking is not None:
            if self._decoded.thought is not None:
                self._opening = f"{self._thinking.markers[0]}\n"
            self._hidden.update(self._tokenizer.hidden(self._thinking.markers))
        self._begin(None)

    def num_thought(self, decoded: Decoded) -> int:
        """The number of tokens of the thought."""
        if self._thinking is None or decoded.thought is None:
            return 0
        return self._thinking.num_tokens(self._token_ids[: decoded.num_tokens])

    @property
    def decoded(self) -> Decoded:
        """The text decoded so far."""
        return self._decoded

    def after(self, decoded: Decoded, token_ids: Sequence[int]) -> Decoded:
        """The decoded text with more tokens."""
        if not token_ids:
            return decoded
        decoder = decoded.decoder.copy()
        piece = decoder.extend(token_ids)
        return self._with(decoded, decoder, decoded.num_tokens + len(token_ids), piece)

    def whole(self, decoded: Decoded) -> Decoded:
        """The decoded text with what the decoder still holds back."""
        if decoded.is_whole:
            return decoded
        decoder = decoded.decoder.copy()
        piece = decoder.finish()
        return self._with(decoded, decoder, decoded.num_tokens, piece, is_whole=True)

    def keep(self, decoded: Decoded) -> None:
        """Store the decoded text of a request with stop strings."""
        self._decoded = decoded

    def shows(self, decoded: Decoded, *, final: bool) -> tuple[Piece, Shown]:
        """The new text that can be shown for certain, and the characters shown after it."""
        text, thought = decoded.text, self.thought(decoded) or ""
        end = len(text) if final else len(text) - self._held_back(text)
        begin, thought_begin = self._shown
        piece = Piece(text[begin:end], thought[thought_begin:])
        return piece, (max(begin, end), len(thought))

    def thought(self, decoded: Decoded) -> str | None:
        """The thought as the caller gets it."""
        return decoded.thought if self.has_thought else None

    def mark_shown(self, shown: Shown) -> None:
        """Store how many characters of the text have been shown."""
        self._shown = shown

    def show_up_to(self, num_tokens: int, *, final: bool = False) -> Piece:
        """The text that the first ``num_tokens`` add to what was shown, which is decoded now. A
        call that was interrupted and is repeated returns the same text.

        Args:
            final: whether no more tokens follow.
        """
        if self._last_piece[:2] != (num_tokens, final):
            decoded = self._decoded
            decoded = self.after(decoded, self._token_ids[decoded.num_tokens : num_tokens])
            if final:
                decoded = self.whole(decoded)
            added, shown = self.shows(decoded, final=final)
            piece = num_tokens, final, added
            self._decoded, self._shown, self._last_piece = decoded, shown, piece
        return self._last_piece[2]

    def _with(
        self,
        before: Decoded,
        decoder: IncrementalDecoder,
        num_tokens: int,
        piece: str,
        *,
        is_whole: bool = False,
    ) -> Decoded:
        """The text so far with one more piece, up to the first stop string."""
        text, stops, reading, thought = before.text, before.stops, before.reading, before.thought
        thinking = self._thinking
        if reading is not None and thinking is not None:
            if reading.part is not Part.ANSWER:
                reading, more, piece = thinking.read(reading, piece, last=is_whole)
                thought = thought if more is None else (thought or "") + thinking.spelled(more)
            piece = thinking.spelled(piece)
        if piece and not stops:
            text += piece
            if self._stop:
                search_from = max(0, len(before.text) - self._longest + 1)
                found = [at for s in self._stop if (at := text.find(s, search_from)) >= 0]
                if found:
                    text, stops = text[: min(found)], True
        return Decoded(decoder, num_tokens, text, stops, is_whole, reading, thought)

    def _held_back(self, text: str) -> int:
        """Length of the longest tail that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
